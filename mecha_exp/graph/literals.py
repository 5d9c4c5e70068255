"""What Python values mean in a recipe graph: paths, state dicts, numbers, tensors, dictionaries."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, TypeAlias, TypeGuard

import torch

from mecha_exp.errors import RecipeError
from mecha_exp.graph.by_key import CONVENTION, DEFAULT, ByKey, by_key
from mecha_exp.graph.calls import call
from mecha_exp.graph.legacy_strengths import Strengths
from mecha_exp.graph.nodes import InMemory, Literal, LiteralNode, ModelNode, Node
from mecha_exp.graph.spaces import is_space

RecipeNode: TypeAlias = Node
RecipeNodeOrValue: TypeAlias = "Node | str | os.PathLike[str] | Mapping[str, Any] | Literal"
"""What sd-mecha calls nodes, and whatever `as_node` makes one of."""

SELECT = "select"
"""The method that chooses, at each key, one of several recipes."""


def as_node(value: Any, *, model: bool = True) -> Node:
    """What a Python value means in a graph.

    Args:
        value: a node (returned as it is), a path (a model), a mapping of tensors (an in-memory model), a
            number, a bool, a list of numbers or a tensor (a literal).
        model: whether a string is a model's path; otherwise it is a literal word.

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
        f"cannot use {value!r} of type {type(value).__name__} in a recipe. Give a path, a state dict, a "
        "number, a list of numbers or a tensor."
    )


def node_by_key(value: Mapping[str, Any], config: str | None = None) -> Node:
    """What a mapping of selectors to values and recipes means in a graph.

    Args:
        value: as `weighting.by_key` has it; without any recipe it is a plain value by key. A word beside
            models is a path.
        config: the model config whose keys are meant; None: those of the models beside it.
    """
    words = {name: value[name] for name in sorted(value, key=lambda name: (name == DEFAULT, name))}
    convention = {name: words.pop(name) for name in (CONVENTION,) if name in words}
    models = any(isinstance(each, Node) and each.merge_space != "param" for each in words.values())
    nodes = {name: as_node(each, model=models) for name, each in words.items()}
    plain = {name: node.value for name, node in nodes.items() if _is_plain(node)}
    if len(plain) == len(nodes):
        return LiteralNode(by_key({**plain, **convention}), config=config)
    numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes.values()))}
    which = by_key({**{name: numbers[node] for name, node in nodes.items()}, **convention})
    if not isinstance(which, ByKey):  # a default alone
        return nodes[DEFAULT]
    return call(SELECT, LiteralNode(which, config=config), *numbers)


def _is_plain(node: Node) -> TypeGuard[LiteralNode]:
    """Whether a node is a value that can stand in a `ByKey`."""
    return (
        isinstance(node, LiteralNode)
        and node.space == "param"
        and node.config is None
        and isinstance(node.value, str | float | int | bool | tuple | None)
    )


def value_to_node(node_or_value: Any, expected_type: type | None = None) -> Node:
    """What a Python value means in a graph: a path or named tensors a model, anything else a literal.

    Args:
        node_or_value: a node is returned as it is.
        expected_type: `str` makes a word of a string, which is a model's path otherwise.
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
        config: its model config, or the name of one; None: whatever its keys say. A merge space may stand
            here too: `model("d.safetensors", "delta")`.
        merge_space: `weight`, or `delta` for a file of differences.
    """
    config, merge_space = config_and_space(config, merge_space)
    if isinstance(state_dict, Mapping):
        return ModelNode(InMemory(state_dict), merge_space, config)
    return ModelNode(os.fspath(state_dict), merge_space, config)


def literal(value: Any, config: Any = None, merge_space: str | None = None) -> Node:
    """A number, a list of numbers, a tensor, or a mapping of key patterns to numbers.

    Args:
        value: what it is.
        config: the model config whose keys a mapping has; a merge space may stand here too.
        merge_space: `param` for a hyperparameter, which is what None means.

    >>> literal({"conv*": 0.3, "default": 0.7})
    """
    config, merge_space = config_and_space(config, merge_space or "param")
    if isinstance(value, Mapping) and any(isinstance(v, Node) for v in value.values()):
        return node_by_key(value, config)
    node = as_node(value, model=False)
    return LiteralNode(node.value, merge_space, config) if isinstance(node, LiteralNode) else node


def config_and_space(config: Any, merge_space: Any) -> tuple[str | None, Any]:
    """The name of a model config, and a merge space; the one word that is given may be either."""
    name = getattr(config, "identifier", config)
    return (None, name) if is_space(name) else (name, merge_space)
