"""LoRA and LyCORIS files that are made of a difference of models."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from toy_lora import (
    CONV,
    StateDict,
    added,
    base_model,
    rand,
)

import mecha_exp as m
from mecha_exp.architectures import (
    detect,
    resolve,
)

# a difference of models as such a file

LOKR = {"kohya": m.extract_kohya_lokr, "lycoris": m.extract_lycoris_lokr}
EXTRACTIONS: dict[str, Callable[..., m.Node]] = {
    "kohya": m.extract_kohya_lora,
    "lycoris": m.extract_lycoris_lora,
}


def difference() -> tuple[m.Node, StateDict]:
    fine, base = base_model(2), base_model(1)
    deltas = {key: fine[key] - base[key] for key in base if key != "te.ids"}
    return m.model(fine, "toy-kohya") - m.model(base, "toy-kohya"), deltas


def best(delta: Tensor, rank: int) -> Tensor:
    u, s, vh = torch.linalg.svd(delta.flatten(1), full_matrices=False)
    return (u[:, :rank] * s[:rank] @ vh[:rank]).reshape(delta.shape)


@pytest.mark.parametrize("writer", EXTRACTIONS)
@pytest.mark.parametrize("rank", [1, 2, 3, 100])
def test_a_lora_that_is_extracted_is_the_best_one_of_its_rank(writer: str, rank: int, tmp_path: Path):
    node, deltas = difference()
    path = tmp_path / "lora.safetensors"

    made = EXTRACTIONS[writer](node, rank=rank, use_approximate_basis=False)
    m.merge(made, path, merge_dtype=torch.float64)

    file = load_file(path)
    prefix = {"kohya": "lora", "lycoris": "lycoris"}[writer]
    matrices = {key: delta for key, delta in deltas.items() if delta.ndim > 1}
    modules = {f"{prefix}_{key.removesuffix('.weight').replace('.', '_')}" for key in matrices}
    assert file.keys() == {
        f"{x}.{end}" for x in modules for end in ("lora_up.weight", "lora_down.weight", "alpha")
    }
    assert file[f"{prefix}_unet_conv_0.lora_up.weight"].shape == (6, min(rank, 6), 1, 1)
    assert file[f"{prefix}_unet_conv_0.lora_down.weight"].shape == (min(rank, 6), 4, 3, 3)
    assert file[f"{prefix}_te_layers_0_q.alpha"] == min(rank, 6)
    assert detect(file).config.identifier == f"toy-kohya_{writer}_lora"
    again = added(file)
    assert again.keys() == matrices.keys()
    for key, delta in matrices.items():
        torch.testing.assert_close(again[key], best(delta, rank), msg=lambda s, k=key: f"{k}: {s}")


def test_an_approximate_basis_finds_a_difference_of_low_rank_and_depends_on_the_seed_alone():
    low = {key: best(delta, 2) for key, delta in difference()[1].items() if delta.ndim > 1}
    node = m.model(low, "toy-kohya", "delta")

    made = m.merge(m.extract_kohya_lora(node, rank=2), merge_dtype=torch.float64)

    for key, delta in low.items():
        torch.testing.assert_close(added(made)[key], delta, rtol=1e-6, atol=1e-8)
    again = m.merge(
        m.extract_kohya_lora(node, rank=2, approximate_basis_seed=None), merge_dtype=torch.float64
    )
    assert all(torch.equal(made[key], again[key]) for key in made)


@pytest.mark.parametrize("writer", ["kohya", "lycoris"])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 0.8])
def test_a_lokr_that_is_extracted_is_the_nearest_product(writer: str, ratio: float):
    node, deltas = difference()

    made = m.merge(LOKR[writer](node, ratio), merge_dtype=torch.float64)

    assert {key.partition(".")[2] for key in made} == {"lokr_w1", "lokr_w2"}
    assert detect(made).config.identifier == f"toy-kohya_{writer}_lora"
    for key, tensor in added(made).items():
        wanted = m.truncate_kronecker.__wrapped__(deltas[key], ratio, use_approximate_basis=False)
        torch.testing.assert_close(tensor, wanted)


def test_an_extraction_is_converted_without_a_file_between():
    node, deltas = difference()

    made = m.convert(m.extract_kohya_lora(node, rank=2, use_approximate_basis=False), "toy-kohya")

    merged = m.merge(made, merge_dtype=torch.float64)
    torch.testing.assert_close(merged[CONV], best(deltas[CONV], 2))


def test_ranks_by_block_are_those_of_the_blocks_of_the_model():
    node, _ = difference()

    made = m.merge(m.extract_kohya_lora(node, rank={"BASE": 1, "IN01": 2, "default": 4}))

    ranks = {key.split(".")[0]: tensor.shape[0] for key, tensor in made.items() if "lora_down" in key}
    assert ranks["lora_te_layers_1_v"] == 1
    assert (ranks["lora_unet_conv_0"], ranks["lora_unet_conv_1"], ranks["lora_unet_proj"]) == (4, 2, 4)


def test_a_difference_without_names_of_modules_is_converted_or_an_error():
    key = "model.diffusion_model.input_blocks.1.0.in_layers.2.weight"
    delta = rand(320, 320, 3, 3)
    made = m.merge(m.extract_kohya_lora(m.model({key: delta}, "sdxl-sgm", "delta"), rank=1))
    assert set(made) == {
        f"lora_unet_input_blocks_1_0_in_layers_2.{x}" for x in ("lora_up.weight", "lora_down.weight", "alpha")
    }

    with pytest.raises(
        m.RecipeError,
        match=r"no names of modules for 'llama-hf', only for the architectures auraflow, .*sd1, ",
    ):
        m.merge(m.extract_kohya_lora(m.model({"model.norm.weight": rand(4)}, "llama-hf", "delta")))
    with pytest.raises(m.RecipeError, match="rank: 0 is out of range"):
        m.extract_kohya_lora(m.model({key: delta}, "sdxl-sgm", "delta"), rank=0)


# what a user interface reads of such a file

SETTINGS = {
    "sd1-kohya": ("sd_v1", "stable-diffusion-v1/lora", "diffusers", "512x512"),
    "sdxl-kohya": (
        "sdxl_base_v1-0",
        "stable-diffusion-xl-v1-base/lora",
        "https://github.com/Stability-AI/generative-models",
        "1024x1024",
    ),
}


def few_layers(identifier: str, seed: int) -> StateDict:
    """Some tensors of the UNet of a model config: two matrices that tell the family, and a kernel."""
    infos = resolve(identifier).keys()
    of_unet = {key: info.shape for key, info in infos.items() if key.startswith("unet.")}
    matrices = [key for key, shape in of_unet.items() if len(shape) == 2 and "attn2.to_k" in key][:2]
    kernels = [key for key, shape in of_unet.items() if shape[2:] == (3, 3)][:1]
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(of_unet[key], generator=generator) for key in (*matrices, *kernels)}


def header_of(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata())


@pytest.mark.parametrize("identifier", SETTINGS)
@pytest.mark.parametrize(
    ("make", "module"), [(m.extract_kohya_lora, "networks.lora"), (m.extract_lycoris_lora, "lycoris.kohya")]
)
def test_an_extracted_file_says_what_user_interfaces_list_it_by(
    identifier: str, make: Callable[..., m.Node], module: str, tmp_path: Path
):
    fine, base = (m.model(few_layers(identifier, seed), identifier) for seed in (1, 2))

    m.merge(make(fine - base, rank=3), tmp_path / "My style.safetensors")

    header = header_of(tmp_path / "My style.safetensors")
    names = ("ss_base_model_version", "modelspec.architecture", "modelspec.implementation")
    assert tuple(header[name] for name in (*names, "modelspec.resolution")) == SETTINGS[identifier]
    assert header["modelspec.title"] == "My style"
    assert header["ss_network_module"] == module
    assert (header["ss_network_dim"], header["ss_network_alpha"], header["ss_v2"]) == ("3", "3.0", "False")
    assert json.loads(header["ss_network_args"])["conv_dim"] == "3"


def test_a_lokr_file_names_its_algorithm_and_a_model_has_no_such_entries(tmp_path: Path):
    node, _ = difference()

    m.merge(m.extract_kohya_lokr(node), tmp_path / "lokr.safetensors")
    m.merge(m.model(base_model(1), "toy-kohya"), tmp_path / "model.safetensors")

    header = header_of(tmp_path / "lokr.safetensors")
    assert header["ss_network_module"] == "lycoris.kohya"
    assert json.loads(header["ss_network_args"])["algo"] == "lokr"
    assert not {"ss_network_dim", "ss_network_alpha"} & header.keys()
    assert not any(key.startswith(("ss_", "modelspec.")) for key in header_of(tmp_path / "model.safetensors"))
