"""A model that is only a part of what it is merged with: the other parts are taken as they are."""

import json
import re
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import mecha_exp
from mecha_exp.architectures import from_yaml, register, resolve
from mecha_exp.engine import EngineOptions, Job, plan, run_plan
from mecha_exp.errors import CheckpointError

SIZES = "sizes: {layers: 2, hidden: 4, three_hidden: 12, feed_forward: 8, vocabulary: 6, positions: 3}"
WHOLE = f"""
identifier: small-single
components:
  text: {{prefix: text., layout: clip_openclip, {SIZES}}}
  image: {{prefix: image., keys: {{"layers.{{0..2}}.weight": [4, 4]}}}}
  ema: {{prefix: ema., optional: true, keys: {{"layers.{{0..2}}.weight": [4, 4]}}}}
"""
TEXT = f"""
identifier: small_text-hf
components:
  text: {{layout: clip_hf, {SIZES}}}
"""


@pytest.fixture(autouse=True)
def configs(registries):
    register(from_yaml(WHOLE))
    register(from_yaml(TEXT))


def random_model(identifier: str, *components: str) -> dict[str, torch.Tensor]:
    config = resolve(identifier)
    return {
        key: torch.randn(info.shape) for name in components for key, info in config.components()[name].items()
    }


def merged(tmp_path: Path, options: EngineOptions | None = None, **models) -> tuple[dict, list[str]]:
    for name, tensors in models.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
    paths = [tmp_path / f"{name}.safetensors" for name in models]
    with plan(
        [Job(mecha_exp.weighted_sum(*paths, alpha=0.25), tmp_path / "out.safetensors")], options
    ) as made:
        run_plan(made)
        return load_file(tmp_path / "out.safetensors"), list(made.warnings)


@pytest.mark.parametrize("order", [("whole", "part"), ("part", "whole")])
def test_a_part_in_another_format_is_merged_and_the_rest_is_taken(tmp_path, order):
    models = {"whole": random_model("small-single", "text", "image")}
    models["part"] = random_model("small_text-hf", "text")

    made, warnings = merged(tmp_path, **{name: models[name] for name in order})

    assert made.keys() >= models["whole"].keys()
    query = models["part"]["text_model.encoder.layers.1.self_attn.q_proj.weight"]
    a, b = (models["whole"]["text.transformer.resblocks.1.attn.in_proj_weight"][:4], query)
    a, b = (a, b) if order[0] == "whole" else (b, a)
    mixed = made["text.transformer.resblocks.1.attn.in_proj_weight"][:4]
    assert torch.allclose(mixed, 0.75 * a + 0.25 * b)
    assert torch.equal(made["image.layers.1.weight"], models["whole"]["image.layers.1.weight"])
    notes = "\n".join(warnings)
    assert re.search(
        r"part\.safetensors without image, \S+: taken from \S*whole\.safetensors as it is", notes
    )


def test_each_part_is_taken_from_the_first_model_that_has_it(tmp_path):
    first = random_model("small-single", "text", "image")
    second = random_model("small-single", "image", "text", "ema")

    made, warnings = merged(tmp_path, first=first, second=second)

    assert torch.equal(made["ema.layers.0.weight"], second["ema.layers.0.weight"])
    assert re.search(r"^\S*first\.safetensors without ema: taken from \S*second\.saf\S* as it is$", *warnings)


def test_a_key_missing_inside_a_part_is_an_error_and_the_lacking_part_is_not_counted(tmp_path):
    part = random_model("small-single", "image")
    del part["image.layers.1.weight"]

    with pytest.raises(CheckpointError, match=r"part\S* lacks 1 of the .* keys .*image\.layers\.1\.weight"):
        merged(tmp_path, whole=random_model("small-single", "text", "image"), part=part)


def test_leaving_out_what_is_missing_leaves_out_parts_too(tmp_path):
    models = {
        "whole": random_model("small-single", "text", "image"),
        "part": random_model("small-single", "image"),
    }

    made, _ = merged(tmp_path, EngineOptions(on_missing="skip"), **models)

    assert made.keys() == models["part"].keys()


def test_models_with_no_part_in_common_are_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="lacks"):
        merged(
            tmp_path, a=random_model("small-single", "text", "image"), b={"other.weight": torch.zeros(2, 2)}
        )


def test_a_diffusers_unet_merges_into_a_single_file_of_stable_diffusion(tmp_path):
    checkpoint, unet = tmp_path / "sd1.safetensors", tmp_path / "unet" / "diffusion_pytorch_model.safetensors"
    unet.parent.mkdir()
    sparse_file(checkpoint, "sd1-ldm")
    sparse_file(unet, "sd1-diffusers_unet_only")

    with plan(
        [Job(mecha_exp.weighted_sum(checkpoint, unet, alpha=0.5), tmp_path / "out.safetensors")]
    ) as planned:
        reads = {key.key: planned.bytes_of(key) for key in planned.keys}
        warnings = planned.warnings

    config = resolve("sd1-ldm")
    assert reads.keys() == {key for key, info in config.keys().items() if not info.optional}
    for key, count in reads.items():
        size = 2 * torch.Size(config.keys()[key].shape).numel()
        assert count == size * (2 if config.component_of(key) == "diffuser" else 1), key
    assert any(line.endswith("is sd1-diffusers_unet_only: read as sd1-ldm") for line in warnings)
    assert any("without " in line and "sd1.safetensors as it is" in line for line in warnings)


def sparse_file(path: Path, identifier: str) -> None:
    """A checkpoint in its real shapes, all zeros, that takes no room on the disk."""
    header, end = {}, 0
    for key, info in resolve(identifier).keys().items():
        if not info.optional:
            start, end = end, end + 2 * torch.Size(info.shape).numel()
            header[key] = {"dtype": "F16", "shape": list(info.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
