"""The command line in this process."""

import sys
from collections.abc import Callable

import pytest
from outcome import Outcome

from mecha_exp.cli import main


@pytest.fixture
def run_cli(
    tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Runs a command in the temporary folder."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["mecha_exp", *words])
        try:
            status = main()
        except SystemExit as stop:
            status = int(stop.code or 0)
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    return run
