"""Models on a web server: the same values as from a file, and no more bytes than the recipe needs."""

import errno
import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from range_server import RangeServer
from safetensors.torch import save_file
from state_dicts import as_bytes, random_model

from mecha_exp import from_mergekit, merge, pick_component, ties, weighted_sum
from mecha_exp.architectures import from_yaml, register
from mecha_exp.checkpoint import load, open_stored
from mecha_exp.checkpoint.remote import is_address, lookup, pieces
from mecha_exp.checkpoint.remote.pin import Pin
from mecha_exp.engine import Job, plan
from mecha_exp.errors import CheckpointError
from mecha_exp.method_api.registry import resolve_method
from mecha_exp.sources.search import find_model


def same(a, b):
    return a.keys() == b.keys() and all(as_bytes(a[key]) == as_bytes(b[key]) for key in a)


@pytest.fixture
def pair(served: Path) -> list[dict[str, torch.Tensor]]:
    """Two models on the server, with tensors of many pieces, of one, and of a few bytes."""
    models = [
        random_model(seed, large=((3000, 1100), torch.float32), other=((600, 700), torch.float32))
        for seed in (1, 2)
    ]
    for name, model in zip("ab", models, strict=True):
        save_file(model, served / f"{name}.safetensors")
    return models


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of few bytes, so that small models have many of them."""
    monkeypatch.setattr(pieces, "PIECE", 1 << 16)
    monkeypatch.setattr(pieces, "SMALL", 1 << 10)
    monkeypatch.setattr(pieces, "AHEAD", 1 << 18)
    monkeypatch.setattr(pieces, "KEPT", 1 << 18)


@pytest.mark.parametrize("method", [weighted_sum, lambda a, b, alpha: ties(a, b, b, density=alpha)])
def test_a_merge_gives_the_bytes_of_a_merge_of_files(method, pair, server, served, small_pieces):
    here = merge(method(served / "a.safetensors", served / "b.safetensors", alpha=0.3))

    elsewhere = merge(method(f"{server.url}/a.safetensors", f"{server.url}/b.safetensors", alpha=0.3))

    assert same(here, elsewhere)


def test_each_byte_of_a_weighted_sum_is_sent_once(pair, server, served):
    size = sum(file.stat().st_size for file in served.iterdir())

    merge(weighted_sum(f"{server.url}/a.safetensors", f"{server.url}/b.safetensors", alpha=0.3))

    assert server.sent < size + 2 * lookup.FIRST_BYTES + 100


def test_a_plan_of_140_gb_moves_less_than_a_megabyte(server, served):
    layers, shape, shards = 80, [8192, 28672 // 4], 30
    names = [f"model.layers.{n}.{part}.weight" for n in range(layers) for part in "abcdefghijklmno"]
    size, weight_map = shape[0] * shape[1] * 2, {}
    for shard in range(shards):
        own = names[shard::shards]
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        weight_map |= dict.fromkeys(own, file)
        spans = {
            key: {"dtype": "BF16", "shape": shape, "data_offsets": [i * size, (i + 1) * size]}
            for i, key in enumerate(own)
        }
        header = json.dumps(spans).encode()
        with (served / file).open("wb") as sparse:
            sparse.write(struct.pack("<Q", len(header)) + header)
            sparse.truncate(8 + len(header) + len(own) * size)
    (served / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (served / "config.json").write_text("{}")
    (served / "tokenizer.json").write_text(" " * 9_000_000)

    with plan([Job(weighted_sum(server.url, server.url, alpha=0.5), {})]) as planned:
        assert len(planned.keys) == len(names)
        assert sum(planned.bytes_of(key) for key in planned.keys) > 140e9

    assert server.sent < 1_000_000


def test_keys_that_the_recipe_does_not_use_are_never_fetched(server, served):
    register(
        from_yaml("""
identifier: tiny-pipeline
sizes: {wide: 700, small: 30}
components:
  unet:
    keys:
      unet.w: [wide, wide]
  vae:
    keys:
      vae.w: [wide, small]
      vae.b: [small]
