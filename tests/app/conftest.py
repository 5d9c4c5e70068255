"""The application, run in this process in a folder of its own."""

from collections.abc import Callable
from pathlib import Path

import pytest
from outcome import Outcome

from mecha_exp.app import batch


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def app(folder: Path, app: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Runs the application in this process and that folder."""
    return app


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
