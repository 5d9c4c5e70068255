"""Diffusion transformers in the names of diffusers and of their authors: recognised, in blocks, converted."""

import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from small_transformers import FAMILIES, FORMATS, small, transformer

import mecha_exp as m
from mecha_exp.architectures import View, detect, resolve, views
from mecha_exp.architectures.views import viewed

NAMES = [f"{family}-diffusers" for family in FAMILIES] + list(FORMATS.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_transformer_of_any_size_is_recognised_alone_and_in_a_folder(name: str):
    whole = transformer(name)
    prefix = next(part.prefix for part in resolve(name).parts if part.name == "diffuser")

    for tensors in (whole, {key.removeprefix(prefix): tensor for key, tensor in whole.items()}):
        found = detect(tensors)

        assert found.config.identifier == name
        assert found.config.components()["diffuser"].keys() == whole.keys()
        assert not (found.missing or found.extra)


def test_a_transformer_that_has_all_of_schnell_is_not_one_of_dev_with_gaps():
    config = small("flux_schnell-flux")

    found = detect(config.components()["diffuser"])

    assert found.config.identifier == "flux_schnell-flux"
    assert set(found.absent) == {"clip_l", "t5xxl", "vae"}


@pytest.mark.parametrize(("name", "key"), [("flux-flux", "img_in"), ("flux-diffusers", "x_embedder")])
def test_a_flux_that_reads_an_image_and_a_mask_beside_the_noise_is_one(name: str, key: str):
    """Fill reads 384 channels, Canny and Depth 128, and all write 64."""
    prefix = next(part.prefix for part in resolve(name).parts if part.name == "diffuser")
    tensors = transformer(name)
    tensors[f"{prefix}{key}.weight"] = torch.zeros(12, 21)

    found = detect(tensors)

    assert found.config.identifier == name
    assert not (found.missing or found.extra)


BLOCKS = {
    "flux-diffusers": {
        "transformer_blocks.2.attn.to_q.weight": "D02",
        "single_transformer_blocks.1.proj_mlp.bias": "S01",
    },
    "flux-flux": {"double_blocks.2.img_attn.qkv.weight": "D02", "final_layer.linear.bias": "BASE"},
    "chroma-flux": {
        "single_blocks.1.linear1.weight": "S01",
        "distilled_guidance_layer.norms.0.scale": "BASE",
    },
    "sd3.5_large-diffusers": {"transformer_blocks.37.attn.to_q.bias": "37", "norm_out.linear.bias": "BASE"},
    "sd3.5_medium-comfyui": {"joint_blocks.12.x_block.attn2.qkv.weight": "12"},
    "qwen_image-diffusers": {"transformer_blocks.1.img_mod.1.weight": "01", "txt_norm.weight": "BASE"},
    "wan-wan": {"blocks.2.cross_attn.norm_k.weight": "02", "head.modulation": "BASE"},
    "hidream-diffusers": {"double_stream_blocks.0.block.ff_i.gate.weight": "D00"},
    "lumina2-lumina2": {"layers.2.attention.qkv.weight": "02", "noise_refiner.1.ffn_norm1.weight": "N01"},
    "pixart-diffusers": {"transformer_blocks.1.attn2.to_k.weight": "01", "adaln_single.linear.bias": "BASE"},
    "pixart-pixart": {
        "blocks.1.cross_attn.kv_linear.bias": "01",
        "t_block.1.bias": "BASE",
        "pos_embed": "BASE",
    },
    "auraflow-auraflow": {"double_layers.1.modX.1.weight": "D01", "single_layers.0.mlp.c_fc1.weight": "S00"},
    "hunyuan_video-diffusers": {"context_embedder.token_refiner.refiner_blocks.1.norm1.bias": "R01"},
    "ltx-ltx": {"transformer_blocks.2.attn1.q_norm.weight": "02", "patchify_proj.weight": "BASE"},
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_layer_is_in_its_block(name: str):
    config = small(name)
    prefix = next(part.prefix for part in config.parts if part.name == "diffuser")

    assert {key: config.block_of(prefix + key) for key in BLOCKS[name]} == BLOCKS[name]


@pytest.mark.parametrize("family", FORMATS)
def test_a_block_is_the_same_in_both_formats_and_a_conversion_there_and_back_changes_nothing(family: str):
    ours, theirs = small(f"{family}-diffusers"), small(FORMATS[family])
    there, back = views(ours, theirs), views(theirs, ours)
    tensors = transformer(f"{family}-diffusers")

    converted = _viewed(there.by_key, tensors)
    again = _viewed(back.by_key, converted)

    assert {key: tensor.shape for key, tensor in converted.items()} == {
        key: theirs.keys()[key].shape for key in converted
    }
    assert all(theirs.block_of(key) == ours.block_of(there.by_key[key].sources[0]) for key in converted)
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[key], tensors[key]) for key in tensors)