""")
    )
    models = []
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        shapes = {"unet.w": (700, 700), "vae.b": (30,), "vae.w": (700, 30)}
        models.append({key: torch.randn(shape) for key, shape in shapes.items()})
        save_file(models[-1], served / f"{name}.safetensors")
    vae = sum(models[1][key].nbytes for key in ("vae.w", "vae.b"))

    baked = merge(pick_component(f"{server.url}/b.safetensors", "vae") | str(served / "a.safetensors"))

    assert same(baked, {**models[0], "vae.w": models[1]["vae.w"], "vae.b": models[1]["vae.b"]})
    assert vae <= server.sent <= vae + lookup.FIRST_BYTES + 10


def sharded(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {f"layers.{n}.weight": torch.randn(64, 64) for n in range(4)}
    for part in (0, 1):
        own = {key: tensor for n, (key, tensor) in enumerate(tensors.items()) if n % 2 == part}
        save_file(own, folder / f"model-{part + 1:05}-of-00002.safetensors")
    places = {key: f"model-{n % 2 + 1:05}-of-00002.safetensors" for n, key in enumerate(tensors)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "config.json").write_text('{"architectures": ["Tiny"], "dtype": "float32"}')
    (folder / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": {str(n): n for n in range(20000)}}})
    )
    return tensors


@pytest.mark.parametrize("end", ["", "/", "/model.safetensors.index.json"])
def test_a_folder_of_shards_is_written_with_its_small_files(end, server, served, tmp_path):
    tensors = sharded(served)

    merge(weighted_sum(server.url + end, server.url + end, alpha=0.5), tmp_path / "merged")

    assert same(load(tmp_path / "merged"), tensors)
    assert (tmp_path / "merged" / "tokenizer.json").read_bytes() == (served / "tokenizer.json").read_bytes()
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["architectures"] == ["Tiny"]


@pytest.mark.parametrize("name", ["download", "model.v1.5", "get"])
def test_a_download_needs_no_suffix(name, pair, server, served):
    (served / "a.safetensors").rename(served / name)

    assert load(find_model(f"{server.url}/{name}", [])).keys() == pair[0].keys()


def test_a_folder_may_have_a_dot_in_its_name(served, server):
    (served / "model-v1.5").mkdir()
    tensors = sharded(served / "model-v1.5")

    assert same(load(find_model(f"{server.url}/model-v1.5", [])), tensors)


def test_headers_that_cannot_be_kept_are_an_error(pair, server, fresh, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)

    with pytest.raises(
        CheckpointError, match=r"its headers cannot be kept in .*remote: No space left on device\. Make"
    ):
        find_model(f"{server.url}/a.safetensors", [])
    monkeypatch.undo()
    assert [*(fresh / "remote").iterdir()] == []


def test_large_small_files_wait_until_they_are_needed(server, served):
    sharded(served)

    with open_stored(find_model(server.url, [])):
        pass

    assert ("/tokenizer.json", "bytes=0-0") in server.requests  # its size
    assert [wanted for path, wanted in server.requests if path == "/tokenizer.json"] == ["bytes=0-0"]


def test_what_was_looked_up_is_not_asked_for_again(pair, server):
    for _ in range(3):
        with open_stored(find_model(f"{server.url}/a.safetensors", [])) as model:
            assert len(model.keys()) == 11

    assert len(server.requests) == 2  # the size, and the header


def test_a_stand_in_of_another_folder_is_not_followed(pair, server, tmp_path):
    stand_in = find_model(f"{server.url}/a.safetensors", [])
    copy = tmp_path / "remote" / "copy.safetensors"
    copy.parent.mkdir()
    shutil.copy(stand_in, copy)

    with pytest.raises(CheckpointError, match=r"copy\.safetensors: its header would be"):
        open_stored(copy)


def test_any_file_system_of_fsspec_is_read(pair, served):
    import fsspec

    memory = fsspec.filesystem("memory")
    for name in "ab":
        memory.pipe(f"/bucket/{name}.safetensors", (served / f"{name}.safetensors").read_bytes())
    here = merge(weighted_sum(served / "a.safetensors", served / "b.safetensors", alpha=0.3))

    got = merge(weighted_sum("memory://bucket/a.safetensors", "memory://bucket/b.safetensors", alpha=0.3))

    assert same(here, got)


def replace_in_memory(content: bytes | None) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.rm("/bucket/a.safetensors")
    if content is not None:
        memory.pipe("/bucket/a.safetensors", content)


@pytest.mark.parametrize(
    ("is_gone", "message"),
    [(True, "changed after it was looked up: it is gone"), (False, "changed while it was being read")],
)
def test_a_file_of_any_file_system_that_changes_under_a_merge_is_an_error(is_gone, message, pair, served):
    import fsspec

    content = (served / "a.safetensors").read_bytes()
    fsspec.filesystem("memory").pipe("/bucket/a.safetensors", content)
    here = merge(weighted_sum(served / "a.safetensors", served / "b.safetensors", alpha=0.0))
    find_model("memory://bucket/a.safetensors", [])
    replace_in_memory(None if is_gone else content)

    with pytest.raises(CheckpointError, match=message):
        merge(weighted_sum("memory://bucket/a.safetensors", here, alpha=0.0))


def test_files_outside_the_folder_of_a_model_are_refused():
    pins = {name: Pin(name, 9) for name in ("model.safetensors", "../../.bashrc.json")}

    with pytest.raises(
        CheckpointError, match=r"names files outside its own folder: \.\./\.\./\.bashrc\.json"
    ):
        lookup._readable(pins, "hf://org/name")


def test_a_folder_of_any_file_system_is_read(served, tmp_path):
    import fsspec

    tensors = sharded(served)
    memory = fsspec.filesystem("memory")
    for file in served.iterdir():
        memory.pipe(f"/models/sharded/{file.name}", file.read_bytes())

    assert same(load(find_model("memory://models/sharded", [])), tensors)
    assert same(load(find_model("memory://models/sharded/model.safetensors.index.json", [])), tensors)


def test_a_file_address_is_a_path(pair, served):
    assert find_model((served / "a.safetensors").as_uri(), []) == served / "a.safetensors"


@pytest.mark.parametrize(
    ("path", "is_one"),
    [
        ("hf://org/name@main", True),
        ("https://a.b/c.safetensors", True),
        ("s3://bucket/a", True),
        ("pkg://some.package/a", False),
        ("made://mini8/a", False),
        ("org/name", False),
        ("C://models/a", False),
        ("models/a.safetensors", False),
    ],
)
def test_what_is_an_address(path, is_one):
    assert is_address(path) is is_one


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("nosuch://bucket/a", r"nosuch://: there is no such store\. hf, s3, gs, http"),
        ("{url}/none.safetensors", r"none\.safetensors does not exist: the server answers 404"),
        (
            "{url}/none",
            r"/none is not a file that can be read in ranges, and has none of .*lists no folders",
        ),
        ("{url}/empty.safetensors", r"empty\.safetensors is empty"),
        ("{url}/model.bin", r"model\.bin is stored as a pickle, which is not read in parts\. Download it"),
        ("{url}/model.gguf", r"model\.gguf is stored as GGUF, which is not read in parts\. Download it"),
        ("{url}/folder?token=1", r"/folder\?token=1 does not exist"),
        ("{url}/page.safetensors", r"page\.safetensors: this is a web page, not a model"),
        ("memory://nothing/here", r"memory://nothing/here does not exist, or is empty"),
        ("hf://name", r"'hf://name' is not the address of a model on the hub: expected hf://org/name"),
    ],
)
def test_what_cannot_be_read_is_said(address, message, server, served):
    (served / "empty.safetensors").touch()
    (served / "model.bin").write_bytes(b"\x80\x02")
    (served / "model.gguf").write_bytes(b"GGUF")
    (served / "page.safetensors").write_text("<!doctype html><html>" + " " * 40)

    with pytest.raises(CheckpointError, match=message):
        load(find_model(address.format(url=server.url), []))


def test_where_nothing_may_be_downloaded_an_address_is_refused(server):
    with pytest.raises(
        CheckpointError, match=r"lies elsewhere\. Nothing is read .* without hub\.offline=false"
    ):
        find_model(f"{server.url}/a.safetensors", [], offline=True)
    assert not server.requests


def test_configurations_of_mergekit_read_nothing_from_elsewhere_unless_they_may(server, pair):
    address = f"{server.url}/a.safetensors"
    words = {"merge_method": "linear", "models": [{"model": address, "parameters": {"weight": 1.0}}]}

    with pytest.raises(
        CheckpointError, match=r"lies elsewhere\. Nothing is read .* without hub\.offline=false"
    ):
        merge(from_mergekit(words, offline=True))
    merged = merge(from_mergekit({**words, "dtype": "float32"}, offline=False))
    assert torch.equal(merged["large"], pair[0]["large"])


def test_without_a_cache_folder_an_address_is_refused(server, monkeypatch):
    monkeypatch.setenv("MECHA_EXP_CACHE", "off")

    with pytest.raises(CheckpointError, match=r"need the cache folder, and MECHA_EXP_CACHE turns it off"):
        find_model(f"{server.url}/a.safetensors", [])


@pytest.mark.parametrize("module", ["aiohttp", "fsspec"])
def test_without_the_libraries_the_error_says_what_to_install(module, server, monkeypatch):
    from mecha_exp.checkpoint.remote import stores

    monkeypatch.setitem(__import__("sys").modules, module, None)
    stores.store_of.cache_clear()

    with pytest.raises(
        CheckpointError, match=rf"{module}, which is not installed: pip install 'mecha_exp\[remote\]'"
    ):
        find_model(f"{server.url}/a.safetensors", [])


@pytest.mark.parametrize("output", ["https://host/merged.safetensors", "hf://org/merged"])
def test_outputs_elsewhere_are_refused(output, save, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = save("m", random_model(1))

    with pytest.raises(
        CheckpointError, match=rf"{output} lies elsewhere\. Outputs are written to this machine"
    ):
        merge(weighted_sum(model, model, alpha=0.5), output)
    assert [file.name for file in tmp_path.iterdir()] == ["m.safetensors"]


def test_pipelines_of_transformers_are_refused(server):
    from mecha_exp.mergecraft.kinds import pipeline_of

    with pytest.raises(
        CheckpointError, match=r"lies elsewhere, and transformers reads files of this machine only"
    ):
        pipeline_of("hf://org/name")


def test_a_second_process_finds_the_stand_ins(pair, server, fresh):
    find_model(f"{server.url}/a.safetensors", [])
    before = len(server.requests)
    lookup.forget_lookups()  # as a process that begins

    find_model(f"{server.url}/a.safetensors", [])

    assert len(server.requests) == before + 1  # its version alone
    assert isinstance(server, RangeServer)


def test_a_model_under_other_keys_is_fetched_ahead(server, served):
    save_file({f"layers.{n}.up": torch.full((8, 8), float(n)) for n in range(40)}, served / "a.safetensors")
    before = len(server.requests)

    made = merge(resolve_method("rename_keys")(f"{server.url}/a.safetensors", "layers.*.up -> deep.*.down"))

    assert made["deep.7.down"][0, 0] == 7
    assert len(server.requests) - before < 10  # the small tensors come together


@pytest.mark.parametrize("order", ["shuffled", "with one moved", "of two models"])
def test_rows_of_tokens_move_little_more_than_they_have(order, server, served, small_pieces, monkeypatch):
    key, count, width = "model.embed_tokens.weight", 600, 512
    for number, name in enumerate("ab"):
        state = {key: torch.arange(count * width).view(count, width).float() + number}
        save_file(state, served / f"{name}.safetensors")
    rows = {
        "shuffled": " ".join(str(263 * number % count) for number in range(count)),
        "with one moved": f"{count - 1} 0:{count - 1}",
        "of two models": f"0:{count - 3} 1@{count - 3} 1@0 1@7",
    }[order]

    made = merge(
        resolve_method("take_rows")(*(f"{server.url}/{name}.safetensors" for name in "ab"), rows=rows)
    )

    here = merge(resolve_method("take_rows")(*(served / f"{name}.safetensors" for name in "ab"), rows=rows))
    assert same(here, made)
    assert server.sent < 1.3 * count * width * 4


def test_rows_that_are_made_of_others_move_little_more_than_these(server, served, small_pieces):
    key, count, width = "model.embed_tokens.weight", 300, 64
    generator = torch.Generator().manual_seed(0)
    for name in "ab":
        save_file({key: torch.randn(count, width, generator=generator)}, served / f"{name}.safetensors")
    made_rows = {"shared": "0@0:200+1@0:200 0@250+1@250", "rows": "210:230", "k": 8}

    method = resolve_method("approximate_rows")
    made = merge(method(*(f"{server.url}/{name}.safetensors" for name in "ab"), **made_rows))

    assert same(merge(method(*(served / f"{name}.safetensors" for name in "ab"), **made_rows)), made)
    assert made[key].shape == (20, width)
    assert server.sent < 1.3 * 2 * count * width * 4


def test_a_file_that_was_closed_gives_no_bytes(pair, server):
    model = open_stored(find_model(f"{server.url}/a.safetensors", []))
    model.expect(model.keys())
    model.close()
    largest = max(model.keys(), key=lambda key: model.info(key).nbytes)
    with pytest.raises(CheckpointError, match=r"a remote file was closed while it was being read\."):
        model.read(largest)


def test_a_card_moves_nothing_that_the_merge_does_not(pair, server, served, tmp_path):
    size = sum(file.stat().st_size for file in served.iterdir())

    recipe = weighted_sum(*(f"{server.url}/{name}.safetensors" for name in "ab"), alpha=0.3)
    merge(recipe, tmp_path / "made")

    assert server.sent < size + 2 * lookup.FIRST_BYTES + 100
    assert "| a.safetensors | unknown | `not known` |" in (tmp_path / "made" / "README.md").read_text()
