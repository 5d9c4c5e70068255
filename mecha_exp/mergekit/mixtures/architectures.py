"""The architectures of mixtures: the names of their keys, and their config.json.

Keys are those of published checkpoints, with one tensor for each expert, which every release of
transformers, vLLM and llama.cpp reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mecha_exp.errors import ConfigError
from mecha_exp.mergekit.mixtures.reading import UNIFORM, Mixture

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
        shared: how many shared experts it may have.
        shared_module: of a shared expert in a layer.
        gates_shared: whether the shared expert has a gate of its own.
        has_bias: whether queries, keys and values have a bias.
        is_named: whether it is made only where `architecture` names it.
    """

    name: str
    model_type: str
    class_name: str
    origins: tuple[str, ...]
    module: str
    projections: Mapping[str, str]
    shared: tuple[int, ...] = (0,)
    shared_module: str = "mlp.shared_expert"
    gates_shared: bool = False
    has_bias: bool = False
    is_named: bool = False


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
    shared=(1,),
    gates_shared=True,
    has_bias=True,
)
DEEPSEEK = Architecture(
    "DeepSeek MoE",
    "deepseek",
    "DeepseekForCausalLM",
    ("llama", "mistral"),
    "mlp",
    _SAME,
    shared=(0, 1),
    shared_module="mlp.shared_experts",
)
GLM = Architecture(
    "GLM4 MoE",
    "glm4_moe",
    "Glm4MoeForCausalLM",
    ("llama", "mistral", "qwen2"),
    "mlp",
    _SAME,
    shared=(1,),
    shared_module="mlp.shared_experts",
    is_named=True,
)
QWEN3 = Architecture("Qwen3 MoE", "qwen3_moe", "Qwen3MoeForCausalLM", ("qwen3",), "mlp", _SAME)
ARCHITECTURES = (MIXTRAL, DEEPSEEK, QWEN, QWEN3, GLM)

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
    named = [a for a in ARCHITECTURES if a.name.lower().startswith(word) and (word or not a.is_named)]
    if not named:
        known = [a.name for a in ARCHITECTURES]
        raise ConfigError(
            f"architecture: {mixture.architecture!r} is not made here. There are {', '.join(known)}."
        )
    fitting = [a for a in named if kind in a.origins and len(mixture.shared) in a.shared]
    if not fitting:
        listed = "; ".join(
            f"{a.name} of {' or '.join(a.origins)} with {' or '.join(map(str, a.shared))} shared"
            for a in named
        )
        raise ConfigError(
            f"experts: no mixture is made of {kind} with {len(mixture.shared)} shared experts. There are: "
            f"{listed}."
        )
    has_prompts = any(expert.positive or expert.negative for expert in mixture.shared)
    gated = [a for a in fitting if a.gates_shared or not has_prompts]
    return _checked((gated or fitting)[0], mixture)


def _checked(architecture: Architecture, mixture: Mixture) -> Architecture:
    """The architecture, once it is seen that its gates can be made."""
    for expert in mixture.shared:
        if architecture.gates_shared:
            mixture.require_prompts(expert)
        elif expert.positive or expert.negative:
            raise ConfigError(
                f"{expert.where}: has prompts, and the shared experts of {architecture.name} have no gate. "
                "Remove them, or set architecture: qwen"
            )
    if architecture is GLM and (mixture.gate_mode != UNIFORM or len(mixture.experts) < 2):
        raise ConfigError(
            f"architecture: {GLM.name} chooses among two experts or more by the sigmoid of their scores, "
            "which is 1 for all large ones, so that other gates do not tell experts apart. Name two experts, "
            f"and set gate_mode: {UNIFORM}"
        )
    return architecture


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


def _rope_of_deepseek(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary entries that the code of DeepSeek's first mixture reads.

    Raises:
        ConfigError: the base rotates as that code cannot.
    """
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    head = config["hidden_size"] // config["num_attention_heads"]
    if kind not in ("default", "linear", "dynamic") or config.get("head_dim", head) != head:
        raise ConfigError(
            f"base_model: rotates by {kind!r} with heads of {config.get('head_dim', head)}, and "
            f"{DEEPSEEK.name} by 'default', 'linear' or 'dynamic' with heads of {head}, the hidden size by "
            "their number. Set architecture: mixtral, qwen or glm"
        )
    scaling = None if kind == "default" else {"type": kind, "factor": rope["factor"]}
    return {"rope_theta": rope.get("rope_theta", config.get("rope_theta")), "rope_scaling": scaling}
