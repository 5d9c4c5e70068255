"""Replaces composite methods by the calls that they are made of."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from mecha_exp.engine.ir.calls import run_method
from mecha_exp.errors import RecipeError
from mecha_exp.graph.nodes import LiteralNode, MergeNode, Node, walk
from mecha_exp.graph.rewrite import rewrite
from mecha_exp.method_api.method import Kind
from mecha_exp.method_api.parameters import ParameterSpec


def expand(roots: Sequence[Node], expanded: dict[Node, Node] | None = None) -> tuple[Node, ...]:
    """The graphs with every composite method replaced by what it is composed of.

    `expanded` receives the replacement of each node.
    """
    expanded = {} if expanded is None else expanded

    def primitive(node: Node) -> Node:
        if not isinstance(node, MergeNode) or node.method.kind is not Kind.COMPOSITE:
            return node
        result = run_method(node.method, _composite_arguments(node))
        if not isinstance(result, Node):
            raise RecipeError(
                f"the composite '{node.method.identifier}' returned {type(result).__name__}, not a node"
            )
        return rewrite([result], primitive, expanded)[0]

    return rewrite(roots, primitive, expanded)


def without_factors(roots: Sequence[Node], unmade: Set[Node], replaced: dict[Node, Node]) -> tuple[Node, ...]:
    """The expanded graphs with another one in place of each call that has one for factors that make nothing.

    Args:
        unmade: the factors that make nothing.
        replaced: receives the replacement of each node.
    """
    expanded: dict[Node, Node] = {}
    for node in walk(*roots, skip=replaced):
        rebuilt = node
        if isinstance(node, MergeNode):
            rebuilt = node.with_children(replaced)
            if node.method.without and not unmade.isdisjoint(node.children):
                expanded.update({child: child for child in rebuilt.children})  # which are expanded
                (rebuilt,) = expand([node.method.without(**_composite_arguments(rebuilt))], expanded)
        replaced[node] = rebuilt
    return tuple(replaced[root] for root in roots)


def _composite_arguments(node: MergeNode) -> dict[str, Any]:
    """The arguments of a composite by name."""
    given = dict(node.arguments)
    return {s.name: _composite_argument(s, given.get(s.name)) for s in node.method.signature.parameters}


def _composite_argument(spec: ParameterSpec, argument: Node | tuple[Node, ...] | None) -> Any:
    """The argument of a composite: a node for a tensor, a Python value for anything else."""
    if isinstance(argument, tuple):
        return argument
    if spec.is_tensor:
        return LiteralNode(spec.default) if argument is None and spec.default is not None else argument
    value = argument.value if isinstance(argument, LiteralNode) else spec.default
    return list(value) if isinstance(value, tuple) else value
