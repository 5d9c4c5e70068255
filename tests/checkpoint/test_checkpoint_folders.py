"""Models are written into folders: shards of a size, an index, and the small files of the first input."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from state_dicts import StateDict, contents, random_model

from mecha_exp import Job, merge, merge_many, weighted_sum
from mecha_exp.checkpoint import find_partial_outputs, load, parse_size
from mecha_exp.checkpoint.transaction import staging
from mecha_exp.errors import CheckpointError, ConfigError

SIZE = 700
"""Bytes of a shard: the tensors of a `random_model` need four."""


def hf_folder(folder: Path, tensors: StateDict, **config: object) -> Path:
    """A folder as the Hugging Face libraries write it."""
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "any", **config}))
    (folder / "tokenizer.json").write_text('{"vocab": {}}')
    (folder / "README.md").write_text("# The base")
    (folder / "training_args.bin").write_bytes(b"x")
    (folder / ".cache").mkdir()
    return folder


def pipeline(folder: Path, seed: int) -> Path:
    """A folder as diffusers writes it."""
    for number, name in enumerate(("unet", "vae")):
        (folder / name).mkdir(parents=True)
        file = folder / name / "diffusion_pytorch_model.safetensors"
        save_file({"w": torch.full((8,), float(seed + number))}, file)
        (folder / name / "config.json").write_text('{"_class_name": "X"}')
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text("{}")
    (folder / "model_index.json").write_text('{"_class_name": "Pipeline"}')
    return folder


def names(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def write(recipe, output: Path, shard_size: int | None = None) -> Path:
    merge_many([Job(recipe, output, shard_size=shard_size)])
    return output


def test_a_model_in_shards_is_the_model_in_one_file(tmp_path: Path):
    recipe = weighted_sum(random_model(1), random_model(2), alpha=0.3)

    folder = write(recipe, tmp_path / "merged", SIZE)

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert shards == [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    assert len(shards) > 1
    assert contents(load(folder)) == contents(merge(recipe))
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in merge(recipe).values())
    for name in shards:
        tensors = load_file(folder / name)
        assert {index["weight_map"][key] for key in tensors} == {name}
        assert sum(t.nbytes for t in tensors.values()) <= SIZE or len(tensors) == 1


def test_a_folder_has_the_small_files_of_the_first_input(tmp_path: Path):
    base = hf_folder(tmp_path / "base", random_model(1))

    folder = write(weighted_sum(base, random_model(2), alpha=0.3), tmp_path / "merged")

    assert names(folder) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_every_shard_says_where_it_comes_from(tmp_path: Path):
    a, b = (hf_folder(tmp_path / name, random_model(i)) for i, name in enumerate("ab"))

    folder = merge(weighted_sum(a, b, alpha=0.3), tmp_path / "merged")

    with safe_open(folder / "model.safetensors", "pt") as file:
        assert "weighted_sum" in file.metadata()["mecha_recipe"]


def test_a_pipeline_becomes_a_pipeline(tmp_path: Path):
    a, b = pipeline(tmp_path / "a", 0), pipeline(tmp_path / "b", 10)

    folder = write(weighted_sum(a, b, alpha=0.5), tmp_path / "merged")

    assert names(folder) == names(a)
    assert load(folder)["vae.w"].tolist() == [6] * 8


def test_a_model_of_that_name_is_replaced_and_the_rest_of_the_folder_stays(tmp_path: Path):
    a, b = random_model(1), random_model(2)
    folder = write(weighted_sum(a, b, alpha=0.1), tmp_path / "merged", SIZE // 3)
    (folder / "notes.txt").write_text("mine")
    many = len(names(folder))

    write(weighted_sum(a, b, alpha=0.9), folder, SIZE)

    assert contents(load(folder)) == contents(merge(weighted_sum(a, b, alpha=0.9)))
    assert (folder / "notes.txt").read_text() == "mine"
    assert len(names(folder)) < many, "the shards of the old model are gone"


def test_weights_that_would_be_loaded_instead_are_an_error(tmp_path: Path):
    recipe = weighted_sum(random_model(1), random_model(2), alpha=0.1)
    whole = write(recipe, tmp_path / "whole")
    shards = write(recipe, tmp_path / "shards", SIZE)

    with pytest.raises(CheckpointError, match=r"holds model\.safetensors, which could be loaded in place"):
        write(recipe, whole, SIZE)
    with pytest.raises(CheckpointError, match=r"holds model\.safetensors\.index\.json, which could be"):
        write(recipe, shards)


def test_the_folder_of_an_input_is_no_output(tmp_path: Path):
    base = hf_folder(tmp_path / "base", random_model(1))

    with pytest.raises(CheckpointError, match=r"base is the folder of the input .*Write to another folder"):
        write(weighted_sum(base, random_model(2), alpha=0.1), base)


def test_shards_need_a_folder(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"m\.safetensors is a file, and shards need a folder"):
        write(weighted_sum(random_model(1), random_model(2), alpha=0.1), tmp_path / "m.safetensors", SIZE)


def test_a_merge_that_fails_leaves_no_shard(tmp_path: Path):
    broken = random_model(2)
    broken["double"] = torch.full((5, 3), torch.nan, dtype=torch.float64)

    with pytest.raises(Exception, match="not finite"):
        write(weighted_sum(random_model(1), broken, alpha=0.1), tmp_path / "merged", SIZE)

    assert names(tmp_path) == []


def test_an_interrupted_merge_into_shards_goes_on_where_it_stopped(tmp_path: Path):
    a, b = (hf_folder(tmp_path / name, random_model(i)) for i, name in enumerate("ab"))
    job = Job(weighted_sum(a, b, alpha=0.3), tmp_path / "merged", shard_size=SIZE)
    done = []

    def interrupt(key: str, nbytes: int) -> None:
        done.append(key)
        if len(done) == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_many([job], progress=interrupt)
    assert not (tmp_path / "merged" / "model.safetensors.index.json").exists()
    assert find_partial_outputs([tmp_path])

    report = merge_many([job])

    assert report.resumed_keys > 0
    assert contents(load(tmp_path / "merged")) == contents(merge(job.recipe))
    assert not find_partial_outputs([tmp_path])


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("500 mb", 5 * 10**8), ("4GiB", 2**32), (7, 7), ("1.5k", 1500)]
)
def test_a_size_is_read(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "big", "-5GB", "0", "5XB", True, None])
def test_what_is_no_size_is_an_error(text):
    with pytest.raises(ConfigError, match="expected a size such as 5GB"):
        parse_size(text)


def test_the_config_says_what_the_weights_are(tmp_path: Path):
    tensors = {"model.embed_tokens.weight": torch.ones(6, 4), "model.norm.weight": torch.ones(4)}
    base = hf_folder(tmp_path / "base", tensors, torch_dtype="float32", vocab_size=6)
    same = write(weighted_sum(base, tensors, alpha=0.1), tmp_path / "same")
    merge_many([Job(weighted_sum(base, tensors, alpha=0.1), tmp_path / "half", dtype=torch.bfloat16)])

    assert (same / "config.json").read_bytes() == (base / "config.json").read_bytes()
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_small_file_that_is_a_link_out_of_the_model_is_refused(tmp_path: Path):
    secret = tmp_path / "secret.json"
    secret.write_text('"a password"')
    base = hf_folder(tmp_path / "base", random_model(1))
    (base / "generation_config.json").symlink_to(secret)

    with pytest.raises(CheckpointError, match=r"config\.json is a link that leads out of its model"):
        write(weighted_sum(base, random_model(2), alpha=0.3), tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_the_links_of_a_hub_s_cache_are_followed(tmp_path: Path):
    snapshot = hf_folder(tmp_path / "models--org--name" / "snapshots" / "abc", random_model(1))
    blob = tmp_path / "models--org--name" / "blobs" / "123"
    blob.parent.mkdir()
    (snapshot / "tokenizer.json").rename(blob)
    (snapshot / "tokenizer.json").symlink_to("../../blobs/123")

    folder = write(weighted_sum(snapshot, random_model(2), alpha=0.3), tmp_path / "merged")

    assert (folder / "tokenizer.json").read_bytes() == blob.read_bytes()
    assert not (folder / "tokenizer.json").is_symlink()


@pytest.mark.parametrize("name", ["x.pt", "x.ckpt", "x.bin", "x.SAFETENSORS", "x.GGUF"])
@pytest.mark.parametrize("exists", [False, True])
def test_the_suffix_of_a_format_that_is_not_written_is_no_name_of_a_folder(tmp_path: Path, name, exists):
    target = tmp_path / name
    if exists:
        target.write_bytes(b"mine")

    with pytest.raises(CheckpointError, match=r"models are written as \.safetensors, \.sft, \.gguf, and not"):
        merge(weighted_sum({"w": torch.ones(2)}, {"w": torch.zeros(2)}), target)

    assert target.read_bytes() == b"mine" if exists else not target.exists()


def test_sft_is_a_file_of_safetensors(tmp_path: Path):
    merge(weighted_sum({"w": torch.ones(2)}, {"w": torch.zeros(2)}), tmp_path / "x.sft")

    assert load_file(tmp_path / "x.sft")["w"].tolist() == [0.5, 0.5]


def test_a_folder_that_is_there_may_have_any_name(tmp_path: Path):
    (tmp_path / "v1.pt").mkdir()

    merge(weighted_sum({"w": torch.ones(2)}, {"w": torch.zeros(2)}), tmp_path / "v1.pt")

    assert (tmp_path / "v1.pt" / "model.safetensors").is_file()


def test_a_file_that_is_made_while_the_folders_are_exchanged_stays(tmp_path, monkeypatch):
    exchange = staging._exchange

    def meanwhile(first: Path, second: Path) -> None:
        (second / "notes").mkdir()
        (second / "notes" / "late.txt").write_text("of another process")
        exchange(first, second)

    hf_folder(tmp_path / "a", random_model(0))
    models = [str(tmp_path / "a"), random_model(1)]
    merge(weighted_sum(*models, alpha=0.1), tmp_path / "out")
    monkeypatch.setattr(staging, "_exchange", meanwhile)
    merge(weighted_sum(*models, alpha=0.9), tmp_path / "out")

    assert (tmp_path / "out" / "notes" / "late.txt").read_text() == "of another process"
