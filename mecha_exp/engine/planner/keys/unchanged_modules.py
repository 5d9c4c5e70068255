"""Leaves out of an output what is made of a difference of two models that have the same bytes there.

Such a difference is zero, and a LoRA module of it takes space and adds nothing. Only methods that declare
`skip_unchanged` leave it out, and only where their result is the output: a merge that goes on with the result
needs the zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

from mecha_exp.errors import CheckpointError, counted
from mecha_exp.graph.nodes import MergeNode, ModelNode, Node, is_call
from mecha_exp.method_api.key_map import KeyRelation
from mecha_exp.sources.source import same_bytes

if TYPE_CHECKING:
    from mecha_exp.engine.planner.keys.specialisation import PerKeyGraph

Argument: TypeAlias = "Node | tuple[Node, ...]"


class OutputOfChanges(MergeNode):
    """A call whose result is an output, without the keys that are made of what did not change.

    Another merge of the same pass may read the plain call, which is another node and has all keys.
    """


def without_unchanged(root: Node) -> Node:
    """The graph of an output, in which a method that declares it leaves out what did not change."""
    if is_call(root, "cast"):
        return root.with_children({child: without_unchanged(child) for child in root.children})
    if isinstance(root, MergeNode) and root.method.skip_unchanged:
        return OutputOfChanges(root.method, root.arguments, root.space)
    return root


class Unchanged:
    """Finds what did not change; each tensor of two models is compared once.

    Attributes:
        counts: for each output how many groups of keys that are made together are left out.
    """

    def __init__(self, graph: PerKeyGraph) -> None:
        self.counts: dict[OutputOfChanges, int] = {}
        self._graph = graph
        self._same: dict[tuple[str, tuple[ModelNode, ...]], bool] = {}

    @property
    def notices(self) -> Iterator[str]:
        """A sentence about each output that lacks something."""
        for count in filter(None, self.counts.values()):
            listed = counted(count, "module did not change and is", "modules did not change and are")
            yield f"{listed} left out"

    def among(self, node: OutputOfChanges, relations: list[KeyRelation]) -> set[tuple[str, ...]]:
        """The groups of keys whose tensors have the same bytes in both models of the difference.

        Raises:
            CheckpointError: there is no other group.
        """
        arguments = dict(node.arguments)
        found: set[tuple[str, ...]] = set()
        for relation in relations:
            reads = [(arguments[name], key) for name, keys in relation.inputs.items() for key in keys]
            if reads and all(self._is_unchanged(argument, key) for argument, key in reads):
                found.add(relation.outputs)
        if found and len(found) == len(relations):
            raise self._nothing_changed(node, relations)
        self.counts[node] = len(found)
        return found

    def _is_unchanged(self, argument: Argument, key: str) -> bool:
        """Whether an argument is the difference of two models with the same bytes at a key."""
        models = self._models_of(argument, key)
        if not models:
            return False
        if (key, models) not in self._same:
            sources = [self._graph.sources[model] for model in models]
            kinds = {(source.info(key).dtype, source.info(key).shape) for source in sources}
            self._same[key, models] = len(kinds) == 1 and same_bytes(key, sources)
        return self._same[key, models]

    def _models_of(self, argument: Argument, key: str) -> tuple[ModelNode, ...]:
        """The two models whose plain difference an argument is at a key; none for any other graph."""
        graph = self._graph.node_at(argument, key) if isinstance(argument, Node) else None
        if not is_call(graph, "subtract"):
            return ()
        models = tuple(child for child in graph.children if isinstance(child, ModelNode))
        return models if len(models) == 2 else ()

    def _nothing_changed(self, node: OutputOfChanges, relations: list[KeyRelation]) -> CheckpointError:
        (name, (key, *_)), *_ = relations[0].inputs.items()
        a, b = (self._graph.sources[model].name for model in self._models_of(dict(node.arguments)[name], key))
        return CheckpointError(
            f"{a} and {b} are the same: the tensors of {counted(len(relations), 'module')}, which are all "
            "that there are, have equal bytes in both, so there is nothing to extract. Name a fine-tuned "
            "model and the model that it was trained from."
        )
