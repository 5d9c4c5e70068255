"""Replaces composite methods by the calls that they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mecha_exp.engine.ir.calls import run_method
from mecha_exp.errors import RecipeError
from mecha_exp.graph.nodes import LiteralNode, MergeNode, Node
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
        arguments = dict(node.arguments)
        values = {
            spec.name: _composite_argument(spec, arguments.get(spec.name))
            for spec in node.method.signature.parameters
        }
        result = run_method(node.method, values)
        if not isinstance(result, Node):
            raise RecipeError(
                f"the composite '{node.method.identifier}' returned {type(result).__name__}, not a node"
            )
        return rewrite([result], primitive, expanded)[0]

    return rewrite(roots, primitive, expanded)


def _composite_argument(spec: ParameterSpec, argument: Node | tuple[Node, ...] | None) -> Any:
    """The argument of a composite: a node for a tensor, a Python value for anything else."""
    if isinstance(argument, tuple):
        return argument
    if spec.is_tensor:
        return LiteralNode(spec.default) if argument is None and spec.default is not None else argument
    value = argument.value if isinstance(argument, LiteralNode) else spec.default
    return list(value) if isinstance(value, tuple) else value
