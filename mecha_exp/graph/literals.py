"""Makes nodes of Python values: paths, state dicts, numbers, tensors, dictionaries."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, TypeAlias, TypeGuard

import torch

from mecha_exp.errors import RecipeError, brief, some
from mecha_exp.graph.by_key import CONVENTION, DEFAULT, ByKey, by_key
from mecha_exp.graph.legacy_strengths import Strengths
from mecha_exp.graph.nodes import InMemory, Literal, LiteralNode, ModelNode, Node, call
from mecha_exp.graph.spaces import is_space

RecipeNode: TypeAlias = Node
RecipeNodeOrValue: TypeAlias = "Node | str | os.PathLike[str] | Mapping[str, Any] | Literal"
"""Types with the names of sd-mecha: nodes, and all values that `as_node` accepts."""

SELECT = "select"
"""The method that chooses, at each key, one of several recipes."""


def as_node(value: Any, *, model: bool = True) -> Node:
    """The node of a Python value.

    Args:
        value: a node (returned as it is), a path (a model), a mapping of tensors (an in-memory model), a
            number, a bool, a list of numbers or a tensor (a literal).
        model: whether a string is a model's path; otherwise it is a literal string.

    Raises:
        RecipeError: for anything else.
    """
    if isinstance(value, Node):
        return value
    if isinstance(value, PurePath) or (model and isinstance(value, str)):
        return ModelNode(os.fspath(value))
    if isinstance(value, Strengths):
        return LiteralNode(value.by_key(), config=value.config)
    if isinstance(value, ByKey | torch.Tensor | float | int | bool | str | None):
        return LiteralNode(value)
    if isinstance(value, list | tuple) and all(isinstance(v, float | int | bool | str | None) for v in value):
        return LiteralNode(tuple(value))
    if isinstance(value, Mapping):
        if value and all(isinstance(v, torch.Tensor) for v in value.values()):
            return ModelNode(InMemory(value))
        if any(isinstance(v, Node) for v in value.values()):
            return node_by_key(value)
        if not any(isinstance(v, torch.Tensor) for v in value.values()):
            return LiteralNode(by_key(value))
    raise RecipeError(
        f"cannot use {brief(value)} of type {type(value).__name__} in a recipe. Give a path, a state dict, a "
        f"number, a list of numbers or a tensor.{_what_is_meant(value)}"
    )


def _what_is_meant(value: Any) -> str:
    """A hint for what is given in place of models; empty for all else."""
    if hasattr(value, "state_dict"):
        return " The state dict of a module is module.state_dict()."
    if isinstance(value, Mapping) and any(isinstance(v, torch.Tensor) for v in value.values()):
        others = some([str(key) for key, v in value.items() if not isinstance(v, torch.Tensor)], 3)
        return f" A state dict has tensors alone, and {others} are not: torch.tensor(2.0) for 2.0."
    if hasattr(value, "components"):
        return " A pipeline has one for each of its models: pipeline.unet.state_dict()."
    if isinstance(value, list | tuple) and all(isinstance(v, Mapping | Node | str | PurePath) for v in value):
        return " Models are arguments of their own: method(a, b) in place of method([a, b])."
    return ""


def node_by_key(value: Mapping[str, Any], config: str | None = None) -> Node:
    """The node of a mapping of selectors to values and recipes.

    Args:
        value: as `by_key` has it; without any recipe it is a plain value by key. A string beside models is a
            path.
        config: the model config whose keys the selectors hold; None is that of the models beside it.
    """
    by_selector = {name: value[name] for name in sorted(value, key=lambda name: (name == DEFAULT, name))}
    convention = {name: by_selector.pop(name) for name in (CONVENTION,) if name in by_selector}
    models = any(isinstance(v, Node) and v.merge_space != "param" for v in by_selector.values())
    nodes = {name: as_node(v, model=models) for name, v in by_selector.items()}
    plain = {name: node.value for name, node in nodes.items() if _is_plain(node)}
    if len(plain) == len(nodes):
        return LiteralNode(by_key({**plain, **convention}), config=config)
    indices = {node: index for index, node in enumerate(dict.fromkeys(nodes.values()))}
    which = by_key({**{name: indices[node] for name, node in nodes.items()}, **convention})
    if not isinstance(which, ByKey):  # a default alone
        return nodes[DEFAULT]
    return call(SELECT, LiteralNode(which, config=config), *indices)


def _is_plain(node: Node) -> TypeGuard[LiteralNode]:
    """Whether a node is a value that can stand in a `ByKey`."""
    return (
        isinstance(node, LiteralNode)
        and node.space == "param"
        and node.config is None
        and isinstance(node.value, str | float | int | bool | tuple | None)
    )


def value_to_node(node_or_value: Any, expected_type: type | None = None) -> Node:
    """The node of a Python value: a model for a path or named tensors, a literal for anything else.

    Args:
        node_or_value: a node is returned as it is.
        expected_type: `str` makes a literal of a string, which is a model's path otherwise.
    """
    return as_node(node_or_value, model=expected_type is not str)


def model(
    state_dict: str | os.PathLike[str] | Mapping[str, torch.Tensor],
    config: Any = None,
    merge_space: str = "weight",
) -> ModelNode:
    """A model: the safetensors file at a path, or a state dict in memory.

    Args:
        state_dict: a path, relative to the current folder or to the engine's `model_dirs`; or named tensors.
        config: its model config, or the name of one; None: the one that its keys fit. A merge space may stand
            here too: `model("d.safetensors", "delta")`.
        merge_space: `weight`, or `delta` for a file of differences.
    """
    config, merge_space = config_and_space(config, merge_space)
    if isinstance(state_dict, Mapping):
        return ModelNode(InMemory(state_dict), merge_space, config)
    return ModelNode(os.fspath(state_dict), merge_space, config)


def literal(value: Any, config: Any = None, merge_space: str | None = None) -> Node:
    """A number, a list of numbers, a tensor, a mapping of key patterns to numbers, or of keys to tensors.

    Args:
        value: the value.
        config: the model config whose keys a mapping has; a merge space may stand here too.
        merge_space: None is `param`, a hyperparameter; of keys with tensors `weight`, a model in memory.

    >>> literal({"conv*": 0.3, "default": 0.7})
    """
    config, merge_space = config_and_space(config, merge_space)
    if isinstance(value, Mapping) and value and all(isinstance(v, torch.Tensor) for v in value.values()):
        return ModelNode(InMemory(value), merge_space or "weight", config)
    merge_space = merge_space or "param"
    if isinstance(value, Mapping) and any(isinstance(v, Node) for v in value.values()):
        return node_by_key(value, config)
    node = as_node(value, model=False)
    return LiteralNode(node.value, merge_space, config) if isinstance(node, LiteralNode) else node


def config_and_space(config: Any, merge_space: Any) -> tuple[str | None, Any]:
    """The name of a model config, and a merge space; a single argument may be either."""
    name = getattr(config, "identifier", config)
    return (None, name) if is_space(name) else (name, merge_space)
