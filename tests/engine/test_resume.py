"""No half results: merges that are killed, interrupted or fail, and those that go on from there."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from programs import environment, printed, program
from safetensors.torch import load_file, save_file
from torch import Tensor
from written import digest, names

from mecha_exp import (
    CheckpointError,
    EngineOptions,
    Job,
    MergeError,
    MergeMethod,
    MergeReport,
    Parameter,
    Return,
    merge,
    merge_many,
    merge_method,
    model,
)
from mecha_exp.checkpoint import positional
from mecha_exp.engine.runtime import resumption
from mecha_exp.engine.statistics import moments
from mecha_exp.graph.nodes import Node

posix_only = pytest.mark.skipif(sys.platform == "win32", reason="signals and limits of POSIX")

KEYS = 60
DONE = 21  # after 20 calls of the method: the integers, which are only copied, lie first in a file
ONE_WORKER = EngineOptions(workers=1)


class Countdown:
    """Something that happens when a merge has come to a certain key."""

    def __init__(self) -> None:
        self.left = -1
        self.event: Callable[[], object] = lambda: None

    def set(self, keys: int, event: Callable[[], object]) -> None:
        self.left, self.event = keys, event

    def step(self) -> None:
        self.left -= 1
        if self.left == -1:
            self.event()


countdown = Countdown()


@merge_method(identifier="counted_sum")
def counted_sum(a: Parameter(Tensor), b: Parameter(Tensor), alpha: Parameter(float) = 0.5) -> Return(Tensor):  # type: ignore[valid-type]
    countdown.step()
    return a + alpha * b


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    yield
    countdown.set(-1, lambda: None)


def interrupted() -> None:
    raise KeyboardInterrupt


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two models of many keys, one of them an integer in which they differ, and an old output."""
    for seed, name in enumerate("ab"):
        generator = torch.Generator().manual_seed(seed)
        tensors = {f"layer.{i}": torch.randn(4, 5, generator=generator) for i in range(KEYS - 1)}
        save_file({**tensors, "step": torch.tensor([seed])}, tmp_path / f"{name}.safetensors")
    save_file({"old": torch.zeros(1)}, tmp_path / "target.safetensors")
    return tmp_path


def recipe(folder: Path, method: MergeMethod = counted_sum, **hyperparameters: float) -> Node:
    return method(str(folder / "a.safetensors"), str(folder / "b.safetensors"), **hyperparameters)


def job(folder: Path, output: str = "target", **settings: object) -> Job:
    alpha = settings.pop("alpha", 0.5)
    method = settings.pop("method", counted_sum)
    made = recipe(folder, method, alpha=alpha)  # type: ignore[arg-type]
    return Job(made, folder / f"{output}.safetensors", durable=False, **settings)  # type: ignore[arg-type]


def run(*jobs: Job, **options: object) -> MergeReport:
    return merge_many(jobs, EngineOptions(workers=1, **options))  # type: ignore[arg-type]


def stop(keys: int, *jobs: Job, event: Callable[[], object] = interrupted) -> None:
    countdown.set(keys, event)
    with pytest.raises(KeyboardInterrupt):
        run(*jobs)


WHOLE = ["a.safetensors", "b.safetensors", "target.safetensors"]
HIDDEN = [".target.safetensors.mecha-journal", ".target.safetensors.mecha-partial"]


# --- kills ------------------------------------------------------------------------------------------------


@pytest.mark.heavy
@posix_only
def test_a_merge_that_is_killed_at_any_moment_leaves_the_old_file_or_a_whole_new_one(folder: Path) -> None:
    kills, old = 40, digest(folder / "target.safetensors")
    found = json.loads(printed("killing", folder, 7, kills))
    new, starts = found["undisturbed"], found["starts"]
    assert sum(start["resumed"] is None for start in starts) == kills
    for start in starts:
        assert start["target"] in (old, new)
        if start["resumed"] is not None:
            assert start["target"] == new
            assert start["resumed"] == start["before"], "finished keys are not made again"
        elif start["target"] == old:
            assert start["after"] >= start["before"], "finished keys stay finished"
    assert any(start["resumed"] for start in starts)
    assert any(start["after"] > start["before"] > 0 for start in starts), "stopped more than once"


