"""Rewrites graphs node by node."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mecha_exp.graph.nodes import MergeNode, Node, walk


def rewrite(
    roots: Sequence[Node], replace: Callable[[Node], Node], new: dict[Node, Node] | None = None
) -> tuple[Node, ...]:
    """Rebuild graphs from the leaves up, with `replace` applied to every node.

    `new` is filled with the new node of each node; nodes that are in it already are not replaced again.
    """
    new = {} if new is None else new
    for node in walk(*roots, skip=new):
        rebuilt = node
        if isinstance(node, MergeNode):
            rebuilt = node.with_children(new)
        new[node] = replace(rebuilt)
        new.setdefault(new[node], new[node])
    return tuple(new[root] for root in roots)
