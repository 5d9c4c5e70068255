"""The architectures of mixtures: which models they are made of, and the names of their keys.

Keys are those of published checkpoints, with one tensor for each expert, which every release of
transformers, vLLM and llama.cpp reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mecha_exp.errors import ConfigError
from mecha_exp.mergekit.mixtures.reader import UNIFORM, Mixture


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