@posix_only
def test_a_merge_that_is_killed_inside_a_key_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        generator = torch.Generator().manual_seed(seed)
        tensors = {f"w.{key}": torch.randn(90, 50, generator=generator) for key in range(5)}
        save_file(tensors, tmp_path / f"{name}.safetensors")
    save_file({"old": torch.zeros(1)}, tmp_path / "target.safetensors")
    old = digest(tmp_path / "target.safetensors")

    cases = json.loads(printed("killing_in_keys", tmp_path))

    assert len(cases) == 4
    for name, case in cases.items():
        assert [end["signal"] for end in case["ends"]] == [signal.SIGXFSZ] * 3, name
        assert [end["before"] for end in case["ends"]] == [old] * 3, name
        assert [end["resumed"] for end in case["ends"]] == [0, 2, 4], name
        assert [end["after"] for end in case["ends"]] == [case["undisturbed"]] * 3, name
    assert not list(tmp_path.glob(".*"))


# --- what is resumed --------------------------------------------------------------------------------------


def test_the_next_merge_goes_on_and_ends_with_the_same_bytes(folder: Path) -> None:
    run(job(folder, "undisturbed"))
    stop(20, job(folder))
    assert names(folder)[:2] == HIDDEN
    assert load_file(folder / "target.safetensors").keys() == {"old"}
    report = run(job(folder))
    assert (report.resumed_keys, report.keys) == (DONE, KEYS)
    assert digest(folder / "target.safetensors") == digest(folder / "undisturbed.safetensors")
    assert run(job(folder)).resumed_keys == 0
    assert set(names(folder)) == {*WHOLE, "undisturbed.safetensors"}


def test_merge_itself_resumes(folder: Path) -> None:
    target = folder / "target.safetensors"
    countdown.set(20, interrupted)
    with pytest.raises(KeyboardInterrupt):
        merge(recipe(folder), target, ONE_WORKER)
    counted: list[int] = []
    countdown.set(KEYS - 1 - 20, lambda: counted.append(1))
    merge(recipe(folder), target, ONE_WORKER)
    assert not counted, "as many keys were made as were left"
    assert countdown.left == 0


def test_a_resumed_merge_reports_what_the_whole_one_does(folder: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        broken = load_file(folder / name)
        broken["layer.3"][0, 0] = torch.inf
        broken["layer.5"] *= 1e-8
        save_file(broken, folder / name)
    settings: dict[str, object] = {"statistics": True, "dtype": torch.float16}
    undisturbed = run(job(folder, "undisturbed", **settings), on_nonfinite="keep")
    countdown.set(30, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(job(folder, **settings), on_nonfinite="keep")
    resumed = run(job(folder, **settings), on_nonfinite="keep")
    assert resumed.resumed_keys >= 29
    assert resumed.nonfinite_values == undisturbed.nonfinite_values == (1,)
    said = [text.replace("undisturbed", "target") for text in undisturbed.warnings]
    assert said == [*resumed.warnings] and len(said) == 3
    for (one, sums), (other, expected) in zip(
        resumed.moments[0].items(), undisturbed.moments[0].items(), strict=True
    ):
        assert one == other
        assert sums.keys() == expected.keys()
        assert all(torch.equal(sums[key].nan_to_num(), expected[key].nan_to_num()) for key in sums)
        assert {t.dtype for t in sums.values()} == {t.dtype for t in expected.values()}
    assert resumed.bytes_read < undisturbed.bytes_read
    assert resumed.bytes_written < undisturbed.bytes_written


def test_progress_counts_the_resumed_keys(folder: Path) -> None:
    stop(20, job(folder))
    seen: dict[str, int] = {}
    merge_many([job(folder)], ONE_WORKER, lambda key, nbytes: seen.update({key: seen.get(key, 0) + nbytes}))
    assert len(seen) == KEYS
    assert sum(seen.values()) == 2 * ((KEYS - 1) * 20 * 4 + 8)


def test_of_several_outputs_only_what_all_have_is_skipped(folder: Path) -> None:
    jobs = [job(folder, "one", alpha=0.1), job(folder, "two", alpha=0.2)]
    run(job(folder, "whole_one", alpha=0.1), job(folder, "whole_two", alpha=0.2))
    stop(2 * 10, *jobs)  # a key is two calls
    stop(15, jobs[0])
    assert run(*jobs).resumed_keys == 11
    for name in ("one", "two"):
        assert digest(folder / f"{name}.safetensors") == digest(folder / f"whole_{name}.safetensors")


def test_an_output_in_memory_is_always_made_whole(folder: Path) -> None:
    kept: dict[str, Tensor] = {}
    stop(20, job(folder))
    report = run(job(folder), Job(recipe(folder), kept))
    assert report.resumed_keys == 0
    assert torch.equal(kept["layer.0"], load_file(folder / "target.safetensors")["layer.0"])


# --- what is not resumed ----------------------------------------------------------------------------------


def resave(path: Path) -> None:
    tensors = load_file(path)
    tensors["layer.0"] += 1
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ({"alpha": 0.6}, {}),
        ({"dtype": torch.float16}, {}),
        ({"metadata": {"by": "another"}}, {}),
        ({"statistics": True}, {}),
        ({}, {"compute_dtype": torch.float64}),
        ({}, {"on_nonfinite": "keep"}),
        ({}, {"strict": True}),
    ],
    ids=str,
)
def test_another_merge_starts_anew(
    folder: Path, change: dict[str, object], options: dict[str, object]
) -> None:
    stop(20, job(folder))
    assert run(job(folder, **change), **options).resumed_keys == 0
    assert names(folder) == WHOLE


