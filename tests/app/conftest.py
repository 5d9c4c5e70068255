"""The application, run in this process in a folder of its own, or as a user would in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from mecha_exp.app.cli import main

REPOSITORY = Path(__file__).parents[2]


@dataclass
class Outcome:
    """What a command printed, and its exit status."""

    status: int
    out: str
    err: str


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
        untracked = [] if tracked or (arguments and arguments[0] in ("track", "ui")) else ["tracking=none"]
        monkeypatch.setattr(sys, "argv", ["mecha_exp", *arguments, *untracked])
        try:
            status = main()
        except SystemExit as stop:
            status = int(stop.code or 0)
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def as_a_user() -> Callable[..., Outcome]:
    """Runs the application in a process of its own."""

    def run(*arguments: str, cwd: Path) -> Outcome:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "100"}
        command = [sys.executable, "-m", "mecha_exp", *arguments]
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=180)
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture(scope="session")
def files_in() -> Callable[[Path], list[str]]:
    """Lists every file below a folder, with slashes on every platform."""
    return lambda folder: sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
