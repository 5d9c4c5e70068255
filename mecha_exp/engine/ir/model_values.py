"""Numbers of the whole model as leaves of the graph of one key.

A reduction over all keys is known before the pass that needs it (see `planner.keys.trips`), so at each key it
is a constant whose value comes later than the plan.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mecha_exp.graph.nodes import MergeNode, Node, walk
from mecha_exp.graph.rewrite import rewrite
from mecha_exp.method_api.method import Reduction


@dataclass(frozen=True, eq=False)
class ModelValue(Node):
    """A leaf whose value is found in a trip over all keys.

    Attributes:
        call: the reduction with what it reduces at each key.
    """

    call: MergeNode

    def identity(self) -> tuple[Any, ...]:
        return (self.call,)

    @property
    def merge_space(self) -> str:
        return self.call.space

    @property
    def method(self) -> Reduction:
        """The reduction over all keys that is called."""
        assert isinstance(self.call.method, Reduction)
        return self.call.method

    def __repr__(self) -> str:
        return repr(self.call)


def with_model_values(roots: Sequence[Node], replaced: dict[Node, Node] | None = None) -> tuple[Node, ...]:
    """The expanded graphs with a leaf in place of each reduction over the whole model.

    `replaced` receives the replacement of each node.
    """
    if not any(_is_of_model(node) for node in walk(*roots)):
        return tuple(roots)

    def known(node: Node) -> Node:
        return ModelValue(node) if isinstance(node, MergeNode) and _is_of_model(node) else node

    return rewrite(roots, known, replaced)


def _is_of_model(node: Node) -> bool:
    return isinstance(node, MergeNode) and isinstance(node.method, Reduction) and node.method.of_model


def has_model_values(root: Node) -> bool:
    """Whether a graph needs numbers of the whole model."""
    return any(isinstance(node, ModelValue) for node in walk(root))


def through(node: Node) -> Sequence[Node]:
    """The nodes below a node; below a number of the whole model, what it reduces."""
    return (node.call,) if isinstance(node, ModelValue) else node.children


def walk_through(roots: Iterable[Node], skip: Container[Node] = ()) -> Iterator[Node]:
    """Every node of the graphs once, and of what their numbers of the whole model reduce; see `walk`."""
    return walk(*roots, skip=skip, children=through)
