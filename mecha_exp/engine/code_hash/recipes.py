"""Hashes the code of the merge methods of a recipe."""

from __future__ import annotations

from pathlib import Path

from mecha_exp.engine.code_hash.functions import of_function, sources
from mecha_exp.engine.ir.expansion import expand
from mecha_exp.errors import MechaError
from mecha_exp.graph.by_key import ByKey
from mecha_exp.graph.nodes import LiteralNode, MergeNode, Node, walk
from mecha_exp.graph.rewrite import rewrite
from mecha_exp.method_api.method import MergeMethod


def code_hashes(recipe: Node) -> dict[str, str]:
    """Hash the code of each merge method of a recipe, including the methods that its composites call.

    Raises:
        ConfigError: a data file that a method declares does not exist.
    """
    return {method.identifier: code_hash(method) for method in methods_of(recipe)}


def code_hash(method: MergeMethod) -> str:
    """Hash the code of a merge method, and the data that it declares; see `of_function`."""
    return of_function(method)


def sources_of(recipe: Node) -> dict[Path, str]:
    """The source files that the merge methods of a recipe need; see `sources`."""
    files: dict[Path, str] = {}
    for method in methods_of(recipe):
        files |= sources(method)
    return dict(sorted(files.items()))


def methods_of(recipe: Node) -> set[MergeMethod]:
    """The merge methods of a recipe, including those that its composites call."""
    try:
        expanded = expand(_variants(recipe))
    except MechaError:  # the merge reports it
        expanded = ()
    return {node.method for node in walk(recipe, *expanded) if isinstance(node, MergeNode)}


def _variants(recipe: Node) -> list[Node]:
    """Recipes without per-key values that together hold each of these values."""
    by_key = [n.value for n in walk(recipe) if isinstance(n, LiteralNode) and isinstance(n.value, ByKey)]

    def variant(index: int) -> Node:
        def choose(node: Node) -> Node:
            if not isinstance(node, LiteralNode) or not isinstance(node.value, ByKey):
                return node
            values = node.value.values
            return LiteralNode(values[min(index, len(values) - 1)], node.space)

        return rewrite([recipe], choose)[0]

    return [variant(index) for index in range(max([len(value.values) for value in by_key], default=1))]
