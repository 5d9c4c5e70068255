"""Configurations of mergekit with `modules`, and the tiny models of several modules that they merge."""

import json
from pathlib import Path

from safetensors.torch import save_file

from tests.support.mergekit_configs import noise

WIDTH, INNER, TOKENS = 8, 16, 16

T5 = """
merge_method: linear
base_model: t5_base
dtype: float32
parameters: {weight: 0.7}
modules:
  encoder:
    models:
    - {model: t5_a, parameters: {weight: [0.2, 0.8]}}
    - model: t5_b
    parameters: {weight: 0.4}
  decoder:
    models: [{model: t5_a}, {model: t5_b, parameters: {weight: 0.1}}]
  shared:
    models:
    - model: t5_b
    - {model: t5_a, parameters: {weight: [{filter: lm_head, value: 0.3}, {value: 0.9}]}}
"""

QWEN3_VL = """
merge_method: task_arithmetic
base_model: qwen_base
dtype: float32
parameters: {weight: 1.0}
modules:
  text_decoder:
    models:
    - {model: qwen_a, parameters: {weight: [0.0, 1.0]}}
    - model: qwen_b
    parameters: {weight: 0.25}
  multi_modal_projector:
    models: [{model: qwen_a, parameters: {weight: 0.5}}]
  vision_tower:
    models: [{model: qwen_b, parameters: {weight: [0.3, 0.6]}}]
"""

MODULE_CONFIGS = {"an encoder and a decoder": T5, "a language and a vision tower": QWEN3_VL}


def t5_shapes() -> dict[str, tuple[int, ...]]:
    """The shape of every key of a T5 of three and two layers."""
    shapes: dict[str, tuple[int, ...]] = {"shared.weight": (TOKENS, WIDTH), "lm_head.weight": (TOKENS, WIDTH)}
    for side, layers in (("encoder", 3), ("decoder", 2)):
        shapes[f"{side}.embed_tokens.weight"] = (TOKENS, WIDTH)
        shapes[f"{side}.final_layer_norm.weight"] = (WIDTH,)
        attentions = ["SelfAttention", *(["EncDecAttention"] if side == "decoder" else [])]
        for layer in range(layers):
            block = f"{side}.block.{layer}.layer"
            for number, attention in enumerate(attentions):
                shapes |= {f"{block}.{number}.{attention}.{name}.weight": (WIDTH, WIDTH) for name in "qkvo"}
            feed_forward = f"{block}.{len(attentions)}.DenseReluDense"
            shapes |= {f"{feed_forward}.wi_{number}.weight": (INNER, WIDTH) for number in (0, 1)}
            shapes[f"{feed_forward}.wo.weight"] = (WIDTH, INNER)
            norms = range(len(attentions) + 1)
            shapes |= {f"{block}.{number}.layer_norm.weight": (WIDTH,) for number in norms}
        shapes[f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] = (8, 2)
    return shapes


def qwen_shapes() -> dict[str, tuple[int, ...]]:
    """The shape of every key of a Qwen3-VL of three layers in each tower."""
    language, visual = "model.language_model", "model.visual"
    shapes: dict[str, tuple[int, ...]] = {
        "lm_head.weight": (TOKENS, WIDTH),
        f"{language}.embed_tokens.weight": (TOKENS, WIDTH),
        f"{language}.norm.weight": (WIDTH,),
        f"{visual}.patch_embed.proj.weight": (WIDTH, 3, 2, 2, 2),
        f"{visual}.patch_embed.proj.bias": (WIDTH,),
        f"{visual}.pos_embed.weight": (4, WIDTH),
        **_linear(f"{visual}.merger", norm=WIDTH),
    }
    for layer in range(3):
        text, block = f"{language}.layers.{layer}", f"{visual}.blocks.{layer}"
        shapes |= {f"{text}.self_attn.{name}_proj.weight": (WIDTH, WIDTH) for name in "qkvo"}
        shapes |= {f"{text}.self_attn.{name}_norm.weight": (4,) for name in "qk"}
        shapes |= {f"{text}.mlp.{name}_proj.weight": (INNER, WIDTH) for name in ("gate", "up")}
        shapes[f"{text}.mlp.down_proj.weight"] = (WIDTH, INNER)
        shapes |= {f"{text}.{name}_layernorm.weight": (WIDTH,) for name in ("input", "post_attention")}
        for name, rows, columns in (
            ("attn.qkv", 3 * WIDTH, WIDTH),
            ("attn.proj", WIDTH, WIDTH),
            ("mlp.linear_fc1", INNER, WIDTH),
            ("mlp.linear_fc2", WIDTH, INNER),
        ):
            shapes |= {f"{block}.{name}.weight": (rows, columns), f"{block}.{name}.bias": (rows,)}
        shapes |= {f"{block}.norm{n}.{word}": (WIDTH,) for n in (1, 2) for word in ("weight", "bias")}
        shapes |= _linear(f"{visual}.deepstack_merger_list.{layer}", norm=4 * WIDTH)
    return shapes


def _linear(merger: str, norm: int) -> dict[str, tuple[int, ...]]:
    wide = 4 * WIDTH
    return {
        f"{merger}.linear_fc1.weight": (wide, wide),
        f"{merger}.linear_fc1.bias": (wide,),
        f"{merger}.linear_fc2.weight": (WIDTH, wide),
        f"{merger}.linear_fc2.bias": (WIDTH,),
        f"{merger}.norm.weight": (norm,),
        f"{merger}.norm.bias": (norm,),
    }


def write_module_models(folder: Path) -> None:
    """Write a base and two experts of each architecture."""
    t5 = {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "num_layers": 3,
        "num_decoder_layers": 2,
        "feed_forward_proj": "gated-gelu",
        "vocab_size": TOKENS,
        "d_model": WIDTH,
        "d_kv": 4,
        "d_ff": INNER,
        "num_heads": 2,
    }
    qwen = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": {"model_type": "qwen3_vl_text", "num_hidden_layers": 3, "vocab_size": TOKENS},
        "vision_config": {"model_type": "qwen3_vl_vision", "depth": 3},
    }
    for family, config, shapes in (("t5", t5, t5_shapes()), ("qwen", qwen, qwen_shapes())):
        base = {key: noise(0, key, shape, 0.3) for key, shape in shapes.items()}
        for seed, name in enumerate(("base", "a", "b")):
            changes = {key: noise(seed, f"{name} {key}", shape, 0.05) for key, shape in shapes.items()}
            tensors = {key: base[key] + changes[key] * (seed > 0) for key in shapes}
            path = folder / f"{family}_{name}"
            path.mkdir(parents=True)
            save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
            (path / "config.json").write_text(json.dumps(config, indent=2))
