"""Servers on the loopback, a cache folder of the test's own, and a process that has looked nothing up."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from range_server import RangeServer

from mecha_exp.checkpoint.remote import lookup, retries
from mecha_exp.system.cache import MODELS_SIZE_VARIABLE, MODELS_VARIABLE


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder; pauses take no time, and nothing is kept."""
    monkeypatch.setenv("MECHA_EXP_CACHE", str(tmp_path / "cache"))
    for name in (MODELS_VARIABLE, MODELS_SIZE_VARIABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(retries, "FIRST_PAUSE", 0.001)
    lookup.forget_lookups()
    return tmp_path / "cache"


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """The folder that the server serves."""
    folder = tmp_path / "served"
    folder.mkdir()
    return folder


@pytest.fixture
def server(served: Path) -> Iterator[RangeServer]:
    """A web server of the folder."""
    with RangeServer(served) as running:
        yield running
