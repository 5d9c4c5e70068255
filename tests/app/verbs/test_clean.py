"""The verb that deletes what interrupted merges have left behind, and results whose runs are gone."""

import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from outcome import Outcome

from mecha_exp.checkpoint import CheckpointWriter, can_resume
from mecha_exp.checkpoint.transaction.lock import TargetLock
from mecha_exp.lab.store import ResultStore
from mecha_exp.runs.sweep import LOCKED

LAYOUT = {"a": ("F32", (4,)), "b": ("F32", (4,))}
App = Callable[..., Outcome]


class Terminal(io.StringIO):
    """A terminal on which something is typed."""

    def isatty(self) -> bool:
        return True


def leave(target: Path) -> Path:
    """Be interrupted while writing the target."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with pytest.raises(KeyboardInterrupt), CheckpointWriter(target, LAYOUT, {}, signature="s") as writer:
        writer.write("a", 0, torch.zeros(4))
        writer.finish("a")
        raise KeyboardInterrupt
    return target


@pytest.fixture
def left(folder: Path) -> list[Path]:
    return [
        leave(folder / "outputs" / "runs" / "1" / "model.safetensors"),
        leave(folder / "merged.safetensors"),
    ]


@pytest.fixture
def clean(app: App, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Runs the verb, with what is typed on a terminal or, for None, without one."""

    def run(*arguments: str, typed: str | None = None) -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.StringIO() if typed is None else Terminal(typed))
        return app("clean", *arguments, tracked=True)

    return run


def test_without_a_terminal_it_lists_and_deletes_nothing(clean: App, left: list[Path]) -> None:
    done = clean()
    assert done.status == 0
    assert all(str(target) in done.out for target in left)
    assert done.out.count("kB") == 2
    assert "Nothing was deleted. Add --yes to do it." in done.out
    assert all(map(can_resume, left))


def test_yes_does_not_ask(clean: App, left: list[Path], files_in: Callable[[Path], list[str]]) -> None:
    done = clean("--yes")
    assert done.status == 0
    assert "Deleted what is left of 2 merges" in done.out
    assert files_in(Path()) == []
    assert clean("--yes").out == "There is nothing to delete.\n"


@pytest.mark.parametrize(("typed", "goes"), [("y\n", True), ("yes\n", True), ("n\n", False), ("\n", False)])
def test_on_a_terminal_it_asks(clean: App, left: list[Path], typed: str, goes: bool) -> None:
    done = clean(typed=typed)
    assert done.status == 0
    assert "Delete what is left of 2 merges, " in done.out
    assert [can_resume(target) for target in left] == [not goes] * 2


def test_only_the_named_folder_is_looked_at(clean: App, left: list[Path]) -> None:
    assert clean("outputs", "--yes").status == 0
    assert [can_resume(target) for target in left] == [False, True]


def test_what_is_being_written_is_left_alone(clean: App, folder: Path, left: list[Path]) -> None:
    with CheckpointWriter(folder / "busy.safetensors", LAYOUT, {}, signature="s") as writer:
        done = clean("--yes")
        assert done.status == 0
        assert "busy.safetensors, in use: left alone" in done.out
        assert "Deleted what is left of 2 merges" in done.out
        for key in LAYOUT:
            writer.write(key, 0, torch.zeros(4))
        writer.commit()


def test_models_and_files_of_others_are_no_leftovers(
    clean: App, folder: Path, files_in: Callable[[Path], list[str]]
) -> None:
    names = [".model.lock", ".x.partial", "model.safetensors", "x.mecha-lock"]
    for name in names:
        (folder / name).touch()
    assert clean("--yes").out == "There is nothing to delete.\n"
    assert files_in(folder) == sorted(names)


def test_a_folder_that_is_none_is_an_error(clean: App) -> None:
    done = clean("nowhere")
    assert done.status == 1
    assert "nowhere is not a folder" in done.err


def test_help_has_an_example(clean: App) -> None:
    done = clean("--help")
    assert done.status == 0
    assert "example: python -m mecha_exp clean outputs --yes" in done.out


