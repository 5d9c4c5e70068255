"""Dictionaries with recipes for values: at each key one of them, as the selector that holds the key says.

    weighted_sum(a, b, alpha={"encoder": parameter("share"), "default": 0.5})
    convert({"IN04": weighted_sum(0.2, 0.4), "default": 0.5}, a)

They are calls of the method `select`, which gets the number of the recipe by key. As text they are `dict`
lines with references, as sd-mecha has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mecha_exp.graph.by_key import CONVENTION, ByKey
from mecha_exp.graph.literals import SELECT, node_by_key
from mecha_exp.graph.nodes import LiteralNode, MergeNode, Node


def has_nodes(value: Any) -> bool:
    """Whether that is a mapping with a recipe among its values."""
    return isinstance(value, Mapping) and any(isinstance(v, Node) for v in value.values())


def mapping_of(node: Node) -> tuple[dict[str, Any], str | None] | None:
    """The mapping and the model config that `node_by_key` makes a node of; None for other nodes."""
    found = _read(node)
    return found if found is not None and node_by_key(*found) is node else None


def simplified(node: Node) -> Node:
    """A choice between mere values as a value by key; any other node as it is."""
    found = _read(node)
    return node if found is None else node_by_key(*found)


def _read(node: Node) -> tuple[dict[str, Any], str | None] | None:
    if not isinstance(node, MergeNode) or node.method.identifier != SELECT:
        return None
    arguments: dict[str, Any] = dict(node.arguments)
    which, values = arguments["which"], arguments["values"]
    if not isinstance(which, LiteralNode) or not isinstance(which.value, ByKey):
        return None
    mapping: dict[str, Any] = {}
    for name, word in replace(which.value, anatomy=None).words:
        if name == CONVENTION:
            mapping[name] = word
        elif isinstance(word, int) and 0 <= word < len(values):
            mapping[name] = values[word]
        else:
            return None
    return mapping, which.config
