"""Recipes that read no model: their values at the keys of the model config that they declare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mecha_exp.architectures import ModelConfig, resolve
from mecha_exp.conversion.inference import ConfigInference
from mecha_exp.engine.options import EngineOptions
from mecha_exp.engine.planner.by_key import Binder
from mecha_exp.engine.planner.keys.dependence import MISSING, value_at
from mecha_exp.engine.planner.keys.specialisation import PerKeyGraph
from mecha_exp.graph.nodes import (
    InMemory,
    LiteralNode,
    MergeNode,
    ModelNode,
    Node,
    ParameterNode,
    calls_of,
    models_of,
    walk,
)
from mecha_exp.graph.rewrite import rewrite
from mecha_exp.method_api.parameters import ParameterSpec
from mecha_exp.method_api.state_dict import StateDictKeyError


def config_of_constants(recipe: Node) -> ModelConfig | None:
    """The config of a recipe that reads no model: the declared one, or the first of its parts; or None."""
    if models_of(recipe) or any(isinstance(node, ParameterNode) for node in walk(recipe)):
        return None
    declared = [node.declared_config for node in (recipe, *walk(recipe))]
    declared += [spec.config for call in calls_of(recipe) for spec in call.method.signature.parameters]
    name = next(filter(None, declared), None)
    return resolve(name) if name else None


def with_models(recipe: Node, config: ModelConfig) -> Node:
    """The recipe with models in memory in the place of numbers that are given for tensors.

    A model has the number, or that of the block, at each key of the config, as a tensor of no axes.
    """
    (bound,) = Binder({}, ConfigInference.over({})).bind([recipe])

    def replaced(node: Node) -> Node:
        if not isinstance(node, MergeNode):
            return node
        specs = {child: node.method.signature[name] for name, child in node.named_children}
        new = {child: _as_model(child, spec, config) for child, spec in specs.items()}
        return node if all(a is b for a, b in new.items()) else node.with_children(new)

    return rewrite([bound], replaced)[0]


def constants(recipe: Node, config: ModelConfig, options: EngineOptions) -> dict[str, Any]:
    """The value of a recipe without models at each key of a config at which it has one: numbers, words.

    Raises:
        MechaError: a method that fails, or selectors that the config does not have.
    """
    configs = ConfigInference.over({})
    (bound,) = Binder({}, configs).bind([recipe])
    graph = PerKeyGraph([bound], {}, configs, options, {})
    (root,) = graph.roots
    values: dict[str, Any] = {}
    for key in config.keys():
        try:
            plain = isinstance(root, MergeNode) and root.method.signature.wants_key
            values[key] = graph.lazy.run(root, key) if plain else graph.value(root, key)  # type: ignore[arg-type]
        except StateDictKeyError:
            continue
    return values


def _as_model(node: Node, spec: ParameterSpec, config: ModelConfig) -> Node:
    if not isinstance(node, LiteralNode) or spec.interface is not torch.Tensor or not spec.is_model:
        return node
    values = {key: value_at(node, key) for key in config.keys()}
    numbers: Mapping[str, Any] = {key: value for key, value in values.items() if value is not MISSING}
    if not numbers or not all(isinstance(value, int | float | torch.Tensor) for value in numbers.values()):
        return node
    tensors = {key: torch.as_tensor(value, dtype=torch.float32) for key, value in numbers.items()}
    space = spec.spaces[0] if spec.spaces else "weight"
    return ModelNode(InMemory(tensors, f"{spec.name}, numbers"), space, node.config or config.identifier)
