"""Dictionaries with recipes for values: the selector that holds a key decides which recipe applies.

    weighted_sum(a, b, alpha={"encoder": parameter("share"), "default": 0.5})
    convert({"IN04": weighted_sum(0.2, 0.4), "default": 0.5}, a)

They are calls of the method `select`, which receives the index of the recipe by key. As text they are `dict`
lines with references, as in sd-mecha.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mecha_exp.graph.by_key import CONVENTION, ByKey
from mecha_exp.graph.literals import SELECT, node_by_key
from mecha_exp.graph.nodes import LiteralNode, Node, is_call


def has_nodes(value: Any) -> bool:
    """Whether a value is a mapping with a recipe among its values."""
    return isinstance(value, Mapping) and any(isinstance(v, Node) for v in value.values())


def mapping_of(node: Node) -> tuple[dict[str, Any], str | None] | None:
    """The mapping and the model config that `node_by_key` makes a node of; None for other nodes."""
    arguments = _read(node)
    return arguments if arguments is not None and node_by_key(*arguments) is node else None


def simplified(node: Node) -> Node:
    """A value by key, if a node chooses between plain values; any other node as it is."""
    arguments = _read(node)
    return node if arguments is None else node_by_key(*arguments)


def _read(node: Node) -> tuple[dict[str, Any], str | None] | None:
    """The arguments of `node_by_key` that a call of `select` stands for; None for other nodes."""
    if not is_call(node, SELECT):
        return None
    arguments: dict[str, Any] = dict(node.arguments)
    which, values = arguments["which"], arguments["values"]
    if not isinstance(which, LiteralNode) or not isinstance(which.value, ByKey):
        return None
    mapping: dict[str, Any] = {}
    for name, index in replace(which.value, anatomy=None).words:
        if name == CONVENTION:
            mapping[name] = index
        elif isinstance(index, int) and 0 <= index < len(values):
            mapping[name] = values[index]
        else:
            return None
    return mapping, which.config
