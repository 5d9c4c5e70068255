"""Dictionaries with recipes for values: at each key one of them, as the selector that holds the key says.

    weighted_sum(a, b, alpha={"encoder": parameter("share"), "default": 0.5})
    convert({"IN04": weighted_sum(0.2, 0.4), "default": 0.5}, a)

They are calls of the method `select`, which gets the number of the recipe by key. As text they are `dict`
lines with references, as sd-mecha has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeGuard

from mecha_exp.nodes import LiteralNode, MergeNode, Node
from mecha_exp.values import as_node
from mecha_exp.weighting import CONVENTION, DEFAULT, ByKey, by_key

SELECT = "select"


def has_nodes(value: Any) -> bool:
    """Whether that is a mapping with a recipe among its values."""
    return isinstance(value, Mapping) and any(isinstance(v, Node) for v in value.values())


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
    from mecha_exp.registry import resolve_method

    return resolve_method(SELECT)(LiteralNode(which, config=config), *numbers)


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


def _is_plain(node: Node) -> TypeGuard[LiteralNode]:
    """Whether a node is a value that can stand in a `ByKey`."""
    return (
        isinstance(node, LiteralNode)
        and node.space == "param"
        and node.config is None
        and isinstance(node.value, str | float | int | bool | tuple | None)
    )
