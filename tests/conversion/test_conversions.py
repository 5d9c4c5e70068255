"""Formats: from one to the other and back gives the same bytes, for every pair of every architecture."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import mecha_exp
from mecha_exp.__main__ import main
from mecha_exp.architectures import KeyInfo, detect, resolve, targets_of, views
from mecha_exp.checkpoint import Component, Destination, TensorInfo, open_stored
from mecha_exp.engine import Job, plan, run_plan
from mecha_exp.engine.planner.inputs import in_one_format
from mecha_exp.errors import CheckpointError, ConfigError
from mecha_exp.graph.literals import model
from mecha_exp.graph.nodes import InMemory
from mecha_exp.sources.copier import write_source
from mecha_exp.sources.format_view import ConvertedSource, convert_source
from mecha_exp.sources.memory import MemorySource

PAIRS = [
    ("sdxl-sgm", "sdxl-diffusers"),
    ("sdxl-sgm", "sdxl-kohya"),
    ("sdxl-diffusers", "sdxl-kohya"),
    ("sd1-ldm", "sd1-diffusers"),
    ("sd1-ldm", "sd1-kohya"),
    ("vae-ldm", "vae-diffusers"),
    ("clip_g-openclip", "clip_g-hf"),
    ("clip_l-openclip", "clip_l-hf"),
]
BOTH_WAYS = [pair for one, other in PAIRS for pair in ((one, other), (other, one))]


def small(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape with every width divided by 256: the ratios that conversions rely on stay."""
    return tuple(size if size < 8 else max(1, size // 256) for size in shape)


def small_model(identifier: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """A model with all keys of a config, small and full of different numbers."""
    generator = torch.Generator().manual_seed(seed)
    return {
        key: torch.randint(-999, 999, small(info.shape), generator=generator).to(torch.float16)
        for key, info in resolve(identifier).keys().items()
    }


def converted(model: dict[str, torch.Tensor], source: str, target: str) -> ConvertedSource:
    return ConvertedSource(MemorySource(InMemory(model)), views(source, target))


def read(source: ConvertedSource) -> dict[str, torch.Tensor]:
    """Every tensor, read in two pieces that do not end where its parts do."""
    found = {}
    for key in source.keys():
        info = source.info(key)
        values = torch.empty(info.numel, dtype=torch.float16)
        middle = info.numel // 3 + 1 if info.numel > 1 else 0
        source.read_into(key, middle, values[middle:])
        source.read_into(key, 0, values[:middle])
        found[key] = values.view(info.shape)
    return found


@pytest.mark.parametrize(("source", "target"), BOTH_WAYS)
def test_there_and_back_gives_the_same_bytes(source, target):
    model = small_model(source)

    there = read(converted(model, source, target))
    back = read(converted(there, target, source))

    wanted = {key: small(info.shape) for key, info in resolve(target).keys().items()}
    assert {key: tuple(tensor.shape) for key, tensor in there.items()}.items() <= wanted.items()
    required = {key for key, info in resolve(source).keys().items() if not info.optional}
    assert required <= back.keys()
    for key, tensor in back.items():
        assert tensor.numpy().tobytes() == model[key].numpy().tobytes(), key
        assert tensor.shape == model[key].shape, key


@pytest.mark.skipif(not hasattr(os, "pread"), reason="nothing has a place without it")
@pytest.mark.parametrize(
    ("source", "target"), [("clip_g-openclip", "clip_g-hf"), ("clip_g-hf", "clip_g-openclip")]
)
def test_a_view_has_a_place_where_its_bytes_lie_together(source, target, tmp_path):
    save_file(small_model(source), tmp_path / "model.safetensors")
    with open_stored(tmp_path / "model.safetensors") as stored:
        made = ConvertedSource(stored, views(source, target))
        placed = 0
        for key in made.keys():
            expected = bytearray(made.info(key).nbytes)
            made.read_bytes_into(key, 0, memoryview(expected))
            if (place := made.region(key)) is not None:
                placed += 1
                assert os.pread(place.descriptor, len(expected), place.offset) == expected, key
        stacked = [key for key in made.keys() if made.region(key) is None]
    assert placed
    assert all("in_proj" in key or "text_projection" in key for key in stacked)


def test_a_fused_projection_is_cut_into_queries_keys_and_values():
    model = small_model("clip_g-openclip")

    made = read(converted(model, "clip_g-openclip", "clip_g-hf"))

    fused = model["transformer.resblocks.3.attn.in_proj_weight"]
    attention = "text_model.encoder.layers.3.self_attn"
    assert torch.equal(torch.cat([made[f"{attention}.{x}_proj.weight"] for x in "qkv"]), fused)
    assert torch.equal(made["text_projection.weight"], model["text_projection"].T)


def test_a_linear_layer_becomes_a_convolution_with_a_kernel_of_one():
    model = small_model("vae-diffusers")

    made = read(converted(model, "vae-diffusers", "vae-ldm"))

    name = "encoder.mid_block.attentions.0.to_q.weight"
    assert torch.equal(made["encoder.mid.attn_1.q.weight"], model[name][:, :, None, None])
    assert torch.equal(
        made["decoder.up.3.block.0.conv1.bias"], model["decoder.up_blocks.0.resnets.0.conv1.bias"]
    )


@pytest.mark.parametrize(
    ("ldm", "diffusers"),
    [
        ("input_blocks.0.0.weight", "conv_in.weight"),
        ("input_blocks.3.0.op.bias", "down_blocks.0.downsamplers.0.conv.bias"),
        ("input_blocks.8.1.proj_in.weight", "down_blocks.2.attentions.1.proj_in.weight"),
        ("middle_block.2.out_layers.3.weight", "mid_block.resnets.1.conv2.weight"),
        ("output_blocks.2.2.conv.weight", "up_blocks.0.upsamplers.0.conv.weight"),
        ("output_blocks.8.0.skip_connection.bias", "up_blocks.2.resnets.2.conv_shortcut.bias"),
        ("label_emb.0.2.bias", "add_embedding.linear_2.bias"),
        ("out.2.weight", "conv_out.weight"),
    ],
)
def test_a_layer_keeps_its_place_in_the_network(ldm, diffusers):
    table = views("sdxl-sgm", "sdxl-diffusers").by_key

    assert table[f"unet.{diffusers}"].sources == (f"model.diffusion_model.{ldm}",)


def test_a_part_alone_becomes_part_of_the_whole_and_the_whole_gives_its_part():
    table = views("sdxl-diffusers_unet_only", "sdxl-sgm")

    assert set(table.by_key) == set(resolve("sdxl-sgm").components()["diffuser"])
    assert set(views("sdxl-sgm", "vae-diffusers").by_key) == set(resolve("vae-diffusers").keys())
    assert not table.lost


def test_what_has_no_place_is_said():
    lost = views("sd1-ldm", "sd1-diffusers").lost

    assert "betas" in lost
    assert set(resolve("sd1-ldm").components()["ema"]) < set(lost)


def test_blocks_become_a_weight_for_each_key_by_the_convention():
    time = "model.diffusion_model.time_embed.0.weight"

    assert views("sdxl-supermerger_blocks", "sdxl-sgm").by_key[time].sources == ("BASE",)
    assert views("sdxl-supermerger_blocks", "sdxl-sgm", "supermerger").by_key[time].sources == ("IN00",)
    assert len(views("sdxl-supermerger_blocks", "sdxl-sgm").by_key) == len(resolve("sdxl-sgm").keys())


def test_every_format_of_an_architecture_is_in_reach():
    assert {"sdxl-sgm", "sdxl-kohya", "sdxl-diffusers_unet_only"} <= set(
        targets_of(resolve("sdxl-diffusers"))
    )
    assert targets_of(resolve("llama-hf")) == []


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (
            "sd1-ldm",
            "sdxl-sgm",
            "no conversion from sd1-ldm to sdxl-sgm.*diffuser.*It can become .*sd1-diffusers",
        ),
        ("llama-hf", "sdxl-sgm", "no component in common"),
        ("sd1-supermerger_blocks", "sdxl-sgm", "these are blocks of sd1, while sdxl has BASE, IN00"),
        ("sdxl-sgn", "sdxl-sgm", "unknown model config 'sdxl-sgn'. Did you mean 'sdxl-sgm'"),
    ],
)
def test_where_nothing_leads_the_error_says_why_and_where_one_can_go(source, target, message):
    with pytest.raises(ConfigError, match=message):
        views(source, target)


def test_parts_that_do_not_fit_are_an_error_that_names_them():
    model = small_model("clip_g-hf")
    name = "text_model.encoder.layers.0.self_attn.q_proj.weight"
    model[name] = model[name].float()
    del model["text_model.encoder.layers.1.self_attn.k_proj.bias"]
    with pytest.raises(
        CheckpointError, match=r"layers.1.self_attn.k_proj.bias is missing, of which .*in_proj_bias"
    ):
        converted(model, "clip_g-hf", "clip_g-openclip")

    model["text_model.encoder.layers.1.self_attn.k_proj.bias"] = torch.zeros(5, dtype=torch.float16)
    with pytest.raises(CheckpointError, match=r"in_proj_weight would be made of different dtypes: .* F32"):
        converted(model, "clip_g-hf", "clip_g-openclip")


def run(capsys, monkeypatch, *words: str) -> tuple[int, str]:
    monkeypatch.setattr("sys.argv", ["mecha_exp", *words])
    status = main()
    said = capsys.readouterr()
    return status, said.out + said.err


@pytest.fixture
def clip(tmp_path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A text model in full depth and in its real shapes, but of one width: what detection needs."""
    path = tmp_path / "vae.safetensors"
    model = {key: torch.rand(info.shape).half() for key, info in resolve("vae-ldm").keys().items()}
    save_file(model, path)
    return path, model


def names_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_the_verb_writes_a_folder_that_the_verb_reads_back(clip, tmp_path, capsys, monkeypatch):
    path, model = clip
    folder, again = tmp_path / "vae", tmp_path / "again.safetensors"

    status, said = run(capsys, monkeypatch, "convert", str(path), "--to", "vae-diffusers", "-o", str(folder))
    assert status == 0, said
    assert names_in(folder) == ["config.json", "diffusion_pytorch_model.safetensors"]
    assert "converted 248 keys" in said

    status, said = run(capsys, monkeypatch, "convert", str(folder), "--to", "vae-ldm", "-o", str(again))
    assert status == 0, said
    back = load_file(again)
    assert all(torch.equal(back[key], tensor) for key, tensor in model.items())
    assert back.keys() == model.keys()


def test_the_verb_says_what_is_wrong(clip, tmp_path, capsys, monkeypatch):
    path, _ = clip
    other = str(tmp_path / "x.safetensors")

    status, said = run(capsys, monkeypatch, "convert", str(path), "--to", "vae-difusers", "-o", other)
    assert (status, "Did you mean 'vae-diffusers'" in " ".join(said.split())) == (1, True)
    status, said = run(capsys, monkeypatch, "convert", str(path), "--to", "vae-ldm", "-o", str(path))
    assert (status, "is the model being read" in " ".join(said.split())) == (1, True)
    status, said = run(
        capsys, monkeypatch, "convert", str(path), "--to", "vae-ldm", "-o", other, "--config", "sd1-ldm"
    )
    assert (status, "is not a checkpoint of sd1-ldm" in " ".join(said.split())) == (1, True)


def test_a_folder_of_another_format_cannot_be_imitated(clip, tmp_path, capsys, monkeypatch):
    path, _ = clip
    other = tmp_path / "other"
    other.mkdir()
    save_file({"x": torch.zeros(1)}, other / "model.safetensors")

    words = ("--to", "vae-diffusers", "-o", str(tmp_path / "vae"), "--like", str(other))
    status, said = run(capsys, monkeypatch, "convert", str(path), *words)

    assert status == 1
    assert f"--like {other} is not in the format vae-diffusers: most of its keys do not match" in " ".join(
        said.split()
    )
    assert not (tmp_path / "vae").exists()


def test_the_parts_that_there_are_get_their_configurations(tmp_path, capsys, monkeypatch):
    path, folder = tmp_path / "part.safetensors", tmp_path / "folder"
    clip = resolve("sd1-ldm").components()["clip_l"]
    save_file({key: torch.zeros(info.shape).half() for key, info in clip.items() if not info.optional}, path)

    words = ("--to", "sd1-diffusers", "-o", str(folder), "--config", "sd1-ldm")
    status, said = run(capsys, monkeypatch, "convert", str(path), *words)

    assert status == 0, said
    found = names_in(folder)
    assert {"text_encoder/config.json", "text_encoder/model.safetensors"} <= set(found)
    assert not {"model_index.json", "unet/config.json", "vae/config.json"} & set(found)
    assert "tokenizer" not in said


class Interrupted:
    """A source in which reading is interrupted, as by Ctrl-C, once so many keys have been read."""

    def __init__(self, source: ConvertedSource, keys: int) -> None:
        self._source, self._left = source, keys

    def __getattr__(self, name):
        return getattr(self._source, name)

    def read_bytes_into(self, key, start, view):
        self._left -= 1
        if self._left < 0:
            raise KeyboardInterrupt
        self._source.read_bytes_into(key, start, view)


@pytest.mark.parametrize("name", ["there.safetensors", "there"])
def test_an_interrupted_conversion_goes_on_where_it_stopped(clip, tmp_path, name):
    path, _ = clip
    with open_stored(path) as stored:
        source = convert_source(stored, "vae-diffusers")
        layout = {key: ("F16", source.info(key).shape) for key in source.keys()}
        folders = {} if "." in name else {"components": [Component("", Path("diffusion_pytorch_model"))]}

        def write(source, at: str):
            target = Destination(tmp_path / at, layout, **folders)
            return write_source(source, target, {}, signature=source.resume_token, workers=1)

        with pytest.raises(KeyboardInterrupt):
            write(Interrupted(source, 100), name)
        with pytest.raises(CheckpointError):
            open_stored(tmp_path / name)
        again, whole = write(source, name), write(source, f"whole-{name}")

    assert (again.resumed, whole.resumed) == (100, 0)
    with open_stored(again.path) as one, open_stored(whole.path) as other:
        assert all(torch.equal(one.read(key), other.read(key)) for key in layout)


def test_a_conversion_that_fails_leaves_nothing(clip, tmp_path):
    path, _ = clip

    class Broken(Interrupted):
        def check_unchanged(self):
            raise CheckpointError("it was changed")

    with open_stored(path) as stored:
        source = convert_source(stored, "vae-diffusers")
        layout = {key: ("F16", source.info(key).shape) for key in source.keys()}
        with pytest.raises(CheckpointError, match="it was changed"):
            write_source(Broken(source, 1000), Destination(tmp_path / "x.safetensors", layout), {})

    assert names_in(tmp_path) == [path.name]


def test_a_file_with_other_names_for_its_keys_is_converted_too(tmp_path):
    config = resolve("clip_l-hf")
    model = {
        key.removeprefix("text_model."): torch.empty(info.shape, dtype=torch.float16)
        for key, info in config.keys().items()
        if not info.optional
    }
    path = tmp_path / "clip.safetensors"
    save_file(model, path)

    with open_stored(path) as stored:
        made = convert_source(stored, "clip_l-openclip")

        assert made.info("transformer.resblocks.0.attn.in_proj_weight").shape == (2304, 768)
        assert not made.unused


def test_a_bare_vae_with_the_prefix_of_a_checkpoint_fits_two_architectures():
    keys = {f"first_stage_model.{k}": KeyInfo(i.shape, i.dtype) for k, i in resolve("vae-ldm").keys().items()}

    with pytest.raises(ConfigError, match=r"fit 4 model configs equally well: 'sd1-ldm', 'sdxl-kohya', "):
        detect(keys)


def whole(identifier: str, without: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """A model in its real shapes that takes no room: every element of a tensor is one number."""
    return {
        key: torch.full((), float(i % 50 + 1), dtype=torch.float16).expand(info.shape)
        for i, (key, info) in enumerate(resolve(identifier).keys().items())
        if not info.optional and not key.startswith(without)
    }


def test_inputs_in_several_formats_are_read_in_that_of_the_first_whole_one():
    nodes = [model(each) for each in (whole("sd1-diffusers_unet_only"), whole("sd1-ldm"), whole("sd1-kohya"))]
    opened = {node: Lazily(node.source.state_dict) for node in nodes}

    read, notes = in_one_format([mecha_exp.n_average(*nodes)], opened)

    assert set(read[nodes[0]].keys()) == set(resolve("sd1-ldm").components()["diffuser"])
    assert read[nodes[1]] is opened[nodes[1]]
    assert set(read[nodes[2]].keys()) == set(opened[nodes[1]].keys())
    assert [note.partition(" is ")[2] for note in notes] == [
        "sd1-diffusers_unet_only: read as sd1-ldm",
        "sd1-kohya: read as sd1-ldm",
    ]


def test_a_lora_beside_models_in_several_formats_stays_what_it_is():
    lora = model({"lora_vae_quant_conv.diff": torch.ones(8, 8)})
    nodes = [model(whole("sd1-ldm")), model(whole("sd1-kohya"))]
    opened = {node: Lazily(node.source.state_dict) for node in (*nodes, lora)}
    recipe = mecha_exp.weighted_sum(*nodes) + mecha_exp.lora_delta(lora, nodes[0])

    read, notes = in_one_format([recipe], opened)

    assert set(read[nodes[1]].keys()) == set(opened[nodes[0]].keys())
    assert read[lora] is opened[lora]
    assert [note.partition(" is ")[2] for note in notes] == ["sd1-kohya: read as sd1-ldm"]


class Lazily(MemorySource):
    """A state dict whose expanded tensors are not written out."""

    def __init__(self, state_dict):
        self.name = "model"
        self._infos = {k: TensorInfo("F16", tuple(t.shape), 0, 2 * t.numel()) for k, t in state_dict.items()}
        self.keys = self._infos.keys


def test_a_model_in_another_format_merges_as_if_it_had_been_converted(clip, tmp_path):
    path, tensors = clip
    other, converted_path = tmp_path / "other", tmp_path / "converted.safetensors"
    target = resolve("vae-diffusers")
    with open_stored(path) as stored:
        source = convert_source(stored, target)
        layout = {key: ("F16", source.info(key).shape) for key in source.keys()}
        write_source(source, Destination(other / "diffusion_pytorch_model.safetensors", layout), {})

    with plan([Job(mecha_exp.weighted_sum(path, other, alpha=0.25), converted_path)]) as planned:
        run_plan(planned)
        assert "other is vae-diffusers: read as vae-ldm" in planned.warnings[0]

    merged = load_file(converted_path)
    assert merged.keys() == tensors.keys()
    assert all(torch.equal(merged[key], tensor) for key, tensor in tensors.items())
