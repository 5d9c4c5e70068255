"""The application, run in this process in a folder of its own."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from outcome import Outcome
from sweep_folders import write_table

from mecha_exp.app import batch
from mecha_exp.cli import main, verbs


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def app(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Runs the application in this process; tracking is off unless a test asks for it."""

    def run(*arguments: str, tracked: bool = False) -> Outcome:
        untracked = [] if tracked or (arguments and arguments[0] in verbs()) else ["tracking=none"]
        monkeypatch.setattr(sys, "argv", ["mecha_exp", *arguments, *untracked])
        try:
            status = main()
        except SystemExit as stop:
            status = int(stop.code or 0)
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    return run


@pytest.fixture
def passes_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many points each pass has merged."""
    counts: list[int] = []
    run = batch.run_plan

    def counted(planned, *rest):
        counts.append(len(planned.jobs))
        return run(planned, *rest)

    monkeypatch.setattr(batch, "run_plan", counted)
    return counts


@pytest.fixture(scope="session")
def files_in() -> Callable[[Path], list[str]]:
    """Lists every file below a folder, with slashes on every platform."""
    return lambda folder: sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn is tested elsewhere, and takes seconds."""
    monkeypatch.setattr("mecha_exp.app.sweep.summary.write_all", write_table)
