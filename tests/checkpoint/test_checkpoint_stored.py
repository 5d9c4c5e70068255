"""Models in every format that is read: files, shards, pickles, folders of components."""

import json
import os
import pickle
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from state_dicts import StateDict, contents, random_model

from mecha_exp import merge, weighted_sum
from mecha_exp.app.words import slips
from mecha_exp.checkpoint import load, open_stored
from mecha_exp.checkpoint.formats import SUFFIXES
from mecha_exp.checkpoint.remote.address import FILE_SUFFIXES
from mecha_exp.errors import CheckpointError


def write_shards(folder: Path, tensors: StateDict, count: int = 2, ending: str = ".safetensors") -> Path:
    """A model in `count` shards with an index, as the Hugging Face libraries lay it out."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"model-{i + 1:05}-of-{count:05}{ending}" for i in range(count)]
    places = {key: names[i % count] for i, key in enumerate(tensors)}
    for name in names:
        part = {key: tensor for key, tensor in tensors.items() if places[key] == name}
        save_file(part, folder / name) if ending == ".safetensors" else torch.save(part, folder / name)
    stem = "model" if ending == ".safetensors" else "pytorch_model"
    index = folder / f"{stem}{ending}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    return index


def as_file(folder: Path, tensors: StateDict) -> Path:
    save_file(tensors, folder / "any.safetensors")
    return folder / "any.safetensors"


def as_folder(folder: Path, tensors: StateDict) -> Path:
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def as_pickle(folder: Path, tensors: StateDict) -> Path:
    torch.save(tensors, folder / "model.pt")
    return folder / "model.pt"


def as_old_pickle(folder: Path, tensors: StateDict) -> Path:
    torch.save(tensors, folder / "model.ckpt", _use_new_zipfile_serialization=False)
    return folder / "model.ckpt"


def as_wrapped_pickle(folder: Path, tensors: StateDict) -> Path:
    torch.save({"epoch": 3, "state_dict": {"model": tensors, "best": 0.5}}, folder / "last.ckpt")
    return folder / "last.ckpt"


def as_pickle_folder(folder: Path, tensors: StateDict) -> Path:
    torch.save(tensors, folder / "pytorch_model.bin")
    torch.save({"lr": 0.1}, folder / "optimizer.pt")
    return folder


FORMATS = {
    "file": as_file,
    "folder": as_folder,
    "index of shards": write_shards,
    "folder of shards": lambda folder, tensors: write_shards(folder, tensors).parent,
    "folder of pickled shards": lambda folder, tensors: write_shards(folder, tensors, 3, ".bin").parent,
    "pickle": as_pickle,
    "pickle of an old torch": as_old_pickle,
    "pickle of a training run": as_wrapped_pickle,
    "folder with a pickle": as_pickle_folder,
}


def test_the_lists_of_suffixes_that_load_without_torch_are_those_of_the_table_of_formats():
    assert {*slips.MODELS} == {*FILE_SUFFIXES} == {*SUFFIXES}


@pytest.mark.parametrize("write", FORMATS.values(), ids=FORMATS)
def test_a_format_is_read_tensor_by_tensor_and_tile_by_tile(write, tmp_path: Path):
    tensors = random_model(1)
    path = write(tmp_path, tensors)

    with open_stored(path) as model:
        tile = torch.empty(5, dtype=torch.float16)
        model.read_into("proj.weight", 7, tile)
        model.check_unchanged()

        assert torch.equal(tile, tensors["proj.weight"].reshape(-1)[7:12])
    assert contents(load(path)) == contents(tensors)


@pytest.mark.parametrize("write", FORMATS.values(), ids=FORMATS)
def test_a_format_is_merged_like_any_other(write, tmp_path: Path):
    a, b = random_model(1), random_model(2)
    (tmp_path / "other").mkdir()
    expected = merge(weighted_sum(a, b, alpha=0.3))

    merged = merge(weighted_sum(as_file(tmp_path, a), write(tmp_path / "other", b), alpha=0.3))

    assert contents(merged) == contents(expected)


def test_the_components_of_a_pipeline_are_prefixes(tmp_path: Path):
    (tmp_path / "model_index.json").write_text("{}")
    save_file(
        {"x": torch.zeros(1)}, tmp_path / "everything-pruned.safetensors"
    )  # lies beside, does not count
    for name in ("unet", "vae", "tokenizer"):
        (tmp_path / name).mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "unet" / "diffusion_pytorch_model.safetensors")
    save_file({"w": torch.zeros(2)}, tmp_path / "unet" / "diffusion_pytorch_model.fp16.safetensors")
    torch.save({"w": torch.ones(3)}, tmp_path / "vae" / "diffusion_pytorch_model.bin")

    found = load(tmp_path)

    assert found.keys() == {"unet.w", "vae.w"}
    assert found["unet.w"].tolist() == [1, 1]


class Payload:
    """What a malicious checkpoint holds: a call that is made when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("new", [True, False], ids=["zip", "old"])