def test_a_merge_is_not_converted_where_its_keys_are_not_those_of_the_published_model():
    deeper = resolve("ltx-diffusers").with_sizes(dict.fromkeys(resolve("ltx-diffusers").sizes, 6))
    deeper = deeper.with_sizes({"layers": 30})  # of 28
    model = {key: torch.ones(info.shape) for key, info in deeper.keys().items()}
    bare = {key.removeprefix("transformer."): tensor for key, tensor in transformer("ltx-diffusers").items()}

    with pytest.raises(
        m.RecipeError, match=r"has others: transformer\.transformer_blocks\.28\.attn1\..* and 47 more"
    ):
        m.merge(m.convert(m.weighted_sum(model, model), "ltx-ltx"))
    with pytest.raises(
        m.RecipeError, match=r"has others: caption_projection\.linear_1\.bias, .* Convert the"
    ):
        m.merge(m.convert(m.weighted_sum(bare, bare), "ltx-ltx"))
    single = m.merge(
        m.weighted_sum(m.convert(m.model(model), "ltx-ltx"), m.convert(m.model(model), "ltx-ltx"))
    )
    assert len(single) == len(model)


def _viewed(table: Mapping[str, View], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors that the views make of those that are there."""
    made = ((key, view) for key, view in table.items() if view.sources[0] in tensors)
    return {key: viewed(view, [tensors[source] for source in view.sources]) for key, view in made}


PEERS = {
    "flux": "convert_flux_transformer_checkpoint_to_diffusers",
    "chroma": "convert_chroma_transformer_checkpoint_to_diffusers",
    "sd3.5_large": "convert_sd3_transformer_checkpoint_to_diffusers",
    "sd3.5_medium": "convert_sd3_transformer_checkpoint_to_diffusers",
    "wan": "convert_wan_transformer_to_diffusers",
    "lumina2": "convert_lumina2_to_diffusers",
    "auraflow": "convert_auraflow_transformer_checkpoint_to_diffusers",
    "hunyuan_video": "convert_hunyuan_video_transformer_to_diffusers",
    "ltx": "convert_ltx_transformer_checkpoint_to_diffusers",
}


@pytest.mark.libraries
@pytest.mark.parametrize("family", PEERS)
def test_what_is_converted_to_a_single_file_becomes_the_same_again_in_diffusers(family: str):
    """With the published numbers of rows, which diffusers takes as given, few layers and one column."""
    peer = importlib.import_module("diffusers.loaders.single_file_utils")
    depths = {"layers": 2, "singles": 2, "guidance_layers": 2} if not family.startswith("sd3.5") else {}
    ours, theirs = resolve(f"{family}-diffusers"), resolve(FORMATS[family])
    ours = ours.with_sizes({name: size for name, size in depths.items() if name in ours.sizes})
    tensors = {
        key: torch.arange(info.shape[0]).reshape(-1, *[1] * (len(info.shape) - 1)) + 1000 * place
        for place, (key, info) in enumerate(ours.components()["diffuser"].items())
    }

    single = _viewed(views(ours, theirs).by_key, tensors)
    made = getattr(peer, PEERS[family])(
        {key.removeprefix("model.diffusion_model."): tensor for key, tensor in single.items()}
    )

    assert {f"transformer.{key}" for key in made} == tensors.keys()
    assert all(torch.equal(tensor, tensors[f"transformer.{key}"]) for key, tensor in made.items())


PIXART = {
    "x_embedder.proj": "pos_embed.proj",
    "t_embedder.mlp.0": "adaln_single.emb.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "adaln_single.emb.timestep_embedder.linear_2",
    "csize_embedder.mlp.0": "adaln_single.emb.resolution_embedder.linear_1",
    "csize_embedder.mlp.2": "adaln_single.emb.resolution_embedder.linear_2",
    "ar_embedder.mlp.0": "adaln_single.emb.aspect_ratio_embedder.linear_1",
    "ar_embedder.mlp.2": "adaln_single.emb.aspect_ratio_embedder.linear_2",
    "t_block.1": "adaln_single.linear",
    "y_embedder.y_proj.fc1": "caption_projection.linear_1",
    "y_embedder.y_proj.fc2": "caption_projection.linear_2",
    "final_layer.linear": "proj_out",
    "final_layer.scale_shift_table": "scale_shift_table",
    "cross_attn.q_linear": "attn2.to_q",
    "cross_attn.proj": "attn2.to_out.0",
    "attn.proj": "attn1.to_out.0",
    "mlp.fc1": "ff.net.0.proj",
    "mlp.fc2": "ff.net.2",
}
"""Names of PixArt's authors, and of diffusers: scripts/convert_pixart_{alpha,sigma}_to_diffusers.py."""


def pixart_of_the_script(single: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the scripts of diffusers make of PixArt's own names; places and empty captions are dropped."""
    made: dict[str, torch.Tensor] = {}
    for key, tensor in single.items():
        name, dot, end = key.rpartition(".")
        block = re.match(r"blocks\.\d+\.", key)
        begin = f"transformer_{block[0]}" if block else ""
        inner = name[len(block[0]) :] if block else name
        if inner == "attn.qkv":
            parts = zip("qkv", tensor.chunk(3), strict=True)
            made |= {f"{begin}attn1.to_{part}.{end}": chunk for part, chunk in parts}
        elif inner == "cross_attn.kv_linear":
            made |= {f"{begin}attn2.to_{k}.{end}": c for k, c in zip("kv", tensor.chunk(2), strict=True)}
        elif key not in ("pos_embed", "y_embedder.y_embedding"):
            whole = PIXART.get(key)
            made[whole or f"{begin}{PIXART.get(inner, inner)}{dot if inner else ''}{end}"] = tensor
    return made


@pytest.mark.parametrize("is_large", [False, True], ids=["without sizes", "with sizes of pictures"])
def test_a_file_of_pixart_becomes_what_the_scripts_of_diffusers_make_of_it(is_large: bool, tmp_path: Path):
    own = {
        key.removeprefix("model.diffusion_model."): tensor
        for key, tensor in transformer("pixart-pixart").items()
        if is_large or not any(part in key for part in ("csize_embedder", "ar_embedder"))
    }
    save_file(own, tmp_path / "pixart.safetensors")

    converted = m.merge(m.convert(m.model(tmp_path / "pixart.safetensors"), "pixart-diffusers"))

    expected = pixart_of_the_script(own)
    assert {key.removeprefix("transformer.") for key in converted} == expected.keys()
    for key, tensor in converted.items():
        assert torch.equal(tensor, expected[key.removeprefix("transformer.")])


TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "flux": (
        "FluxTransformer2DModel",
        {
            "in_channels": 4,
            "num_single_layers": 1,
            "joint_attention_dim": 6,
            "pooled_projection_dim": 5,
            "axes_dims_rope": (2, 2, 4),
        },
    ),
    "chroma": (
        "ChromaTransformer2DModel",
        {
            "in_channels": 4,
            "num_single_layers": 1,
            "joint_attention_dim": 6,
            "axes_dims_rope": (2, 2, 4),
            "approximator_num_channels": 8,
            "approximator_hidden_dim": 9,
            "approximator_layers": 1,
        },
    ),
    "sd3.5_large": (
        "SD3Transformer2DModel",
        {
            "num_layers": 38,
            "caption_projection_dim": 16,
            "joint_attention_dim": 6,
            "pooled_projection_dim": 5,
            "sample_size": 8,
            "pos_embed_max_size": 8,
            "qk_norm": "rms_norm",
        },
    ),
    "sd3.5_medium": (
        "SD3Transformer2DModel",
        {
            "num_layers": 24,
            "caption_projection_dim": 16,
            "joint_attention_dim": 6,
            "pooled_projection_dim": 5,
            "sample_size": 8,
            "pos_embed_max_size": 8,
            "qk_norm": "rms_norm",
            "dual_attention_layers": tuple(range(13)),
        },
    ),
    "qwen_image": (
        "QwenImageTransformer2DModel",
        {"in_channels": 4, "out_channels": 1, "joint_attention_dim": 6, "axes_dims_rope": (2, 2, 4)},
    ),
    "wan": (
        "WanTransformer3DModel",
        {"in_channels": 4, "out_channels": 4, "text_dim": 6, "freq_dim": 8, "ffn_dim": 10},
    ),
    "hidream": (
        "HiDreamImageTransformer2DModel",
        {
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_single_layers": 1,
            "caption_channels": [6, 6],
            "text_emb_dim": 5,
            "llama_layers": [0, 1],
            "axes_dims_rope": (4, 4),
        },
    ),
    "lumina2": (
        "Lumina2Transformer2DModel",
        {
            "in_channels": 4,
            "hidden_size": 24,
            "num_attention_heads": 3,
            "num_kv_heads": 1,
            "cap_feat_dim": 6,
            "axes_dim_rope": (4, 2, 2),
            "num_refiner_layers": 1,
        },
    ),
    "pixart": (
        "PixArtTransformer2DModel",
        {"caption_channels": 6, "cross_attention_dim": 16, "sample_size": 8},
    ),
    "auraflow": (
        "AuraFlowTransformer2DModel",
        {
            "num_mmdit_layers": 2,
            "num_single_dit_layers": 1,
            "joint_attention_dim": 6,
            "caption_projection_dim": 16,
            "pos_embed_max_size": 16,
        },
    ),
    "hunyuan_video": (
        "HunyuanVideoTransformer3DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "text_embed_dim": 6,
            "pooled_projection_dim": 5,
            "rope_axes_dim": (2, 2, 4),
        },
    ),
    "ltx": (
        "LTXVideoTransformer3DModel",
        {"in_channels": 4, "out_channels": 4, "cross_attention_dim": 16, "caption_channels": 6},
    ),
}


@pytest.mark.libraries
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tiny_model_of_diffusers_is_recognised(family: str):
    diffusers = importlib.import_module("diffusers")
    kind, sizes = TINY[family]
    heads = {} if family == "lumina2" else {"num_attention_heads": 2, "attention_head_dim": 8}
    depth = {} if {"num_layers", "num_mmdit_layers"} & sizes.keys() else {"num_layers": 2}
    model = getattr(diffusers, kind)(**{**heads, **depth, **sizes})

    found = detect(model.state_dict())

    assert found.config.identifier == f"{family}-diffusers"
    assert not (found.missing or found.extra)
