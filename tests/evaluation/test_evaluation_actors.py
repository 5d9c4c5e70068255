"""Pools whose workers are actors: they measure what processes measure, and few models are on their way."""

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file

from mecha_exp.cluster import LostWorker
from mecha_exp.errors import ClusterError, EvaluationError
from mecha_exp.evaluation import Context, read_scoring
from mecha_exp.evaluation.isolation.pool import pools_on
from mecha_exp.plugins import load_plugins

PLUGIN = """
from mecha_exp import evaluator

@evaluator("test_actors_sum", metric="sum")
def total(state_dict, *, context, changes: bool = False):
    assert context.report is None
    if changes:
        next(iter(state_dict.values())).fill_(1)
    return {"sum": sum(float(tensor.double().sum()) for tensor in state_dict.values())}
"""
MODEL = {
    "half": torch.arange(6).to(torch.bfloat16).view(2, 3).T,
    "eighth": torch.ones(5).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.empty(0, 3),
    "flags": torch.tensor([True, False]),
}


class InThisProcess:
    """An actor whose calls are made here; the first ones raise what they are told to."""

    made: ClassVar[list["InThisProcess"]] = []
    failures: ClassVar[list[Exception]] = []
    at_once: ClassVar[list[int]] = []
    lock = threading.Lock()
    calls = 0

    def __init__(self) -> None:
        self.made.append(self)
        self.closed = 0
        self.is_ready = False

    def call(self, function, arguments, arrays, seconds=None):
        if not self.is_ready:  # the plugins are loaded by a call of its own, without a time limit
            self.is_ready = seconds is None
            return function(*arguments, arrays)
        with self.lock:
            InThisProcess.calls += 1
            self.at_once.append(self.calls)
            failure = self.failures.pop() if self.failures else None
        try:
            if failure:
                raise failure
            time.sleep(0.02)
            return function(*arguments, arrays)
        finally:
            with self.lock:
                InThisProcess.calls -= 1

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def scoring(tmp_path, monkeypatch) -> Iterator:
    """Reads the settings of an evaluator with two workers, which are actors in this process."""
    path = tmp_path / "actors_plugin.py"
    path.write_text(PLUGIN)
    load_plugins([str(path)])
    for name in ("made", "failures", "at_once"):
        monkeypatch.setattr(InThisProcess, name, [])
    with pools_on(InThisProcess):
        yield lambda **more: read_scoring(
            {"name": "test_actors_sum", "workers": 2, **more}, {"half": (3, 2)}, [str(path)]
        )
    assert all(actor.closed for actor in InThisProcess.made)


def test_actors_measure_tensors_of_all_dtypes_and_files_as_this_process_does(scoring, tmp_path):
    read = scoring()
    save_file({key: tensor.contiguous() for key, tensor in MODEL.items()}, tmp_path / "m.safetensors")

    measured = [read.measure(model, Context("a")) for model in (MODEL, tmp_path / "m.safetensors")]

    assert measured == [read.evaluations[0].score(MODEL).metrics] * 2 == [{"sum": 23.5}] * 2


def test_as_many_models_are_on_their_way_as_there_are_actors(scoring):
    read = scoring()

    started = [read.start(read.evaluations[0], MODEL, Context(str(n))) for n in range(8)]

    assert [future.result().metrics["sum"] for future in started] == [23.5] * 8
    assert max(InThisProcess.at_once) == 2
    assert len(InThisProcess.made) == 2


def test_what_is_waited_for_is_measured_before_what_was_begun_and_waits(scoring):
    read = scoring()
    started = [read.start(read.evaluations[0], MODEL, Context(str(n))) for n in range(60)]

    assert read.measure(MODEL, Context("an input"))["sum"] == 23.5

    assert sum(not future.done() for future in started) > 30
    assert all(future.result().metrics["sum"] == 23.5 for future in started)


def test_a_lost_or_slow_actor_is_tried_once_more(scoring, caplog):
    read = scoring(timeout=3)
    for failure, words in ((LostWorker("killed"), "its process (killed)"), (TimeoutError(), "after 3 s")):
        InThisProcess.failures[:] = [failure]
        assert read.measure(MODEL, Context("alpha=0.3"))["sum"] == 23.5
        assert words in caplog.text and "It is tried once more." in caplog.text

    InThisProcess.failures[:] = [LostWorker("killed")] * 2
    with pytest.raises(EvaluationError, match=r"'test_actors_sum' ended its process \(killed\): it crashed"):
        read.measure(MODEL)


def test_what_an_evaluator_or_the_cluster_says_is_an_error_of_the_evaluation(scoring):
    with pytest.raises(EvaluationError, match=r"changed tensors of the model in place: half"):
        scoring(changes=True).measure({key: tensor.clone() for key, tensor in MODEL.items()})

    InThisProcess.failures[:] = [ClusterError("Ray did not make a call on an actor: full")]
    with pytest.raises(EvaluationError, match="Ray did not make a call on an actor: full"):
        scoring().measure(MODEL)


def test_what_is_not_wanted_any_more_is_not_measured(scoring):
    read = scoring()

    unwanted = read.start(read.evaluations[0], MODEL, is_wanted=lambda: False)

    with pytest.raises(EvaluationError, match="another process measures it"):
        unwanted.result()
    assert InThisProcess.at_once == []


def test_what_is_not_measured_is_not_kept_in_memory(scoring):
    read = scoring()
    model = {"half": torch.ones(3)}
    tensor = weakref.ref(model["half"])

    unwanted = read.start(read.evaluations[0], model, is_wanted=lambda: False)
    del model

    assert isinstance(unwanted.exception(), EvaluationError)
    gc.collect()
    assert tensor() is None