def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(new, tmp_path: Path):
    mark = tmp_path / "harm"
    path = tmp_path / "evil.ckpt"
    torch.save({"w": torch.ones(2), "x": Payload(mark)}, path, _use_new_zipfile_serialization=new)

    with pytest.raises(CheckpointError, match=r"evil\.ckpt is refused: .*'(posix|nt)\.mkdir'.*can run code"):
        open_stored(path)

    assert not mark.exists()


def test_what_plain_pickle_wrote_is_refused_with_the_cause(tmp_path: Path):
    mark, path = tmp_path / "harm", tmp_path / "evil.pt"
    path.write_bytes(pickle.dumps({"x": Payload(mark)}))

    with pytest.raises(CheckpointError, match=r"evil\.pt is not a checkpoint .*: Unsupported operand \d+\. "):
        open_stored(path)

    assert not mark.exists()


def test_a_pickle_that_is_cut_is_refused(tmp_path: Path):
    whole, cut = tmp_path / "whole.pt", tmp_path / "cut.pt"
    torch.save({"w": torch.ones(1000)}, whole)
    cut.write_bytes(whole.read_bytes()[:-300])

    with pytest.raises(CheckpointError, match=r"cut\.pt .*copy it again|cut\.pt is not a checkpoint"):
        open_stored(cut)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ([1, 2], "it is a list"),
        ({}, "it is an empty mapping"),
        ({"step": 3, "lr": 0.1}, "it is a mapping of 'step', 'lr'"),
        ({"state_dict": {"step": 3}}, "it is a mapping of 'state_dict'"),
    ],
)
def test_a_pickle_without_tensors_is_refused(content, what, tmp_path: Path):
    torch.save(content, tmp_path / "x.pt")

    with pytest.raises(CheckpointError, match=rf"x\.pt holds no state dict: {what}"):
        open_stored(tmp_path / "x.pt")


def test_tensors_that_share_memory_or_are_transposed_are_read_right(tmp_path: Path):
    shared = torch.arange(6.0).reshape(2, 3)
    torch.save({"a": shared, "tied": shared, "t": shared.T}, tmp_path / "x.pt")

    found = load(tmp_path / "x.pt")

    assert torch.equal(found["t"], shared.T)
    assert torch.equal(found["tied"], shared)


