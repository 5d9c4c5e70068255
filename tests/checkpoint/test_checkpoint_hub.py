"""Models of the Hugging Face hub come from its library's cache; here a cache is made by hand."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mecha_exp import merge, weighted_sum
from mecha_exp.checkpoint.hub import hub_folder, is_hub_name
from mecha_exp.errors import CheckpointError

pytestmark = pytest.mark.libraries

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that holds `some-lab/tiny`, used offline."""
    import huggingface_hub as library
    from huggingface_hub import constants

    repository = tmp_path / "hub" / "models--some-lab--tiny"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    save_file({"w": torch.ones(3)}, snapshot / "model.safetensors")
    (snapshot / "config.json").write_text("{}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    download = library.snapshot_download
    monkeypatch.setattr(
        library, "snapshot_download", lambda *a, **k: download(*a, **k, cache_dir=str(tmp_path / "hub"))
    )
    return tmp_path


def test_a_model_in_the_cache_is_merged_by_its_name(cache):
    merged = merge(weighted_sum("some-lab/tiny", {"w": torch.zeros(3)}, alpha=0.5))

    assert merged["w"].tolist() == [0.5, 0.5, 0.5]


def test_a_model_that_is_not_in_the_cache_is_an_error_offline(cache):
    with pytest.raises(CheckpointError, match=r"'some-lab/other' is not a file here, .*cannot be fetched"):
        hub_folder("some-lab/other")


def test_without_the_library_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.chdir(tmp_path)

    with pytest.raises(
        CheckpointError, match=r"'some-lab/tiny' is not a file here.*pip install 'mecha_exp\[hub"
    ):
        merge(weighted_sum("some-lab/tiny", {"w": torch.zeros(3)}, alpha=0.5))


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("org/name", True),
        ("org/name@main", True),
        ("models/a.safetensors", False),
        ("a/b/c", False),
        ("name", False),
        ("../name", False),
        ("/org/name", False),
    ],
)
def test_what_may_be_the_name_of_a_model(name, is_one):
    assert is_hub_name(name) is is_one
