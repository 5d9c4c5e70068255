"""Finds the nodes of a recipe that vary from key to key: its atoms.

A model may lack a key, a hyperparameter may have a value for each key, `a | b` is one or the other, and a
method that receives the key or state dicts may have no value for it. All other methods have a value at every
key at which their arguments have one.
"""

from __future__ import annotations

from typing import Any

from mecha_exp.graph.by_key import ByKey, NoValueError
from mecha_exp.graph.nodes import LiteralNode, MergeNode, ModelNode, Node
from mecha_exp.method_api.method import Kind


class Missing:
    """The fact about an atom at a key for which it has no value."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __repr__(self) -> str:
        return self._why


MISSING = Missing("missing")
"""It has none: what it reads lacks the key, or a value by key has no default."""

LEFT_OUT = Missing("left out")
"""A choice leaves the key out on purpose, as `omit_component` does."""


def reads_other_keys(node: Node) -> bool:
    """Whether a node's method receives state dicts, of which it may read any key."""
    return (
        isinstance(node, MergeNode)
        and node.method.signature.reads_other_keys
        and node.method.kind is not Kind.CHOICE
    )


def varies_by_key(node: Node) -> bool:
    """Whether a node is an atom: it may differ from key to key."""
    if isinstance(node, MergeNode):
        return node.method.signature.wants_key or node.method.kind is Kind.CHOICE or reads_other_keys(node)
    return isinstance(node, ModelNode) or (isinstance(node, LiteralNode) and isinstance(node.value, ByKey))


def value_at(node: LiteralNode, key: str) -> Any:
    """A literal's value at a key, or MISSING."""
    if not isinstance(node.value, ByKey):
        return node.value
    if node.value.anatomy is None:  # bound to no model, so the selectors are plain keys
        value = dict(node.value.patterns).get(key, node.value.default)
        return MISSING if value is None else value
    try:
        return node.value(key)
    except NoValueError:
        return MISSING
