"""Builds the recipe graph of a mixture: renamed experts, what the base has, and gates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from mecha_exp.checkpoint import torch_dtype
from mecha_exp.checkpoint.sidecars import config_beside
from mecha_exp.errors import ConfigError
from mecha_exp.families import CONFIG
from mecha_exp.graph.nodes import InMemory, ModelNode, Node, call
from mecha_exp.mergekit.mixtures.architectures import GLM, Architecture, choose
from mecha_exp.mergekit.mixtures.config import config_json
from mecha_exp.mergekit.mixtures.gates import gates
from mecha_exp.mergekit.mixtures.reader import Expert, Mixture
from mecha_exp.mergekit.references import Reference, StoredModel

_KEYS = ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate_proj.weight")

DENSE = "model.layers.*.mlp"
"""The feed-forward module of a layer of a dense model."""


def mixture_recipe(
    mixture: Mixture, models: Mapping[Reference, StoredModel]
) -> tuple[Node, dict[str, Path | bytes | None]]:
    """The graph of a mixture, and its config.json.

    Raises:
        ConfigError: the models cannot be experts of one mixture, or gates cannot be made.
    """
    configs = {str(reference): config_beside(model.path) for reference, model in models.items()}
    base, base_config = models[mixture.base], configs[str(mixture.base)]
    if not base_config:
        raise ConfigError(f"base_model: there is no {CONFIG} beside {base.path}, which the output needs.")
    architecture = choose(mixture, configs)
    dtype = mixture.dtype or base_config.get("torch_dtype", base_config.get("dtype"))
    content = config_json(architecture, mixture, base_config, dtype)
    _require_shapes(mixture, models)
    _require_sizes(base, base_config)
    kept = call("rename_keys", ModelNode(base.source), f"{DENSE}.* ->, * -> *")
    experts = [
        _expert(expert, models, architecture, f"{architecture.module}.experts.{number}")
        for number, expert in enumerate(mixture.experts)
    ]
    experts += [
        _expert(expert, models, architecture, architecture.shared_module) for expert in mixture.shared
    ]
    gates = ModelNode(InMemory(_made(mixture, base, content, architecture, dtype), "gates", is_made=True))
    recipe = reduce(lambda a, b: a | b, [kept, *experts, gates])
    if dtype:
        recipe = recipe.to(dtype=dtype)
    return recipe, {CONFIG: (json.dumps(content, indent=2) + "\n").encode()}


def _expert(
    expert: Expert, models: Mapping[Reference, StoredModel], architecture: Architecture, module: str
) -> Node:
    """The feed-forward layers of a model under the names of an expert."""
    is_shared = module == architecture.shared_module
    names = {name: name if is_shared else new for name, new in architecture.projections.items()}

    def named(*projections: str) -> Node:
        rules = (
            f"{DENSE}.{name}.weight -> model.layers.*.{module}.{names[name]}.weight" for name in projections
        )
        return call("rename_keys", ModelNode(models[expert.reference].source), ", ".join(rules))

    if expert.scale == 1:
        return named(*names)
    return named("gate_proj", "up_proj") | call("passthrough", named("down_proj"), scale=expert.scale)


def _made(
    mixture: Mixture,
    base: StoredModel,
    content: Mapping[str, Any],
    architecture: Architecture,
    dtype: str | None,
) -> dict[str, torch.Tensor]:
    """The tensors that no model has: gates, and biases of zeros; in the base's dtype where none is said."""
    vectors = gates(mixture, base.path, content, architecture.gates_shared)
    count = len(mixture.experts)
    tensors: dict[str, torch.Tensor] = {}
    for layer, vector in enumerate(vectors):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.{architecture.module}.gate.weight"] = vector[:count].contiguous()
        if architecture is GLM:
            tensors[f"{prefix}.mlp.gate.e_score_correction_bias"] = torch.zeros(count)
        if architecture.gates_shared:
            tensors[f"{prefix}.mlp.shared_expert_gate.weight"] = vector[count:].contiguous()
        for name in "qkv" if architecture.has_bias else "":
            weight, bias = (f"{prefix}.self_attn.{name}_proj.{kind}" for kind in ("weight", "bias"))
            if bias not in base.infos:
                tensors[bias] = torch.zeros(base.infos[weight].shape[0])
    stored = torch_dtype(base.infos[_KEYS[0]].dtype)
    return {key: tensor.to(stored) for key, tensor in tensors.items()} if dtype is None else tensors


def _require_sizes(base: StoredModel, config: Mapping[str, Any]) -> None:
    """Check that the config.json of the base has the sizes of its weights, by which gates are made."""
    inner, hidden = base.infos[_KEYS[1]].shape
    layers = sum(key.endswith(".mlp.gate_proj.weight") for key in base.infos)
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner}
    wrong = [
        f"{entry} is {config[entry]!r}, and {size} in its weights"
        for entry, size in sizes.items()
        if config[entry] != size
    ]
    if wrong:
        raise ConfigError(f"base_model: in the {CONFIG} of {base.source} {'; '.join(wrong)}.")


def _require_shapes(mixture: Mixture, models: Mapping[Reference, StoredModel]) -> None:
    """Check that all models have the keys and the shapes of the base where experts are taken."""
    lacking = [key for key in _KEYS if key not in models[mixture.base].infos]
    if lacking:
        raise ConfigError(f"base_model: {mixture.base} has no '{lacking[0]}', as a Llama or a Qwen has.")
    base = {key: info.shape for key, info in models[mixture.base].infos.items() if ".mlp." in key}
    for reference, model in models.items():
        own = {key: info.shape for key, info in model.infos.items() if ".mlp." in key}
        if own != base:
            raise ConfigError(
                f"experts: the feed-forward layers of {reference} have other keys or shapes than those of "
                f"{mixture.base}. Experts of one mixture have one size."
            )
