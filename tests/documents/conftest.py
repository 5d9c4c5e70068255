"""The command line in this process."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from outcome import Outcome


@pytest.fixture
def run_cli(tmp_path: Path, app: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Runs a command in the temporary folder."""
    return partial(app, cwd=tmp_path)
