"""Configurations of mergekit and the tiny Llama models that they merge; no mergekit is needed to read them.

The models have 4 layers of width 8 and are made by hand, so that the same bytes come out anywhere.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy
import torch
from safetensors.torch import save_file
from torch import Tensor

WIDTH, INNER, TOKENS, LAYERS = 8, 8, 16, 4

EXPERTS = {"a": 0.05, "b": 0.08, "c": 0.03, "near": 3e-4, "near2": 1e-4}
"""How far each model is from the base."""


def shapes(layers: int = LAYERS) -> dict[str, tuple[int, ...]]:
    """The shape of every key of a Llama model."""
    embedding = (TOKENS, WIDTH)
    by_key: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": embedding}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        by_key |= {f"{prefix}.self_attn.{name}_proj.weight": (WIDTH, WIDTH) for name in "qkvo"}
        by_key |= {f"{prefix}.mlp.{name}_proj.weight": (INNER, WIDTH) for name in ("gate", "up")}
        by_key[f"{prefix}.mlp.down_proj.weight"] = (WIDTH, INNER)
        by_key |= {f"{prefix}.{n}_layernorm.weight": (WIDTH,) for n in ("input", "post_attention")}
    return {**by_key, "model.norm.weight": (WIDTH,), "lm_head.weight": embedding}


def model_config(layers: int = LAYERS) -> dict[str, object]:
    """The config.json of such a model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": layers,
        "vocab_size": TOKENS,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def models() -> dict[str, dict[str, Tensor]]:
    """The tensors of every model, by name; `base16` and `a16` are rounded to bfloat16."""
    base = {key: noise(0, key, shape, 0.5) for key, shape in shapes().items()}
    experts = {
        name: {key: tensor + noise(seed, key, tensor.shape, reach) for key, tensor in base.items()}
        for seed, (name, reach) in enumerate(EXPERTS.items(), 1)
    }
    made = {"base": base, **experts}
    return made | {f"{n}16": {k: t.bfloat16() for k, t in made[n].items()} for n in ("base", "a")}


def write_models(folder: Path) -> None:
    """Write every model as a folder that `from_pretrained` loads."""
    for name, tensors in models().items():
        (folder / name).mkdir(parents=True)
        save_file(tensors, folder / name / "model.safetensors", metadata={"format": "pt"})
        (folder / name / "config.json").write_text(json.dumps(model_config(), indent=2))
        (folder / name / "tokenizer.json").write_text(json.dumps(tokenizer()))
        (folder / name / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0"})
        )


def tokenizer() -> dict[str, object]:
    """A tokenizer of whole words."""
    vocabulary = {f"t{number}": number for number in range(TOKENS)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"},
    }


def noise(seed: int, key: str, shape: tuple[int, ...], reach: float) -> Tensor:
    """Normal numbers that depend on seed and key alone, as multiples of 2^-20; see `parity.inputs`."""
    generator = numpy.random.default_rng([seed, *key.encode()])
    return (torch.from_numpy(generator.normal(0, reach, tuple(shape))) * 2**20).round().float() / 2**20


def _of_experts(method: str, *models: str, **settings: object) -> str:
    """A configuration of a method with a base; each model is its name and its parameters."""
    listed = "".join(f"  - {model}\n" for model in models)
    shared = f"parameters: {json.dumps(settings)}\n" if settings else ""
    return f"merge_method: {method}\nbase_model: base\nmodels:\n{listed}{shared}"


A, B, C = "model: a", "model: b", "model: c"
WEIGHTED = [f"{{{m}, parameters: {{weight: {w}}}}}" for m, w in ((A, 0.5), (B, 0.3), (C, 0.9))]
DENSE = [
    f"{{{m}, parameters: {{weight: {w}, density: {d}}}}}"
    for m, w, d in ((A, 0.5, 0.4), (B, 0.3, 0.7), (C, 0.9, 1.0))
]
NEAR = "model: near"

