"""Graphs made into other graphs: node by node, and composites into what they are composed of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mecha_exp.graph.nodes import MergeNode, Node, walk


def rewrite(
    roots: Sequence[Node], replace: Callable[[Node], Node], new: dict[Node, Node] | None = None
) -> tuple[Node, ...]:
    """The graphs rebuilt from the leaves up, with `replace` applied to every node.

    `new` remembers what became of each node, and that a result stays as it is.
    """
    new = {} if new is None else new
    for node in walk(*roots, skip=new):
        rebuilt = node
        if isinstance(node, MergeNode):
            rebuilt = node.with_children(new)
        new[node] = replace(rebuilt)
        new.setdefault(new[node], new[node])
    return tuple(new[root] for root in roots)
