"""Tiles that go from files through a loop to files without Python: the same bytes, the same errors."""

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file
from state_dicts import contents

import mecha_exp as mx
from mecha_exp import CheckpointError, EngineOptions, Job, MergeError, merge_many, plan
from mecha_exp.checkpoint import Checkpoint, CheckpointWriter, open_stored, positional
from mecha_exp.engine.compiler import object_file
from mecha_exp.engine.ir.reductions import REDUCTION_BLOCK
from mecha_exp.engine.runtime import small_keys
from mecha_exp.engine.runtime.kernel_call import StreamLaunch
from mecha_exp.engine.runtime.key_pass import KeyPass
from mecha_exp.engine.runtime.scheduler import Scheduler
from mecha_exp.graph.nodes import InMemory
from mecha_exp.sources.memory import MemorySource
from mecha_exp.sources.vocabulary import VocabularyView

pytestmark = pytest.mark.skipif(not object_file.is_possible(), reason="loops call each other on Linux only")

TILE = REDUCTION_BLOCK
COUNT = 3 * TILE + 1001  # four tiles
KEYS = {"w": (COUNT, torch.float32), "half": (COUNT, torch.float16), "bias": (7, torch.float16)}
RECIPES = {
    "elementwise": lambda a, b, c: mx.weighted_sum(a, b, alpha=0.3),
    "sums": lambda a, b, c: mx.slerp(a, b, alpha=0.3),
    "ranks": lambda a, b, c: mx.add_difference_ties(a, b, c, alpha=0.7, k=0.2),
    "draws": lambda a, b, c: mx.dare_ties(a, b, c, density=0.5),
}
NO_FILE = positional.FileRegion(1_000_000, 0)


@pytest.fixture
def paths(tmp_path):
    generator = torch.Generator().manual_seed(0)
    for name in "abc":
        drawn = {key: torch.randn(count, generator=generator) * 0.1 for key, (count, _) in KEYS.items()}
        save_file({key: drawn[key].to(KEYS[key][1]) for key in drawn}, tmp_path / f"{name}.safetensors")
    return [str(tmp_path / f"{name}.safetensors") for name in "abc"]


@pytest.fixture
def steps(monkeypatch):
    """Counts the entries that are streamed, and the tiles that Python does."""
    counted = Counter()
    stream, run_tile = StreamLaunch.run, KeyPass._run_tile

    def count_stream(self, tile, length, scratch):
        done = stream(self, tile, length, scratch)
        counted["streamed"] += done
        return done

    def count_tile(self, tile, scratch):
        counted["by Python"] += not self._pass.sampled
        run_tile(self, tile, scratch)

    monkeypatch.setattr(StreamLaunch, "run", count_stream)
    monkeypatch.setattr(KeyPass, "_run_tile", count_tile)
    return counted


def merged(recipe, folder, dtype=None, **options):
    target = folder / "merged.safetensors"
    report = merge_many(
        [Job(recipe, target, dtype)], EngineOptions(**{"tile_size": TILE, "fuse": "always", **options})
    )
    return contents(load_file(target)), report


def change(path, key, place, value):
    tensors = load_file(path)
    tensors[key][place] = value
    save_file(tensors, path)


@pytest.mark.parametrize("name", RECIPES)
def test_streamed_tiles_have_the_bytes_of_those_by_torch(name, paths, tmp_path, steps):
    recipe = RECIPES[name](*paths)
    expected, _ = merged(recipe, tmp_path, fuse="never")
    assert not steps["streamed"]
    steps.clear()
    for workers in (1, 3):
        assert merged(recipe, tmp_path, workers=workers)[0] == expected
    assert steps["streamed"] >= 2 * sum(count for count, _ in KEYS.values())
    assert not steps["by Python"]


@pytest.mark.parametrize("name", RECIPES)
def test_a_tile_that_python_has_to_look_at_changes_no_bytes(name, paths, tmp_path, steps):
    change(paths[1], "half", TILE + 5, torch.inf)  # only in one of the tiles something is unusual
    change(paths[2], "w", 2 * TILE, torch.nan)
    recipe = RECIPES[name](*paths)
    expected, by_torch = merged(recipe, tmp_path, fuse="never", on_nonfinite="keep")
    steps.clear()
    found, report = merged(recipe, tmp_path, on_nonfinite="keep")
    assert found == expected
    assert report.nonfinite_values == by_torch.nonfinite_values
    assert steps["streamed"]
    assert steps["by Python"]