CONFIGS: Mapping[str, str] = {
    "linear": f"merge_method: linear\nmodels: [{', '.join(WEIGHTED)}]\n",
    "linear, not normalized": (
        f"merge_method: linear\nmodels: [{', '.join(WEIGHTED)}]\nparameters: {{normalize: false}}\n"
    ),
    "linear with a base that has a weight": _of_experts("linear", A, B, weight=0.4),
    "slerp": _of_experts("slerp", A, t=0.3),
    "slerp by filters and gradients": """\
merge_method: slerp
base_model: base
models: [{model: base}, {model: b}]
parameters:
  t:
    - filter: self_attn
      value: [0, 0.5, 0.3, 0.7, 1]
    - filter: mlp
      value: [1, 0.5]
    - value: 0.5
""",
    "nuslerp": f"merge_method: nuslerp\nmodels: [{WEIGHTED[0]}, {WEIGHTED[1]}]\n",
    "nuslerp from a base": _of_experts("nuslerp", *WEIGHTED[:2], nuslerp_flatten=True),
    "nuslerp by columns": _of_experts("nuslerp", *WEIGHTED[:2], nuslerp_flatten=False, nuslerp_row_wise=True),
    "nuslerp by rows, by a gradient": """\
merge_method: nuslerp
parameters: {nuslerp_flatten: false}
models:
  - {model: a, parameters: {weight: [0.2, 0.9]}}
  - {model: b, parameters: {weight: 0.5}}
""",
    "multislerp": f"merge_method: multislerp\nmodels: [{', '.join(WEIGHTED)}]\n",
    "multislerp from a base": _of_experts("multislerp", *WEIGHTED, normalize_weights=False),
    "karcher": f"merge_method: karcher\nmodels: [{{{A}}}, {{{B}}}, {{{C}}}]\n",
    "task_arithmetic": _of_experts("task_arithmetic", *WEIGHTED, **{"lambda": 0.8}),
    "task_arithmetic, normalized": _of_experts("task_arithmetic", *WEIGHTED, normalize=True, int8_mask=True),
    "task_arithmetic, a weight for layers only": """\
merge_method: task_arithmetic
base_model: base
models:
  - model: a
    parameters:
      weight:
        - filter: layers.1.
          value: 0.9
  - model: b
    parameters: {weight: [0.1, 0.4]}
parameters: {weight: 0.25}
""",
    "ties": _of_experts("ties", *DENSE, **{"lambda": 0.8, "int8_mask": True}),
    "ties, not normalized": _of_experts("ties", *DENSE, normalize=False),
    "ties by gradients and filters": """\
merge_method: ties
base_model: base
models:
  - model: a
    parameters:
      density: [1, 0.7, 0.1]
      weight: 1.0
  - model: b
    parameters:
      density: 0.5
      weight: [0, 0.3, 0.7, 1]
  - model: c
    parameters:
      density: 0.33
      weight:
        - filter: mlp
          value: 0.5
        - value: 0
parameters: {normalize: true}
dtype: float32
""",
    "ties with densities of 0 and above 1": _of_experts(
        "ties", "{model: a, parameters: {density: 0}}", "{model: b, parameters: {density: 1.5}}", weight=0.7
    ),
    "dare_ties, all kept": _of_experts("dare_ties", *WEIGHTED, density=1.0),
    "dare_ties, all kept, normalized": _of_experts("dare_ties", *WEIGHTED, normalize=True),
    "dare_linear, all kept, normalized": _of_experts("dare_linear", *WEIGHTED, normalize=True),
    "della, all kept": _of_experts("della", *WEIGHTED),
    "della_linear, all kept, normalized": _of_experts("della_linear", *WEIGHTED, normalize=True),
    "dare_linear, one dropped": _of_experts(
        "dare_linear", "{model: a, parameters: {density: 0}}", B, weight=0.7, normalize=True
    ),
    "breadcrumbs": _of_experts("breadcrumbs", *WEIGHTED, density=0.6, gamma=0.1),
    "breadcrumbs_ties": _of_experts("breadcrumbs_ties", *WEIGHTED, density=[0.3, 0.9], gamma=0.05),
    "model_stock": _of_experts("model_stock", A, B, C),
    "model_stock by filter": _of_experts("model_stock", A, B, filter_wise=True),
    "sce": _of_experts("sce", A, B, C, select_topk=0.4),
    "sce of small changes": _of_experts("sce", NEAR, "model: base", int8_mask=True),
    "sce of two small changes": _of_experts("sce", NEAR, "{model: near2}"),
    "ram": _of_experts("ram", A, B, epsilon=0.02),
    "ramplus_tl": _of_experts("ramplus_tl", A, B, epsilon=0.02, r=0.3, alpha=0.4),
    "nearswap": _of_experts("nearswap", A, t=0.01),
    "arcee_fusion": _of_experts("arcee_fusion", A),
    "passthrough": "merge_method: passthrough\nmodels: [{model: a}]\n",
    "passthrough, scaled by filters": """\
merge_method: passthrough
models:
  - model: a
    parameters:
      scale:
        - filter: o_proj
          value: 0
        - filter: down_proj
          value: [0.5, 1]
""",
    "mixed dtypes are promoted": (
        "merge_method: linear\nmodels: [{model: base16}, {model: b}]\nparameters: {weight: 1}\n"
    ),
    "an output in bfloat16": _of_experts("task_arithmetic", *WEIGHTED) + "out_dtype: bfloat16\n",
    "bfloat16 merged in float32": (
        "merge_method: slerp\nbase_model: base16\nmodels: [{model: a16}]\nparameters: {t: 0.4}\n"
        "dtype: float32\nout_dtype: bfloat16\n"
    ),
    "slices stacked": """\
merge_method: passthrough
slices:
  - sources: [{model: a, layer_range: [0, 3]}]
  - sources: [{model: b, layer_range: [1, 4]}]
dtype: float32
""",
    "slices of one model, one layer scaled": """\
merge_method: passthrough
slices:
  - sources: [{model: a, layer_range: [0, 2]}]
  - sources:
      - model: a
        layer_range: [1, 2]
        parameters:
          scale: [{filter: o_proj, value: 0.0}, {filter: down_proj, value: 0.0}, {value: 1.0}]
  - sources: [{model: a, layer_range: [2, 4]}]
""",
    "slices merged": """\
merge_method: slerp
base_model: base
slices:
  - sources: [{model: base, layer_range: [0, 3]}, {model: a, layer_range: [1, 4]}]
    parameters:
      t:
        - filter: layers.1.
          value: 0.9
        - value: [0.2, 0.6]
  - sources: [{model: base, layer_range: [3, 4]}, {model: b, layer_range: [0, 1]}]
parameters: {t: [0.3, 0.8]}
""",
    "slices with weights by the names of their inputs": """\
merge_method: linear
slices:
  - sources:
      - {model: a, layer_range: [2, 4], parameters: {weight: [{filter: layers.2., value: 3}, {value: 1}]}}
      - {model: b, layer_range: [0, 2], parameters: {weight: [{filter: layers.2., value: 3}, {value: 1}]}}
""",
    "documents": """\
name: one
merge_method: slerp
base_model: base
models: [{model: a}]
parameters: {t: [0.2, 0.7]}
---
merge_method: ties
base_model: base
models: [{model: one}, {model: two}, {model: a}]
parameters: {weight: 0.6, density: 0.8}
---
name: two
merge_method: linear
models: [{model: one, parameters: {weight: 1}}, {model: b, parameters: {weight: [0, 2]}}]
""",
    "documents in bfloat16": """\
name: half
merge_method: linear
models: [{model: a}, {model: b}]
parameters: {weight: 1}
dtype: float32
out_dtype: bfloat16
---
merge_method: task_arithmetic
base_model: half
models: [{model: half}, {model: base16}]
parameters: {weight: 0.5}
dtype: float32
""",
    "documents with slices": """\
name: deep
merge_method: passthrough
slices:
  - sources: [{model: a, layer_range: [0, 3]}]
  - sources: [{model: b, layer_range: [1, 4]}]
---
merge_method: passthrough
name: deeper
slices:
  - sources: [{model: b, layer_range: [0, 2]}]
  - sources: [{model: a, layer_range: [0, 4]}]
---
merge_method: slerp
base_model: deep
models: [{model: deeper}]
parameters: {t: [0.1, 0.9]}
""",
    "the tokenizer of the base": _of_experts("ties", *DENSE) + "tokenizer_source: base\n",
}
"""Each configuration by its name; their models are folders in the current one."""