def test_statistics_that_mean_something_else_start_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop(20, job(folder, statistics=True))
    true_hash = resumption.code_hash

    def of_changed(method):
        return "new" if method is moments else true_hash(method)

    monkeypatch.setattr(resumption, "code_hash", of_changed)

    assert run(job(folder, statistics=True)).resumed_keys == 0


@pytest.mark.parametrize("options", [{"tile_size": 16}, {"memory_budget": 1 << 20}, {"workers": 3}], ids=str)
def test_settings_that_do_not_change_the_bytes_may_differ(folder: Path, options: dict[str, int]) -> None:
    stop(20, job(folder))
    assert merge_many([job(folder)], EngineOptions(**options)).resumed_keys == DONE  # type: ignore[arg-type]


def test_a_changed_input_starts_anew(folder: Path) -> None:
    stop(20, job(folder))
    resave(folder / "b.safetensors")
    assert run(job(folder)).resumed_keys == 0
    run(job(folder, "undisturbed"))
    assert digest(folder / "target.safetensors") == digest(folder / "undisturbed.safetensors")


def test_a_changed_merge_method_starts_anew(folder: Path) -> None:
    stop(20, job(folder, method=method_from(folder, "a + alpha * b")))
    assert run(job(folder, method=method_from(folder, "a - alpha * b"))).resumed_keys == 0
    stop(20, job(folder, method=method_from(folder, "a + alpha * b")))
    assert run(job(folder, method=method_from(folder, "a + alpha * b"))).resumed_keys == DONE