def test_what_overflows_is_counted(paths, tmp_path, steps):
    change(paths[0], "w", [3, TILE + 5, TILE + 6, COUNT - 1], 70000.0)
    found, report = merged(mx.n_average(paths[0], paths[0]), tmp_path, torch.float16)
    assert report.nonfinite_values == (4,)
    assert found["w"] == contents({"w": load_file(paths[0])["w"].half()})["w"]
    assert steps["by Python"] == 3  # of five: the keys' halves are streamed
    with pytest.raises(MergeError, match=r"'w' of the output has 1 value that is not finite"):
        merged(mx.n_average(paths[0], paths[0]), tmp_path, torch.float16, strict=True)


@pytest.mark.parametrize("name", RECIPES)
def test_a_value_that_is_not_finite_is_an_error_that_says_where(name, paths, tmp_path):
    change(paths[1], "half", 2 * TILE + 5, torch.nan)
    said = rf"b\.safetensors: the key 'half' has .* not finite \(1 NaN or infinite .* {2 * TILE} to"
    with pytest.raises(MergeError, match=said):
        merged(RECIPES[name](*paths), tmp_path)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("side", ["read", "written"])
def test_what_cannot_be_moved_is_left_to_python(name, side, paths, tmp_path, steps, monkeypatch):
    recipe = RECIPES[name](*paths)
    expected, _ = merged(recipe, tmp_path)

    @contextmanager
    def nowhere(self, key):
        yield NO_FILE

    if side == "read":
        monkeypatch.setattr(Checkpoint, "region", lambda self, key: NO_FILE)
    else:
        monkeypatch.setattr(CheckpointWriter, "writing_at", nowhere)
    steps.clear()
    assert merged(recipe, tmp_path)[0] == expected
    assert steps["by Python"]


def test_a_file_that_ends_too_early_is_an_error(paths, tmp_path):
    def shorten(key, nbytes):
        os.truncate(paths[1], 1000)

    jobs = [Job(mx.weighted_sum(*paths[:2], alpha=0.3), tmp_path / "merged.safetensors")]
    with pytest.raises(CheckpointError, match=r"b\.safetensors .*it was changed while it was being read"):
        merge_many(jobs, EngineOptions(tile_size=TILE, fuse="always", workers=1), shorten)
    assert not (tmp_path / "merged.safetensors").exists()


LIMITED = """
import resource, sys
import mecha_exp as mx
from mecha_exp import CheckpointError, EngineOptions, Job, merge_many

def limit(key, nbytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))

job = Job(mx.weighted_sum(*sys.argv[1:3], alpha=0.3), sys.argv[3])
try:
    merge_many([job], EngineOptions(tile_size=65536, fuse="always", workers=1), limit)
except CheckpointError as error:
    sys.exit(str(error))
"""


def test_a_write_limit_is_an_error(paths, tmp_path):
    command = [sys.executable, "-c", LIMITED, *paths[:2], str(tmp_path / "merged.safetensors")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert "merged.safetensors cannot be written: the file is larger than" in done.stderr
    assert done.returncode == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.safetensors",
        "b.safetensors",
        "c.safetensors",
    ]


def test_several_outputs_are_streamed_together(paths, tmp_path, steps):
    jobs = [
        Job(
            mx.weighted_sum(*paths[:2], alpha=alpha),
            tmp_path / f"{alpha}.safetensors",
            statistics=alpha == 0.2,
        )
        for alpha in (0.1, 0.2)
    ]
    merge_many(jobs, EngineOptions(tile_size=TILE, fuse="always"))
    assert not steps["by Python"]
    for job in jobs:
        assert contents(load_file(job.output)) == merged(job.recipe, tmp_path, fuse="never")[0]


@pytest.mark.parametrize(
    "case",
    ["memory", "receiver", "converted dtype", "no positions"],
)
def test_what_is_no_file_or_no_such_dtype_goes_through_python(case, paths, tmp_path, steps, monkeypatch):
    recipe, target, dtype = mx.weighted_sum(*paths[:2], alpha=0.3), tmp_path / "merged.safetensors", None
    if case == "memory":
        recipe = mx.weighted_sum(paths[0], mx.model(load_file(paths[1])), alpha=0.3)
    elif case == "receiver":
        target = lambda key, tensor: None  # noqa: E731
    elif case == "converted dtype":
        dtype = torch.float64
    else:
        monkeypatch.setattr(positional, "POSITIONAL", False)
    merge_many([Job(recipe, target, dtype)], EngineOptions(fuse="always"))
    assert not steps["streamed"]
    assert steps["by Python"]


