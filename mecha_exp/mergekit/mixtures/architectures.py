"""The architectures of mixtures: the names of their keys, and their config.json.

Keys are those of published checkpoints, with one tensor for each expert, which every release of
transformers, vLLM and llama.cpp reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mecha_exp.errors import ConfigError
from mecha_exp.mergekit.mixtures.reading import Mixture

ROPE = ("rope_theta", "rope_parameters")


@dataclass(frozen=True)
class Architecture:
    """A kind of mixture.

    Attributes:
        name: as mergekit calls it.
        model_type, class_name: in config.json.
        origins: the model types of the dense models that it is made of.
        module: of the experts and their gate in a layer.
        projections: the name that each projection has in an expert.
        shared: how many shared experts it has.
        has_bias: whether queries, keys and values have a bias.
    """

    name: str
    model_type: str
    class_name: str
    origins: tuple[str, ...]
    module: str
    projections: Mapping[str, str]
    shared: int = 0
    has_bias: bool = False


_SAME = {name: name for name in ("gate_proj", "up_proj", "down_proj")}
MIXTRAL = Architecture(
    "Mixtral",
    "mixtral",
    "MixtralForCausalLM",
    ("llama", "mistral"),
    "block_sparse_moe",
    {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"},
)
QWEN = Architecture(
    "Qwen MoE",
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    ("llama", "mistral", "qwen2"),
    "mlp",
    _SAME,
    shared=1,
    has_bias=True,
)
QWEN3 = Architecture("Qwen3 MoE", "qwen3_moe", "Qwen3MoeForCausalLM", ("qwen3",), "mlp", _SAME)
ARCHITECTURES = (MIXTRAL, QWEN, QWEN3)

_COMMON = {"rms_norm_eps": 1e-6, "hidden_act": "silu"}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {**_COMMON, "max_position_embeddings": 2048},
    "mistral": {**_COMMON, "max_position_embeddings": 131072, "num_key_value_heads": 8},
    "qwen2": {**_COMMON, "max_position_embeddings": 32768, "num_key_value_heads": 32},
    "qwen3": {**_COMMON, "max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
}
"""What transformers takes for entries that the config.json of a dense model lacks; mixtures have others."""

_BIASES = {"attention_bias": (QWEN3,), "mlp_bias": ()}
"""Biases of dense models, with the mixtures that have them."""

_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
"""Entries that the config.json of a base must have."""

_OF_DENSE = ("auto_map", "layer_types", "max_window_layers")
"""Entries that do not go into the config.json of a mixture."""


def choose(mixture: Mixture, configs: Mapping[str, Mapping[str, Any]]) -> Architecture:
    """The architecture of a mixture, as mergekit chooses it.

    Args:
        mixture: what is asked for.
        configs: the config.json of each model, by its name.

    Raises:
        ConfigError: the models are of several kinds, or of one that no mixture is made of.
    """
    kinds = {name: str(config.get("model_type")) for name, config in configs.items()}
    if len(set(kinds.values())) > 1:
        listed = ", ".join(f"{name} is {kind}" for name, kind in kinds.items())
        raise ConfigError(f"experts: expected models of one architecture, got {listed}.")
    kind = next(iter(kinds.values()))
    word = mixture.architecture.lower()
    named = [a for a in ARCHITECTURES if a.name.lower().startswith(word)]
    if not named:
        known = [a.name for a in ARCHITECTURES]
        raise ConfigError(
            f"architecture: {mixture.architecture!r} is not made here. There are {', '.join(known)}."
        )
    fitting = [a for a in named if kind in a.origins and a.shared == len(mixture.shared)]
    if not fitting:
        listed = "; ".join(f"{a.name} of {' or '.join(a.origins)} with {a.shared} shared" for a in named)
        raise ConfigError(
            f"experts: no mixture is made of {kind} with {len(mixture.shared)} shared experts. There are: "
            f"{listed}."
        )
    if fitting[0] is QWEN and not mixture.architecture and not mixture.shared[0].positive and kind != "qwen2":
        raise ConfigError(
            "shared_experts: without prompts mergekit makes a DeepSeek MoE, which is not made here. Set "
            "architecture: qwen"
        )
    return fitting[0]


def config_json(
    architecture: Architecture, mixture: Mixture, base: Mapping[str, Any], dtype: str | None
) -> dict[str, Any]:
    """The config.json of a mixture from that of its base.

    Raises:
        ConfigError: the base has what the mixture cannot have, or lacks a size.
    """
    if lacking := [entry for entry in _SIZES if entry not in base]:
        raise ConfigError(f"base_model: its config.json has no {' and '.join(lacking)}.")
    for entry, having in _BIASES.items():
        if base.get(entry) and architecture not in having:
            raise ConfigError(f"base_model: has {entry}, which {architecture.name} does not have.")
    config = {**_DEFAULTS[str(base["model_type"])], **base}
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    if not any(entry in config for entry in ROPE):
        config["rope_theta"] = 10000.0
    config |= {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "num_experts_per_tok": mixture.per_token,
        "sliding_window": None,
    }
    config = {entry: value for entry, value in config.items() if entry not in _OF_DENSE}
    for entry in ("dtype", "torch_dtype"):
        if entry in config and dtype:
            config[entry] = dtype
    count = len(mixture.experts)
    if architecture is MIXTRAL:
        return {**config, "num_local_experts": count}
    size = config["intermediate_size"]
    config |= {"num_experts": count, "moe_intermediate_size": size, "norm_topk_prob": True}
    config |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False}
    return {**config, "shared_expert_intermediate_size": size} if architecture is QWEN else config
