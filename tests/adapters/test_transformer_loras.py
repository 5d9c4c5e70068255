"""LoRA files for diffusion transformers, in the names of kohya, ComfyUI and diffusers, and of every kind."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from small_transformers import FAMILIES, FORMATS, transformer
from torch import Tensor

import mecha_exp as m
from mecha_exp.architectures import detect, resolve

StateDict = dict[str, Tensor]
Q = "single_transformer_blocks.1.attn.to_q"
MLP = "single_transformer_blocks.1.proj_mlp"
PREFIX = {
    "kohya": ("lora_unet_", "_"),
    "comfyui": ("diffusion_model.", "."),
    "diffusers": ("transformer.", "."),
}


def rand(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def in_double(tensors: StateDict) -> StateDict:
    return {key: tensor.double() for key, tensor in tensors.items()}


def named(form: str, module: str, **tensors: Tensor) -> StateDict:
    """A module in the names of a project; `__` stands for the dot in a suffix."""
    begin, dot = PREFIX[form]
    name = begin + module.replace(".", dot)
    spelt = (
        {"up": "lora_up.weight", "down": "lora_down.weight"}
        if form == "kohya"
        else {"up": "lora_B.weight", "down": "lora_A.weight"}
    )
    return {
        f"{name}.{spelt.get(suffix, suffix.replace('__', '.'))}": tensor for suffix, tensor in tensors.items()
    }


def added(base: StateDict, lora: StateDict) -> StateDict:
    """What a file adds to a model, by the keys of the model that it changes."""
    node = m.model(base)
    merged = m.merge(node + m.lora_delta(m.model(lora), node))
    assert merged.keys() == base.keys()
    return {key: merged[key] - base[key] for key in base if not torch.equal(merged[key], base[key])}


def assert_adds(base: StateDict, lora: StateDict, expected: StateDict) -> None:
    changed = added(base, lora)
    assert changed.keys() == expected.keys()
    for key, delta in expected.items():
        torch.testing.assert_close(changed[key], delta, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("form", ["kohya", "comfyui"])
def test_a_module_of_a_fused_projection_changes_all_of_its_parts(form: str):
    up, down = rand(84, 2), rand(2, 12, seed=1)
    lora = named(form, "single_blocks.1.linear1", up=up, down=down, alpha=torch.tensor(1.0).double())
    delta = up @ down / 2

    single = in_double(transformer("flux-flux"))
    assert_adds(single, lora, {"model.diffusion_model.single_blocks.1.linear1.weight": delta})
    folder = in_double(transformer("flux-diffusers"))
    parts = dict(
        zip(["attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"], delta.split([12, 12, 12, 48]), strict=True)
    )
    assert_adds(
        folder,
        lora,
        {f"transformer.single_transformer_blocks.1.{name}.weight": part for name, part in parts.items()},
    )


def test_modules_of_parts_of_different_ranks_change_their_rows_of_a_fused_projection():
    q, mlp = (rand(12, 2), rand(2, 12, seed=1)), (rand(48, 5, seed=2), rand(5, 12, seed=3))
    lora = named("diffusers", Q, up=q[0], down=q[1], alpha=torch.tensor(4.0).double())
    lora |= named("diffusers", MLP, up=mlp[0], down=mlp[1])
    none = torch.zeros(24, 12).double()

    single = in_double(transformer("flux-flux"))

    delta = torch.cat([q[0] @ q[1] * 2, none, mlp[0] @ mlp[1]])
    assert_adds(single, lora, {"model.diffusion_model.single_blocks.1.linear1.weight": delta})


def test_a_file_is_converted_to_the_model_of_any_size():
    lora = named("kohya", "single_blocks.1.linear1", up=rand(84, 2), down=rand(2, 12, seed=1))
    base = m.model(in_double(transformer("flux-diffusers")))

    merged, same = (
        m.merge(base + m.convert(m.model(lora), base)),
        m.merge(base + m.lora_delta(m.model(lora), base)),
    )

    assert all(torch.equal(merged[key], same[key]) for key in same)


def test_a_change_of_scale_and_shift_follows_the_order_of_the_format():
    up, down = rand(24, 2), rand(2, 12, seed=1)
    lora = named("diffusers", "norm_out.linear", up=up, down=down)

    single = in_double(transformer("flux-flux"))

    scale, shift = (up @ down).chunk(2)
    key = "model.diffusion_model.final_layer.adaLN_modulation.1.weight"
    assert_adds(single, lora, {key: torch.cat([shift, scale])})


def test_the_names_of_text_encoders_are_those_of_kohya():
    names = {
        "lora_te1_text_model_encoder_layers_0_mlp_fc1": (3072, 768),
        "lora_te3_encoder_block_0_layer_0_SelfAttention_q": (4096, 4096),
    }
    lora = {
        f"{name}.{end}": torch.zeros(shape)
        for name, (rows, columns) in names.items()
        for end, shape in [("lora_up.weight", (rows, 1)), ("lora_down.weight", (1, columns))]
    }
    lora |= {
        key: tensor.float()
        for key, tensor in named(
            "kohya", "double_blocks.0.img_mod.lin", up=rand(72, 1), down=rand(1, 12)
        ).items()
    }

    found = detect(lora)

    assert found.config.identifier == "flux-flux_lora" and not found.extra
    assert found.config.block_of("lora_te3_encoder_block_0_layer_0_SelfAttention_q.lora_up.weight") == "BASE"
    assert found.config.block_of("lora_unet_double_blocks_0_img_mod_lin.lora_up.weight") == "D00"


FEWER = [family for family in FAMILIES if family != "sd3.5_large"]  # whose 38 layers are like those of medium
FORMS = [(f"{family}-diffusers", "extract_diffusers_lora") for family in FEWER]
FORMS += [(FORMATS.get(family, f"{family}-diffusers"), "extract_kohya_lora") for family in FEWER]
FORMS += [("flux-diffusers", "extract_lycoris_lora"), ("flux-flux", "extract_diffusers_lora")]


@pytest.mark.parametrize(("name", "extract"), FORMS)
def test_what_is_extracted_and_applied_again_is_the_difference(name: str, extract: str):
    base = in_double(transformer(name))
    fine = {
        key: tensor + rand(*tensor.shape, seed=place)
        if key.endswith(".weight") and tensor.ndim > 1
        else tensor
        for place, (key, tensor) in enumerate(base.items())
    }

    difference = m.model(fine) - m.model(base)
    lora = m.merge(getattr(m, extract)(difference, rank=10**6, use_approximate_basis=False))
    applied = m.merge(m.model(base) + m.lora_delta(m.model(lora), m.model(base)))

    start = {
        "extract_kohya_lora": "lora_",
        "extract_lycoris_lora": "lycoris_",
        "extract_diffusers_lora": "transformer.",
    }
    assert all(key.startswith(start[extract]) for key in lora)
    for key, tensor in fine.items():
        torch.testing.assert_close(applied[key], tensor, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "extract"),
    [
        ("flux-flux", "extract_kohya_lora"),
        ("flux-flux", "extract_diffusers_lora"),
        ("flux-diffusers", "extract_lycoris_lokr"),
    ],
)
def test_a_difference_of_transformers_without_a_prefix_makes_the_same_file(name: str, extract: str):
    """The published files of Flux and Wan begin with `double_blocks.`, and those of folders likewise."""
    prefix = next(part.prefix for part in resolve(name).parts if part.name == "diffuser")
    whole = [transformer(name, seed) for seed in (1, 0)]
    bare = [{key.removeprefix(prefix): tensor for key, tensor in model.items()} for model in whole]

    made, expected = (m.merge(getattr(m, extract)(m.model(a) - m.model(b))) for a, b in (bare, whole))

    assert made.keys() == expected.keys()
    assert all(torch.equal(made[key], expected[key]) for key in made)


@pytest.mark.parametrize(("is_stabilised", "scale"), [(False, 4 / 2), (True, 4 / 2**0.5)])
def test_the_scale_in_the_metadata_of_diffusers_holds(is_stabilised: bool, scale: float, tmp_path: Path):
    up, down = rand(12, 2).float(), rand(2, 12, seed=1).float()
    config = {"transformer.r": 2, "transformer.lora_alpha": 4, "transformer.use_rslora": is_stabilised}
    metadata = {"lora_adapter_metadata": json.dumps(config)}
    save_file(named("diffusers", Q, up=up, down=down), tmp_path / "lora.safetensors", metadata)
    base = m.model(transformer("flux-diffusers"))

    merged = m.merge(base + m.lora_delta(str(tmp_path / "lora.safetensors"), base))

    key = f"transformer.{Q}.weight"
    expected = transformer("flux-diffusers")[key] + up @ down * scale
    torch.testing.assert_close(merged[key], expected, rtol=1e-6, atol=1e-6)


def test_metadata_that_cannot_be_read_is_an_error(tmp_path: Path):
    tensors = named("diffusers", Q, up=rand(12, 2).float(), down=rand(2, 12).float())
    save_file(tensors, tmp_path / "lora.safetensors", {"lora_adapter_metadata": "[1"})
    base = m.model(transformer("flux-diffusers"))

    with pytest.raises(m.CheckpointError, match="its lora_adapter_metadata cannot be read: it is not JSON"):
        m.merge(base + m.lora_delta(str(tmp_path / "lora.safetensors"), base))


# kinds that depend on the tensor that they change: by the definitions of their papers and LyCORIS

KEY = "model.diffusion_model.double_blocks.0.img_mlp.2.weight"
MODULE = "double_blocks.0.img_mlp.2"
W = in_double(transformer("flux-flux"))[KEY]
UP, DOWN = rand(12, 2), rand(2, 48, seed=1)
D = UP @ DOWN / 2


def _cayley(blocks: Tensor, limit: float = 0.0) -> Tensor:
    """The block-diagonal rotation of OFT."""
    skew = blocks - blocks.mT
    if limit and skew.norm() > limit:
        skew = skew * limit / skew.norm()
    eye = torch.eye(blocks.shape[1]).double()
    return torch.block_diag(*((eye + q) @ torch.linalg.inv(eye - q) for q in skew))


BLOCKS = rand(3, 4, 4, seed=2)
KINDS: dict[str, tuple[StateDict, Tensor]] = {
    "DoRA of outputs": (
        {"up": UP, "down": DOWN, "alpha": torch.tensor(1.0).double(), "dora_scale": rand(12, 1, seed=3)},
        rand(12, 1, seed=3) * (W + D) / (W + D).norm(dim=1, keepdim=True),
    ),
    "DoRA of inputs": (
        {"up": UP, "down": DOWN, "alpha": torch.tensor(1.0).double(), "dora_scale": rand(1, 48, seed=3)},
        rand(1, 48, seed=3) * (W + D) / (W + D).norm(dim=0, keepdim=True),
    ),
    "(IA)3 of outputs": ({"weight": rand(12), "on_input": torch.tensor(0)}, W * (1 + rand(12)[:, None])),
    "(IA)3 of inputs": ({"weight": rand(48), "on_input": torch.tensor(1)}, W * (1 + rand(48))),
    "OFT": ({"oft_blocks": BLOCKS, "alpha": torch.tensor(0.0).double()}, _cayley(BLOCKS).T @ W),
    "OFT that is constrained": (
        {
            "oft_blocks": BLOCKS,
            "alpha": torch.tensor(0.05, dtype=torch.float64),
            "rescale": rand(12, 1, seed=4),
        },
        rand(12, 1, seed=4) * (_cayley(BLOCKS, 0.05 * 12).T @ W),
    ),
    "GLoRA": (
        {
            "a1__weight": rand(48, 2),
            "a2__weight": rand(2, 48, seed=1),
            "b1__weight": rand(12, 2, seed=2),
            "b2__weight": rand(2, 48, seed=3),
            "alpha": torch.tensor(4.0).double(),
        },
        W + 2 * (rand(12, 2, seed=2) @ rand(2, 48, seed=3) + W @ rand(48, 2) @ rand(2, 48, seed=1)),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_that_depends_on_the_model_makes_what_its_paper_says(kind: str):
    tensors, after = KINDS[kind]

    assert_adds(in_double(transformer("flux-flux")), named("kohya", MODULE, **tensors), {KEY: after - W})


def test_magnitudes_of_parts_are_those_of_the_rows_of_a_fused_projection():
    base = in_double(transformer("flux-flux"))
    key = "model.diffusion_model.single_blocks.1.linear1.weight"
    up, down, magnitudes = rand(12, 2), rand(2, 12, seed=1), rand(12, seed=5)
    lora = named("diffusers", Q, up=up, down=down, lora_magnitude_vector=magnitudes)

    q = base[key][:12] + up @ down
    expected = torch.zeros_like(base[key])
    expected[:12] = magnitudes[:, None] * q / q.norm(dim=1, keepdim=True) - base[key][:12]
    assert_adds(base, lora, {key: expected})


def test_an_output_of_zeros_keeps_them_whatever_its_magnitude():
    base = in_double(transformer("flux-flux"))
    base[KEY][3] = 0.0
    up = UP.clone()
    up[3] = 0.0
    lora = named("kohya", MODULE, up=up, down=DOWN, dora_scale=torch.full((12, 1), 1e3).double())

    merged = m.merge(m.model(base) + m.lora_delta(m.model(lora), m.model(base)))[KEY]

    assert not merged[3].any()
    torch.testing.assert_close(merged[:3].norm(dim=1), torch.full((3,), 1e3).double())


TWO = torch.tensor([1.0, 2.0]).double()
FACTORS = r"weight has {} factors, and model\..*img_mlp\.2\.weight \[12, 48\] has {}\."
GLORAS = KINDS["GLoRA"][0]
MISFITS: dict[str, tuple[StateDict, str]] = {
    "alpha of each rank": ({"up": UP, "down": DOWN, "alpha": TWO}, "alpha is not one number"),
    "alpha of OFT": ({"oft_blocks": BLOCKS, "alpha": TWO}, "alpha is not one number"),
    "two on_input": ({"weight": rand(48), "on_input": TWO}, "on_input is not one number"),
    "inputs for outputs": (
        {"weight": rand(48), "on_input": torch.tensor(0)},
        FACTORS.format(48, "12 outputs"),
    ),
    "outputs for inputs": (
        {"weight": rand(12), "on_input": torch.tensor(1)},
        FACTORS.format(12, "48 inputs"),
    ),
    "no on_input": ({"weight": rand(48)}, FACTORS.format(48, "12 outputs")),
    "rescale of fewer outputs": ({"oft_blocks": BLOCKS, "rescale": rand(5, 1)}, "are not known"),
    "a vector in GLoRA": ({**GLORAS, "a1__weight": rand(48)}, r"a1\.weight is not a matrix"),
    "two ranks in GLoRA": (
        {**GLORAS, "a1__weight": rand(48, 3), "a2__weight": rand(3, 48)},
        "are not known",
    ),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_a_module_whose_tensors_do_not_fit_is_refused(kind: str):
    tensors, message = MISFITS[kind]

    with pytest.raises(m.CheckpointError, match=message):
        added(in_double(transformer("flux-flux")), named("kohya", MODULE, **tensors))


def test_a_module_that_depends_on_the_model_is_refused_without_it():
    base = m.model(in_double(transformer("flux-flux")))
    lora = m.model(named("kohya", MODULE, **KINDS["OFT"][0]))

    message = (
        r"the differences of lora_unet_double_blocks_0_img_mlp_2\.oft_blocks depend on the weights of the "
        r"model\. Read the file as lora_delta\(lora, base\), whose base is the model itself and not a merge\."
    )
    with pytest.raises(m.CheckpointError, match=message):
        m.merge(base + m.lora_delta(lora, m.weighted_sum(base, base)))


# diffusers as the oracle


@pytest.mark.libraries
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("with_magnitudes", [False, True])
def test_diffusers_adds_the_same(with_magnitudes: bool):
    diffusers = importlib.import_module("diffusers")
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=6,
        pooled_projection_dim=5,
        axes_dims_rope=(2, 2, 4),
    )
    base = {f"transformer.{key}": tensor.clone() for key, tensor in model.state_dict().items()}
    extra: dict[str, Any] = (
        {"lora_magnitude_vector": rand(16, seed=5).abs().float()} if with_magnitudes else {}
    )
    lora = named("diffusers", Q, up=rand(16, 2).float(), down=rand(2, 16, seed=1).float(), **extra)
    if not with_magnitudes:
        lora |= named("diffusers", MLP, up=rand(64, 3).float(), down=rand(3, 16, seed=1).float())

    ours = m.merge(m.model(base) + m.lora_delta(m.model(lora), m.model(base)))
    model.load_lora_adapter(lora, prefix="transformer")
    model.fuse_lora()
    model.unload_lora()

    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(ours[f"transformer.{key}"], tensor, rtol=1e-5, atol=1e-6)
    assert not torch.equal(ours[f"transformer.{Q}.weight"], base[f"transformer.{Q}.weight"])
