"""Models of the Hugging Face hub, read from a hub on the loopback."""

import sys
from pathlib import Path

import pytest
import torch
import yaml
from hub_server import COMMIT, Hub
from range_server import RangeServer
from safetensors.torch import save_file

from mecha_exp import merge, weighted_sum
from mecha_exp.checkpoint import load
from mecha_exp.checkpoint.remote import stores
from mecha_exp.errors import CheckpointError
from mecha_exp.lab.content_hash import content_of, unread_bytes
from mecha_exp.sources.search import find_model

pytestmark = pytest.mark.libraries

TENSORS = {"layers.0.weight": torch.arange(60_000.0).reshape(300, 200), "layers.0.bias": torch.ones(7)}


@pytest.fixture
def storage(served: Path):
    """The server where the files of the hub lie."""
    with RangeServer(served) as running:
        yield running


@pytest.fixture
def hub(server: RangeServer, storage: RangeServer, served: Path, monkeypatch) -> Hub:
    """A hub with the model `lab/tiny`."""
    hub = Hub(served, storage)
    server.fault = hub.answer
    folder = served / "lab" / "tiny"
    (folder / "sub").mkdir(parents=True)
    save_file(TENSORS, folder / "model.safetensors")
    save_file({"other": torch.ones(5)}, folder / "sub" / "other.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02")
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    stores.store_of.cache_clear()
    return hub


@pytest.mark.parametrize("end", ["", "@main", f"@{COMMIT}", "/model.safetensors", "/model.safetensors@main"])
def test_a_model_is_merged_by_its_address(end, hub):
    merged = merge(weighted_sum(f"hf://lab/tiny{end}", {k: -t for k, t in TENSORS.items()}, alpha=0.0))

    assert all(torch.equal(merged[key], TENSORS[key]) for key in TENSORS)


def test_a_file_in_a_folder_and_the_folder_have_addresses(hub):
    assert load(find_model("hf://lab/tiny/sub/other.safetensors", [])).keys() == {"other"}
    assert load(find_model("hf://lab/tiny/sub", [])).keys() == {"other"}


def test_a_pipeline_is_read_by_its_components(hub, served, tmp_path):
    pipeline = served / "lab" / "pipeline"
    for part in ("unet", "vae"):
        (pipeline / part).mkdir(parents=True)
        save_file({f"{part}_w": torch.ones(9)}, pipeline / part / "diffusion_pytorch_model.safetensors")
        (pipeline / part / "config.json").write_text('{"_class_name": "Some"}')
    (pipeline / "model_index.json").write_text("{}")

    merge(weighted_sum("hf://lab/pipeline", "hf://lab/pipeline", alpha=0.5), tmp_path / "merged")

    assert load(tmp_path / "merged").keys() == {"unet.unet_w", "vae.vae_w"}
    assert (tmp_path / "merged" / "vae" / "config.json").read_text() == '{"_class_name": "Some"}'


def test_pickles_beside_safetensors_are_left_alone(hub, storage):
    merge(weighted_sum("hf://lab/tiny", TENSORS, alpha=0.5))

    assert not [path for path, _ in storage.requests if path.endswith(".bin")]


def test_the_hash_of_the_hub_is_the_content_and_nothing_is_read_for_it(hub, storage, served):
    path = find_model("hf://lab/tiny/model.safetensors", [])
    sent = storage.sent

    assert unread_bytes([path]) == 0
    assert content_of(path) == content_of(served / "lab" / "tiny" / "model.safetensors")
    assert storage.sent == sent
    assert content_of(find_model("hf://lab/tiny", [])) == content_of(served / "lab" / "tiny")


def test_a_login_goes_to_the_hub_and_not_to_its_storage(hub, storage, server, monkeypatch):
    logins = []
    storage.fault = lambda handler, number: logins.append(handler.headers.get("Authorization"))
    hub.token = "hf_secret"
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.delenv("HF_HUB_DISABLE_IMPLICIT_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
    stores.store_of.cache_clear()

    merge(weighted_sum("hf://lab/tiny", TENSORS, alpha=0.5))

    assert logins and set(logins) == {None}
    stores.store_of.cache_clear()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("hf://lab/none", r"'hf://lab/none' cannot be looked up on the Hugging Face hub: "),
        ("hf://lab/tiny@none", r"'hf://lab/tiny@none' cannot be looked up on the Hugging Face hub: "),
        (
            "hf://lab/tiny/none.safetensors",
            r"the repository has no 'none\.safetensors'\. It has config\.json",
        ),
        ("hf://lab/tiny/pytorch_model.bin", r"is stored as a pickle, which is not read in parts"),
    ],
)
def test_what_is_not_there_is_said(address, message, hub):
    with pytest.raises(CheckpointError, match=message):
        find_model(address, [])


def test_a_model_of_pickles_alone_is_refused(hub, served):
    (served / "lab" / "old").mkdir()
    (served / "lab" / "old" / "pytorch_model.bin").write_bytes(b"\x80\x02")

    with pytest.raises(CheckpointError, match=r"hf://lab/old is stored as a pickle"):
        find_model("hf://lab/old", [])


def test_a_model_without_a_login_is_refused(hub):
    hub.token = "hf_secret"

    with pytest.raises(CheckpointError, match=r"cannot be looked up on the Hugging Face hub: .*401"):
        find_model("hf://lab/tiny", [])


def test_a_hub_that_may_not_be_reached_is_not(hub, server, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    with pytest.raises(
        CheckpointError, match=r"'hf://lab/tiny' is on the Hugging Face hub, and HF_HUB_OFFLINE forbids"
    ):
        find_model("hf://lab/tiny", [])
    assert not server.requests


def test_without_the_library_the_error_says_what_to_install(hub, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)

    with pytest.raises(CheckpointError, match=r"pip install 'mecha_exp\[hub\]'"):
        find_model("hf://lab/tiny", [])


def test_a_small_file_of_another_content_than_the_hub_says_is_an_error(hub, storage, served):
    index = served / "lab" / "tiny" / "model.safetensors"

    def replace(handler, number: int) -> bool:
        save_file({"other": torch.ones(60_007)}, index)
        return False

    storage.fault = replace

    with pytest.raises(
        CheckpointError, match=r"changed after it was looked up: it had [\d,]+ bytes, and has \d+"
    ):
        merge(weighted_sum("hf://lab/tiny", TENSORS, alpha=0.5))


def test_a_card_names_a_model_of_the_hub_with_its_commit_and_licence(hub, served, tmp_path):
    (served / "lab" / "tiny" / "README.md").write_text("---\nlicense: apache-2.0\n---\n")

    merge(weighted_sum("hf://lab/tiny", "hf://lab/tiny@main", alpha=0.5), tmp_path / "merged")

    card = (tmp_path / "merged" / "README.md").read_text()
    front_matter = yaml.safe_load(card.split("---\n")[1])
    assert (front_matter["base_model"], front_matter["license"]) == (["lab/tiny"], "apache-2.0")
    sha256 = content_of(find_model("hf://lab/tiny", []))
    assert f"| lab/tiny at `{COMMIT}` | apache-2.0 | `{sha256}` |" in card