def method_from(folder: Path, formula: str) -> MergeMethod:
    """A merge method in a file of its own."""
    path = folder.parent / "own_method.py"
    path.write_text(
        "from torch import Tensor\n"
        "from mecha_exp import Parameter, Return, merge_method\n"
        "@merge_method\n"
        "def own(a: Parameter(Tensor), b: Parameter(Tensor), alpha: Parameter(float)) -> Return(Tensor):\n"
        f"    __import__({__name__!r}).countdown.step()\n    return {formula}\n"  # out of the hash's sight
    )
    spec = importlib.util.spec_from_file_location("own_method", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: MergeMethod = module.own
    return found


def test_a_model_in_memory_leaves_nothing_to_go_on_with(folder: Path) -> None:
    held = counted_sum(model(load_file(folder / "a.safetensors")), str(folder / "b.safetensors"))
    stop(20, Job(held, folder / "target.safetensors"))
    assert names(folder) == WHOLE


# --- errors -----------------------------------------------------------------------------------------------


def test_an_error_leaves_the_old_file_and_nothing_else(folder: Path) -> None:
    def fail() -> None:
        raise MergeError("no")

    before = digest(folder / "target.safetensors")
    countdown.set(20, fail)
    with pytest.raises(MergeError, match="no"):
        run(job(folder))
    assert digest(folder / "target.safetensors") == before
    assert names(folder) == WHOLE


def test_an_input_that_changes_while_it_is_read_is_an_error(folder: Path) -> None:
    before = digest(folder / "target.safetensors")
    countdown.set(20, lambda: os.utime(folder / "b.safetensors", ns=(0, 0)))
    with pytest.raises(CheckpointError, match=r"b\.safetensors changed while it was being read"):
        run(job(folder))
    assert digest(folder / "target.safetensors") == before
    assert names(folder) == WHOLE


@posix_only
def test_an_input_that_shrinks_while_it_is_read_is_an_error(folder: Path) -> None:
    countdown.set(20, lambda: os.truncate(folder / "b.safetensors", 6000))
    with pytest.raises(CheckpointError, match=r"b\.safetensors .*changed while it was being read"):
        run(job(folder))
    assert names(folder) == WHOLE


@pytest.mark.skipif(not positional.POSITIONAL, reason="os.pwrite and os.preadv are not used here")
@pytest.mark.parametrize(
    ("call", "fault", "said"),
    [
        ("pwrite", errno.ENOSPC, r"target\.safetensors cannot be written: the disk is full"),
        ("preadv", errno.EIO, r"a\.safetensors cannot be read: Input/output error"),
    ],
    ids=["full", "broken"],
)
def test_a_disk_that_fails_is_an_error(
    call: str, fault: int, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> int:
        raise OSError(fault, os.strerror(fault))

    before = digest(folder / "target.safetensors")
    countdown.set(20, lambda: monkeypatch.setattr(os, call, failing))
    with pytest.raises(CheckpointError, match=said):
        run(job(folder))
    assert digest(folder / "target.safetensors") == before
    assert names(folder) == WHOLE


LIMITED = """
import resource, sys
from mecha_exp import CheckpointError, merge
from mecha_exp.methods.linear import weighted_sum
resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, 5_000))
try:
    merge(weighted_sum(sys.argv[1], sys.argv[2], alpha=0.5), sys.argv[3])
except CheckpointError as error:
    sys.exit(str(error))
"""


@posix_only
def test_a_write_limit_is_an_error(folder: Path) -> None:
    paths = [folder / f"{name}.safetensors" for name in ("a", "b", "target")]
    before = digest(paths[2])
    done = in_process(LIMITED, *paths)
    assert "target.safetensors cannot be written: the file is larger than" in done.stderr
    assert done.returncode == 1
    assert digest(paths[2]) == before
    assert names(folder) == WHOLE


# --- two processes ----------------------------------------------------------------------------------------


def in_process(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)


@contextlib.contextmanager
def endless_merge(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A merge that has made `DONE` keys, and will not come further."""
    words, pipe = program("endless", 21, *arguments), subprocess.PIPE
    with subprocess.Popen(
        words, env=environment(), cwd=folder, stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.readline() == "begun\n", process.stderr.read()
            yield process
        finally:
            process.kill()


FILES = ("a.safetensors", "b.safetensors", "target.safetensors")


def test_the_second_of_two_processes_is_told_of_the_first(folder: Path) -> None:
    with endless_merge(folder, *FILES) as first:
        with pytest.raises(CheckpointError, match=rf"being written by process {first.pid} .*another output"):
            run(job(folder))
        first.kill()
        first.wait()
        assert run(job(folder)).resumed_keys == 0  # it was another recipe
    assert names(folder) == WHOLE


# --- Ctrl-C -----------------------------------------------------------------------------------------------


@posix_only
def test_ctrl_c_stops_at_once_even_in_a_long_computation(folder: Path) -> None:
    with endless_merge(folder, *FILES) as process:
        seconds = interrupt(process)
        assert seconds < 2
        assert process.returncode == 130
    assert names(folder)[:2] == HIDDEN


CONFIG = """
# @package _global_
recipe:
  method: endless
  a: a.safetensors
  b: b.safetensors
"""


@pytest.mark.heavy
@posix_only
def test_the_application_says_how_to_go_on(folder: Path) -> None:
    (folder / "conf" / "recipe").mkdir(parents=True)
    (folder / "conf" / "recipe" / "endless.yaml").write_text(CONFIG)
    settings = ["--config-dir=conf", "recipe=endless", "tracking=none", "engine.workers=1"]
    with endless_merge(folder, "app", *settings) as process:
        seconds = interrupt(process)
        errors = process.stderr.read() if process.stderr else ""
        assert process.returncode == 130, errors
        assert seconds < 2
    (run_folder,) = (folder / "outputs" / "runs").iterdir()
    hint = f"hydra.run.dir={run_folder.relative_to(folder)}"
    again = f"python -m mecha_exp {' '.join(settings)} {hint}"
    assert f"interrupted. What is done is kept. Go on with: {again}\n" in errors
    assert json.loads((run_folder / "run.json").read_text())["error"] == "interrupted"
    said = printed("endless", 0, "app", *settings, hint, cwd=folder)
    assert f"resumed: {DONE} of {KEYS} keys were already done" in said
    assert f"resumed: {DONE} of {KEYS} keys" in (run_folder / "mecha_exp.log").read_text()
    assert torch.equal(
        load_file(run_folder / "model.safetensors")["layer.0"], load_file(folder / FILES[0])["layer.0"]
    )


def interrupt(process: subprocess.Popen[str]) -> float:
    """Send Ctrl-C and wait; returns the seconds that it took."""
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.wait(timeout=60)
    return time.monotonic() - started
