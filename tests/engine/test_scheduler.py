"""Keys of whole tensors: the largest first, and one that has to wait for memory holds up no other."""

import threading

import pytest
import torch
from safetensors.torch import save_file

from mecha_exp import EngineOptions, Job, Parameter, Return, merge_many, merge_method
from mecha_exp.engine.runtime.scheduler import KeyTask, Scheduler

SECONDS = 20


class Task(KeyTask):
    """A key that is one piece of work."""

    def __init__(self, name, whole_bytes, work=lambda: None):
        self.keys, self.whole_bytes = (name,), whole_bytes
        self._tiles = [lambda scratch: work()]

    def advance(self):
        return [self._tiles.pop()] if self._tiles else None


def run(*tasks, workers=2, budget=10):
    """The names of tasks in the order in which they ended."""
    done = []
    options = EngineOptions(workers=workers, memory_budget=budget)
    Scheduler(iter(tasks), iter(()), options, done.extend).run()
    return done


def test_a_key_that_does_not_fit_lets_smaller_ones_pass():
    small_is_done = threading.Event()
    first = Task("first", 6, lambda: small_is_done.wait(SECONDS))
    small = Task("small", 4, small_is_done.set)
    assert run(first, Task("large", 5), small) == ["small", "first", "large"]
    assert small_is_done.is_set()


def test_a_key_beyond_the_budget_is_made_alone():
    held, most, lock = [], [], threading.Lock()

    def task(name, nbytes):
        def work():
            with lock:
                held.append(nbytes)
                most.append(sum(held))
            with lock:
                held.remove(nbytes)

        return Task(name, nbytes, work)

    sizes = [25, 9, 8, 7, 3, 2, 1, 0]
    done = run(*(task(str(size), size) for size in sizes), workers=3)
    assert sorted(done) == sorted(map(str, sizes))
    assert all(total <= 10 or total == 25 for total in most)


@pytest.mark.parametrize("workers", [1, 3])
def test_an_error_among_waiting_keys_ends_the_merge(workers):
    def fail():
        raise RuntimeError("no such luck")

    with pytest.raises(RuntimeError, match="no such luck"):
        run(Task("a", 9), Task("b", 9, fail), Task("c", 9), workers=workers)


def test_keys_of_whole_tensors_are_made_by_size(tmp_path):
    made = []

    @merge_method(register=False)
    def noting(a: Parameter(torch.Tensor)) -> Return(torch.Tensor):
        made.append(a.numel())
        return a

    sizes = {"a": 200, "b": 70_000, "c": 30_000, "d": 90_000, "e": 30_000}
    save_file({key: torch.zeros(size) for key, size in sizes.items()}, tmp_path / "a.safetensors")
    job = Job(noting(str(tmp_path / "a.safetensors")), tmp_path / "merged.safetensors")
    merge_many([job], EngineOptions(workers=1))
    assert [size for size in made if size > 200] == [90_000, 70_000, 30_000, 30_000]