def test_places_are_those_of_the_bytes(paths, tmp_path):
    """Of a file, of a key that is lent, and of none that is resized or in memory."""
    with open_stored(tmp_path / "a.safetensors") as stored:
        adapted = VocabularyView(stored, {"tied": "half"}, rows={"w": (COUNT + 1, stored)})
        for source, key in ((stored, "w"), (adapted, "tied")):
            place = source.region(key)
            raw = os.pread(place.descriptor, source.info(key).nbytes, place.offset)
            expected = bytearray(len(raw))
            source.read_bytes_into(key, 0, memoryview(expected))
            assert raw == expected
        assert adapted.region("w") is None
    assert MemorySource(InMemory({"w": torch.ones(3)}, "memory")).region("w") is None


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_one_worker_at_a_time_is_at_small_keys(workers, monkeypatch):
    sizes = {f"{number:04}": COUNT if number % 150 == 149 else 3 for number in range(600)}
    tensors = {key: torch.full((size,), float(key)) for key, size in sizes.items()}
    at_small, most, lock = set(), [0], threading.Lock()
    advance = Scheduler._advance

    def watched(self, run, scratch):
        if run.keys[0].numel == 3:
            with lock:
                at_small.add(run)
                most[0] = max(most[0], len(at_small))
            time.sleep(1e-5)  # others may come in between
            with lock:
                at_small.discard(run)
        advance(self, run, scratch)

    monkeypatch.setattr(Scheduler, "_advance", watched)
    monkeypatch.setattr(small_keys, "TOGETHER", 12)  # four keys
    made = {}
    merge_many([Job(mx.n_average(mx.model(tensors)), made)], EngineOptions(workers=workers))
    assert most == [1]
    assert contents(made) == contents(tensors)


@pytest.mark.parametrize(("room_for", "together"), [(1, 1), (2, 2)])
def test_whole_tensors_are_there_at_once_as_far_as_the_memory_budget_goes(room_for, together):
    running, most, lock = [0], [0], threading.Lock()

    @mx.merge_method(register=False)
    def slow(a: mx.Parameter(torch.Tensor)) -> mx.Return(torch.Tensor):
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.2)
        with lock:
            running[0] -= 1
        return a

    job = Job(slow(mx.model({key: torch.ones(100) for key in "123"})), {})
    with plan([job]) as planned:
        needed = planned.whole_bytes_of(planned.keys[0])
    merge_many([job], EngineOptions(workers=2, memory_budget=room_for * needed))

    assert most == [together]


@pytest.mark.parametrize(("room_for", "together"), [(0.5, 1), (1, 1), (2, 2)])
def test_what_methods_read_of_other_keys_is_part_of_the_memory_budget(room_for, together):
    running, most, lock = [0], [0], threading.Lock()

    @mx.merge_method(register=False)
    def mean_of_all(a: mx.Parameter(mx.StateDict[torch.Tensor]), **extra: object) -> mx.Return(torch.Tensor):
        values = [a[key] for key in a]
        if values[0].device.type != "meta":
            with lock:
                running[0] += 1
                most[0] = max(most[0], running[0])
            time.sleep(0.2)
            with lock:
                running[0] -= 1
        return torch.stack(values).mean(0)

    job = Job(mean_of_all(mx.model({key: torch.ones(100) for key in "1234"})), {})
    with plan([job]) as planned:
        needed = planned.whole_bytes_of(planned.keys[0])
        assert needed >= 4 * 100 * 4
        assert planned.memory >= needed
    merge_many([job], EngineOptions(workers=2, memory_budget=int(room_for * needed)))

    assert most == [together]


def test_workers_take_a_large_key_each_and_help_each_other_at_the_end(monkeypatch):
    tensors = {key: torch.full((20 * TILE,), float(key)) for key in "12"}
    together, taken = threading.Barrier(2, timeout=30), {}
    run = KeyPass.run

    def watched(self, tile, scratch):
        me = threading.get_ident()
        if me not in taken:
            taken[me] = [tile.key]
            together.wait()
        taken[me].append(tile.key)
        run(self, tile, scratch)
        if tile.key == "1":
            time.sleep(0.02)  # the worker at the other key ends first

    monkeypatch.setattr(KeyPass, "run", watched)
    made = {}
    merge_many([Job(mx.n_average(mx.model(tensors)), made)], EngineOptions(workers=2, tile_size=TILE))
    assert sorted(keys[0] for keys in taken.values()) == ["1", "2"]
    assert any({"1", "2"} <= set(keys) for keys in taken.values())
    assert contents(made) == contents(tensors)
