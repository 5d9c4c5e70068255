"""The config.json of a mixture, from that of its base."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mecha_exp.checkpoint.sidecars import CONFIG_SECTIONS
from mecha_exp.errors import ConfigError, brief
from mecha_exp.mergekit.mixtures.architectures import DEEPSEEK, GLM, MIXTRAL, QWEN, QWEN3, Architecture
from mecha_exp.mergekit.mixtures.reader import Mixture

_ROPE = ("rope_theta", "rope_parameters")

_COMMON = {"rms_norm_eps": 1e-6, "hidden_act": "silu"}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {**_COMMON, "max_position_embeddings": 2048},
    "mistral": {**_COMMON, "max_position_embeddings": 131072, "num_key_value_heads": 8},
    "qwen2": {**_COMMON, "max_position_embeddings": 32768, "num_key_value_heads": 32},
    "qwen3": {**_COMMON, "max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
}
"""What transformers takes for entries that the config.json of a dense model lacks; mixtures have others."""

_BIASES = {"attention_bias": (DEEPSEEK, QWEN3), "mlp_bias": ()}
"""Biases of dense models, with the mixtures that have them."""

_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
"""Entries that the config.json of a base must have."""

_REMOTE = "deepseek-ai/deepseek-moe-16b-base--"
"""The repository of the hub with the code of DeepSeek's first mixture, which transformers does not have."""

_OF_DEEPSEEK = {
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "scoring_func": "softmax",
    "auto_map": {
        "AutoConfig": f"{_REMOTE}configuration_deepseek.DeepseekConfig",
        "AutoModel": f"{_REMOTE}modeling_deepseek.DeepseekModel",
        "AutoModelForCausalLM": f"{_REMOTE}modeling_deepseek.DeepseekForCausalLM",
    },
}
_OF_GLM = {
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "use_qk_norm": False,
    "partial_rotary_factor": 1.0,
    "num_nextn_predict_layers": 0,
}

_OF_DENSE = ("auto_map", "layer_types", "max_window_layers", *CONFIG_SECTIONS)
"""Entries that do not go into the config.json of a mixture, whose weights are plain numbers."""

_WINDOW = 4096
"""The tokens that a Mistral or a Qwen looks back at where its config.json does not say."""

_SCALINGS = ("linear", "dynamic")
"""The ways to rotate that DeepSeek's first mixture has besides the usual one."""


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
    window = _window_of(config)
    if window and architecture is not MIXTRAL:
        raise ConfigError(
            f"base_model: looks back at {window} tokens (sliding_window), and {architecture.name} at all of "
            "them. Set sliding_window to null in its config.json, as mergekit does without a word."
        )
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    if not any(entry in config for entry in _ROPE):
        config["rope_theta"] = 10000.0
    config |= {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "num_experts_per_tok": mixture.per_token,
        "sliding_window": window,
    }
    config = {entry: value for entry, value in config.items() if entry not in _OF_DENSE}
    for entry in ("dtype", "torch_dtype"):
        if entry in config and dtype:
            config[entry] = dtype
    return config | _of_experts(architecture, mixture, config, str(base["model_type"]))


def _of_experts(
    architecture: Architecture, mixture: Mixture, config: Mapping[str, Any], kind: str
) -> dict[str, Any]:
    """The entries about experts in the config.json of a mixture."""
    count, size = len(mixture.experts), config["intermediate_size"]
    if architecture is MIXTRAL:
        return {"num_local_experts": count}
    entries: dict[str, Any] = {"moe_intermediate_size": size, "norm_topk_prob": True}
    if architecture in (DEEPSEEK, GLM):
        entries |= {"n_routed_experts": count, "n_shared_experts": len(mixture.shared) or None}
        if architecture is DEEPSEEK:
            return entries | _OF_DEEPSEEK | _rope_of_deepseek(config)
        return entries | _OF_GLM | {"attention_bias": kind == "qwen2"}
    entries |= {"num_experts": count, "decoder_sparse_step": 1, "mlp_only_layers": []}
    entries["use_sliding_window"] = False
    return entries | {"shared_expert_intermediate_size": size} if architecture is QWEN else entries


def _window_of(config: Mapping[str, Any]) -> int | None:
    """How many tokens the attention of a dense model looks back at; None for all."""
    uses = config["model_type"] == "mistral" or config.get("use_sliding_window")
    return config.get("sliding_window", _WINDOW) if uses else None


def _rope_of_deepseek(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary entries that the code of DeepSeek's first mixture reads.

    Raises:
        ConfigError: the base has heads or rotates as that code cannot.
    """
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    head = config["hidden_size"] // config["num_attention_heads"]
    other = "Set architecture: mixtral, qwen or glm"
    if config.get("head_dim") not in (None, head):
        raise ConfigError(
            f"base_model: has heads of {config['head_dim']}, and those of {DEEPSEEK.name} have {head}, the "
            f"hidden size by their number. {other}"
        )
    if kind != "default" and (kind not in _SCALINGS or "factor" not in rope):
        raise ConfigError(
            f"base_model: its config.json rotates by {brief(rope)}, and {DEEPSEEK.name} by 'default', or by "
            f"{' or '.join(map(repr, _SCALINGS))} with a factor. {other}"
        )
    scaling = None if kind == "default" else {"type": kind, "factor": rope["factor"]}
    return {"rope_theta": rope.get("rope_theta", config.get("rope_theta")), "rope_scaling": scaling}