def test_a_stored_result_goes_with_its_run_and_not_before(
    clean: App, app: App, folder: Path, files_in: Callable[[Path], list[str]]
) -> None:
    app("alpha=0.3,0.5", "output=none", "-m")
    (sweep,) = (folder / "outputs" / "multiruns").iterdir()
    points = folder / "outputs" / "store" / "points"
    for place in points.iterdir():
        os.utime(place, (1, 1))
    assert clean("--yes").out == "There is nothing to delete.\n"
    shutil.rmtree(sweep / "0")

    assert "1 stored result" in clean("--yes").out
    assert len(list(points.iterdir())) == 1
    assert json.loads(clean("--json").out) == []


def test_a_result_that_was_made_just_now_may_be_a_running_sweeps(clean: App, app: App, folder: Path) -> None:
    app("output=none")
    shutil.rmtree(folder / "outputs" / "runs")

    assert clean("--yes").out == "There is nothing to delete.\n"


PARTS = ResultStore(Path()).partial("evaluator-1", "signature").name
TEMPORARY = (
    "outputs/store/points/abc/.merge.json.123-456.partial",
    "outputs/store/points/def/.merge.json.0123456789abcdef.partial",
    "outputs/.mlflow.db.a1b2c3d4/mlflow.db",
    ".reproduce-a1b2c3d4/model.safetensors",
    ".a.stats.safetensors.calibration/request.json",
    f"outputs/store/points/ghi/{PARTS}",
    f"outputs/store/inputs/jkl/{PARTS}_rank0.db",  # of lm_eval
)


def test_temporary_files_of_killed_processes_are_found_when_they_are_old(
    clean: App, folder: Path, files_in: Callable[[Path], list[str]]
) -> None:
    for name in TEMPORARY:
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("x" * 5000)
    (folder / "outputs" / "store" / "store.json").write_text('{"version": 1}')
    assert clean("--yes").out.count("in use: left alone") == len(TEMPORARY)

    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (1, 1))
    assert f"{len(TEMPORARY)} temporary files" in clean("--yes").out
    assert files_in(folder) == ["outputs/store/store.json"]


def test_a_folder_that_is_not_marked_as_a_store_is_left_alone(
    clean: App, folder: Path, files_in: Callable[[Path], list[str]]
) -> None:
    names = ["points/mine/data.txt", "sweeps/mine.json"]
    for name in names:
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("{}")
    for path in folder.rglob("*"):
        os.utime(path, (1, 1))

    done = clean("--yes", "--store", ".")

    assert done.status == 1
    assert "is not a store of results: there is no store.json in it" in done.err
    assert files_in(folder) == names


def test_results_stay_while_a_sweep_is_running(clean: App, app: App, folder: Path) -> None:
    app("alpha=0.3,0.5", "output=none", "-m")
    (sweep,) = (folder / "outputs" / "multiruns").iterdir()
    shutil.rmtree(sweep / "0")
    for place in (folder / "outputs" / "store" / "points").iterdir():
        os.utime(place, (1, 1))

    lock = TargetLock(sweep / LOCKED)
    try:
        assert "in use: left alone" in clean("--yes").out
    finally:
        lock.release()
    assert "Deleted 1 stored result" in clean("--yes").out


@pytest.fixture(autouse=True)
def temporary(tmp_path_factory, monkeypatch) -> Path:
    """A folder for temporary files of the test's own: those of other processes are none of its business."""
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_calls_of_dead_processes_are_found_among_the_temporary_files(app, temporary):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    names = {"dead": f"mecha-tasks-{ended.pid}-a", "alive": f"mecha-tasks-{os.getpid()}-b"}
    names |= {"old": "mecha-tasks-abc", "fresh": "mecha-tasks-def"}
    for kind, name in names.items():
        (temporary / name).mkdir()
        (temporary / name / "0.call").write_bytes(b"x")
        age = 10 if kind == "fresh" else 2 * 24 * 3600
        for path in (temporary / name / "0.call", temporary / name):
            os.utime(path, (time.time() - age,) * 2)

    assert app("clean", "--yes").status == 0

    assert sorted(path.name for path in temporary.iterdir()) == sorted([names["alive"], names["fresh"]])
