"""Tiny Llama models in a folder, made once."""

from pathlib import Path

import pytest
from mergekit_configs import write_models


@pytest.fixture(scope="package")
def llamas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models that the configurations name; tests write nothing into it."""
    folder = tmp_path_factory.mktemp("llamas")
    write_models(folder)
    return folder


@pytest.fixture(scope="module")
def models(llamas: Path) -> Path:
    """The folder in which models are found; a module may have one of its own."""
    return llamas


@pytest.fixture
def here(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder; the models are found beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MECHA_MODELS_DIR", str(models))
    return tmp_path