VIEWS = {
    "conjugate": lambda: torch.randn(3, 2, dtype=torch.complex64).conj(),
    "imaginary part of a conjugate": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "negative": lambda: torch._neg_view(torch.arange(6.0).view(2, 3)),
    "repeated": lambda: torch.arange(4.0).expand(3, 4),
    "overlapping": lambda: torch.arange(12.0).as_strided((4, 4), (1, 1)),
    "backed by half": lambda: torch.arange(12.0)[::2],
    "empty": lambda: torch.zeros(0, 5).T,
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_in_a_pickle_have_their_own_values(view: str, tmp_path: Path):
    tensor = VIEWS[view]()
    torch.save({"v": tensor, "w": torch.ones(2)}, tmp_path / "x.pt")

    found = load(tmp_path / "x.pt")["v"]

    assert torch.equal(found, tensor.resolve_conj().resolve_neg())


NOT_WHOLE = {
    "meta": (lambda: torch.empty(1 << 40, device="meta"), "w is a tensor without values"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "w is a nested tensor"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "w is a sparse or quantized tensor"),
    "one value for 16 GB": (
        lambda: torch.zeros(1).expand(4_000_000_000),
        r"x\.pt has 1,\d+ bytes and would take 16,000,000,000 in memory.*w: 16,000,000,000 bytes",
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", NOT_WHOLE)
def test_tensors_that_do_not_hold_their_numbers_are_refused(kind: str, tmp_path: Path):
    make, message = NOT_WHOLE[kind]
    torch.save({"w": make()}, tmp_path / "x.pt")

    with pytest.raises(CheckpointError, match=message):
        open_stored(tmp_path / "x.pt")


def test_a_pickle_with_spoilt_bytes_is_read_or_refused(tmp_path: Path):
    chance, refused = random.Random(0), 0
    torch.save({"w": torch.randn(100, 100)}, tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    for _ in range(60):
        content = bytearray(whole)
        for _ in range(
            chance.choice((1, 4, 30))
        ):  # where the archive describes itself, before and after the data
            content[chance.choice((0, len(whole) - 700)) + chance.randrange(700)] = chance.randrange(256)
        (tmp_path / "x.pt").write_bytes(content)
        try:
            load(tmp_path / "x.pt")
        except CheckpointError as error:
            assert "x.pt" in str(error)
            refused += 1

    assert 20 < refused < 60


def spoil(index: Path, **changes: object) -> Path:
    content = json.loads(index.read_text())
    content["weight_map"].update(changes)
    index.write_text(json.dumps(content))
    return index


def missing_shard(folder: Path) -> Path:
    index = write_shards(folder, random_model(1))
    (folder / "model-00002-of-00002.safetensors").unlink()
    return index


def key_in_no_shard(folder: Path) -> Path:
    return spoil(write_shards(folder, random_model(1)), ghost="model-00001-of-00002.safetensors")


def path_outside(folder: Path) -> Path:
    return spoil(write_shards(folder, random_model(1)), ghost="../secret.safetensors")


def no_json(folder: Path) -> Path:
    (folder / "model.safetensors.index.json").write_text("{")
    return folder


def no_map(folder: Path) -> Path:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}')
    return folder


def endless_name(folder: Path) -> Path:
    name = json.dumps({"weight_map": {"a": "a" * 5000}})
    (folder / "model.safetensors.index.json").write_text(name)
    return folder


def no_index(folder: Path) -> Path:
    write_shards(folder, random_model(1)).unlink()
    return folder


def several(folder: Path) -> Path:
    for name in ("a", "b"):
        save_file({"w": torch.ones(1)}, folder / f"{name}.safetensors")
    return folder


def nothing(folder: Path) -> Path:
    (folder / "readme.md").write_text("hello")
    return folder


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (missing_shard, r"index\.json needs 2 files, 1 is missing: model-00002-of-00002\.safetensors"),
        (key_in_no_shard, r"model-00001-of-00002\.safetensors lacks 1 key that .* says it has: ghost"),
        (path_outside, r"names files outside its own folder: \.\./secret\.safetensors"),
        (no_json, r"index\.json is not an index of shards: it is not JSON: Expecting .* line 1 column 2"),
        (endless_name, r"index\.json needs 1 file, 1 is missing: aaa"),
        (no_map, r"is not an index of shards: weight_map: expected a mapping, got"),
        (no_index, r"shards without their index \(model-00001-of-00002\.safetensors, .*is missing"),
        (several, r"holds several models: a\.safetensors, b\.safetensors\. Name one of them"),
        (nothing, r"is a folder without a model in it\. It has readme\.md"),
    ],
)
def test_what_cannot_be_read_names_the_file_and_the_cause(write, message, tmp_path: Path):
    with pytest.raises(CheckpointError, match=message):
        open_stored(write(tmp_path))


def test_a_shard_that_changes_during_the_merge_is_noticed(tmp_path: Path):
    with open_stored(write_shards(tmp_path, random_model(1))) as model:
        shard = tmp_path / "model-00002-of-00002.safetensors"
        shard.write_bytes(shard.read_bytes() + b"x")

        with pytest.raises(CheckpointError, match=r"00002-of-00002\.safetensors changed while"):
            model.check_unchanged()


def test_an_output_over_a_shard_of_an_input_is_refused(tmp_path: Path):
    index = write_shards(tmp_path, random_model(1))
    shard = tmp_path / "model-00001-of-00002.safetensors"

    with pytest.raises(CheckpointError, match="which would be destroyed"):
        merge(weighted_sum(index, random_model(2), alpha=0.3), shard)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes")
def test_a_pipe_that_is_called_like_an_index_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    os.mkfifo(path)

    with pytest.raises(CheckpointError, match=r"index\.json is a pipe, a socket or a device"):
        open_stored(path)


def test_a_pickle_that_is_named_safetensors_is_read_as_what_it_is(tmp_path: Path):
    torch.save({"w": torch.arange(3.0)}, tmp_path / "renamed.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(b"PK\x03\x04" + b"\0" * 99)

    with open_stored(tmp_path / "renamed.safetensors") as model:
        assert model.read("w").tolist() == [0, 1, 2]
    with pytest.raises(CheckpointError, match=r"cut.safetensors cannot be read as a pickle checkpoint"):
        open_stored(tmp_path / "cut.safetensors")
