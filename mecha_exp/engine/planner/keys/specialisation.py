"""What a recipe is at one key: which keys its nodes have, and the plain graph that is left there.

The answers of a recipe's atoms (see `atoms`) at a key decide everything else, so keys with the same answers
share one graph, in which only models, values and ordinary methods are left, and `DeferredCall`s.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mecha_exp.conversion.inference import ConfigInference
from mecha_exp.engine.ir.program import DeferredCall
from mecha_exp.engine.options import EngineOptions
from mecha_exp.engine.planner.keys.dependence import MISSING, reads_other_keys, value_at, varies_by_key
from mecha_exp.engine.planner.keys.state_dicts import ArgumentView, StateDictCalls
from mecha_exp.engine.planner.resolution import resolve_recipes
from mecha_exp.errors import RecipeError
from mecha_exp.graph.by_key import ByKey
from mecha_exp.graph.nodes import LiteralNode, MergeNode, ModelNode, Node, models_of, walk
from mecha_exp.method_api.method import Kind
from mecha_exp.method_api.state_dict import StateDictKeyError
from mecha_exp.sources.source import Source

KeyFacts = Mapping[Node, Any]
"""Of each atom what it is at a key: of a model whether it has it, of a value the value, of `a | b` the one
that is taken; MISSING where there is nothing."""


@dataclass(frozen=True, eq=False)
class Specialisation:
    """The recipes specialised for a class of keys.

    Attributes:
        roots: for each recipe the graph at these keys, or None if it has no value.
        lacking: for each recipe the nodes without a value, if others that they are merged with have one.
        models: for each recipe the models that its graph reads.
        held: for each recipe the models that have these keys, whether they are used or not.
    """

    roots: tuple[Node | None, ...]
    lacking: tuple[tuple[Node, ...], ...]
    models: tuple[tuple[ModelNode, ...], ...]
    held: tuple[tuple[ModelNode, ...], ...]

    def merged(self, recipe: int) -> tuple[ModelNode, ...]:
        """The models that a recipe merges; all models that have these keys, if some input lacks them."""
        return self.held[recipe] if self.lacking[recipe] else self.models[recipe]


class PerKeyGraph:
    """Answers what recipes are at each key; see the module.

    Attributes:
        roots: the recipes as they are merged; see `settling`.
        configs: the model configs of their nodes.
        sources: what their models are read from.
        lazy: runs the methods that ask for other keys.
        caches: what the caller gave to methods, by node; nodes of the graphs that are left are added.
    """

    def __init__(
        self,
        roots: Sequence[Node],
        sources: Mapping[ModelNode, Source],
        configs: ConfigInference,
        options: EngineOptions,
        caches: Mapping[Node, Any],
    ) -> None:
        self.sources = dict(sources)
        self.configs = configs.over_views(self.sources)
        self.caches = dict(caches)
        self.lazy = StateDictCalls(self, options)
        self._atoms: dict[tuple[Node, ...], list[Node]] = {}
        self._situations: dict[tuple[Any, ...], Specialisation] = {}
        resolved: dict[Node, Node] = {}
        self.roots = resolve_recipes(roots, self.sources, self.configs, self.lazy.budget, resolved)
        self.carry_caches(resolved)

    def carry_caches(self, new: Mapping[Node, Node]) -> None:
        """A call keeps the cache that it was given when it becomes another node."""
        self.caches.update({new[node]: cache for node, cache in self.caches.items() if node in new})

    # what is asked

    def at(self, roots: tuple[Node, ...], key: str) -> Specialisation:
        """The graphs at a key; the same object for keys with the same answers."""
        answers = self._answers(roots, key)
        kind = (roots, tuple(map(_comparable, answers.values())))
        found = self._situations.get(kind)
        if found is None:
            found = self._situations[kind] = _Builder(self, answers).build(roots)
        return found

    def has(self, node: Node, key: str) -> bool:
        """Whether a node has a value at a key."""
        return self.at((node,), key).roots[0] is not None

    def value(self, node: Node, key: str) -> Any:
        """The value of a node at a key, computed now; StateDictKeyError where it has none."""
        return self.lazy.value(node, key)

    def keys_of(self, node: Node) -> list[str]:
        """The keys at which a node has a value, in order."""
        return [key for key in self.candidates((node,)) if self.has(node, key)]

    def candidates(self, roots: tuple[Node, ...]) -> list[str]:
        """The keys at which the graphs may have a value, in the order of their models."""
        atoms = self.atoms(roots)
        wanted = [atom for atom in atoms if not self.is_constant(atom)] or atoms
        return list(dict.fromkeys(key for atom in wanted for key in self._keys_of_atom(atom)))

    def is_constant(self, node: Node) -> bool:
        """Whether no model is read for a node."""
        return self.configs.is_constant(node)

    # atoms

    def atoms(self, roots: tuple[Node, ...]) -> list[Node]:
        """The nodes of the graphs that differ from key to key, arguments before their users."""
        if roots not in self._atoms:
            nodes = walk(*roots, children=_streamed)
            self._atoms[roots] = [node for node in nodes if varies_by_key(node)]
        return self._atoms[roots]

    def _answers(self, roots: tuple[Node, ...], key: str) -> dict[Node, Any]:
        answers: dict[Node, Any] = {}
        for atom in self.atoms(roots):
            answers[atom] = self._answer(atom, key, answers)
        return answers

    def _answer(self, atom: Node, key: str, answers: KeyFacts) -> Any:
        if isinstance(atom, ModelNode):
            return True if key in self.sources[atom] else MISSING
        if isinstance(atom, LiteralNode):
            return value_at(atom, key)
        assert isinstance(atom, MergeNode)
        if atom.method.kind is Kind.CHOICE:
            return self._choose(atom, key, answers)
        if not self.missing_below(atom.children if not reads_other_keys(atom) else (), answers):
            return self.lazy.answer(atom, key)
        return MISSING

    def _choose(self, node: MergeNode, key: str, answers: KeyFacts) -> Any:
        """Which argument of a choice is taken: the argument, or MISSING."""

        def has(child: Node, asked: str) -> bool:
            return not self.missing_below((child,), answers) if asked == key else self.has(child, asked)

        views = {child: ArgumentView(self, child, has) for child in node.children}
        try:
            chosen = self.lazy.call(node, key, views)
        except StateDictKeyError:
            return MISSING
        taken = next((child for child, view in views.items() if view is chosen), None)
        if taken is None:
            raise RecipeError(
                f"the choice '{node.method.identifier}' returned {type(chosen).__name__} for the key "
                f"'{key}'. It returns one of the state dicts that it gets."
            )
        return MISSING if self.missing_below((taken,), answers) else taken

    def missing_below(self, nodes: Sequence[Node], answers: KeyFacts) -> list[Node]:
        """The atoms that nodes need at once and that have no value."""
        found = walk(*nodes, children=lambda node: () if varies_by_key(node) else node.children)
        return [node for node in found if varies_by_key(node) and answers[node] is MISSING]

    def _keys_of_atom(self, atom: Node) -> Collection[str]:
        if isinstance(atom, ModelNode):
            return self.sources[atom].keys()
        if isinstance(atom, LiteralNode):
            assert isinstance(atom.value, ByKey)
            return [pattern for pattern, _ in atom.value.patterns]
        return self.lazy.keys_of(atom) if isinstance(atom, MergeNode) and reads_other_keys(atom) else ()


class _Builder:
    """Makes the graphs that are left where the atoms have given answers."""

    def __init__(self, graph: PerKeyGraph, answers: KeyFacts) -> None:
        self._graph = graph
        self._answers = answers
        self._new: dict[Node, Node | None] = {}
        self._lacking: dict[Node, tuple[Node, ...]] = {}

    def build(self, roots: tuple[Node, ...]) -> Specialisation:
        for node in walk(*roots, children=_streamed):
            self._new[node] = left = self._left(node)
            if left is not None and node in self._graph.caches:
                self._graph.caches.setdefault(left, self._graph.caches[node])
        left_over = tuple(self._new[root] for root in roots)
        return Specialisation(
            left_over,
            tuple(self._lacking.get(root, ()) for root in roots),
            tuple(tuple(models_of(root)) if root else () for root in left_over),
            tuple(tuple(self._held(root)) for root in roots),
        )

    def _left(self, node: Node) -> Node | None:
        answer = self._answers.get(node, True)
        if isinstance(node, MergeNode) and not reads_other_keys(node):
            return self._left_of_call(node, answer)
        if answer is MISSING:
            return None
        if isinstance(node, LiteralNode) and isinstance(node.value, ByKey):
            return LiteralNode(answer, node.space)
        if isinstance(node, MergeNode):
            settled = self._graph.lazy.is_settled(node)
            return LiteralNode(answer, node.space) if settled else DeferredCall(node, self._graph.lazy)
        return node

    def _left_of_call(self, node: MergeNode, answer: Any) -> Node | None:
        if node.method.kind is Kind.CHOICE:
            taken = None if answer is MISSING else answer
            for child in node.children if taken is None else (taken,):
                self._blame(node, self._lacking.get(child, ()))
            return None if taken is None else self._new[taken]
        for child in node.children:
            self._blame(node, self._lacking.get(child, ()))
        missing = [child for child in node.children if self._new[child] is None]
        if missing:
            present = [
                c for c in node.children if self._new[c] is not None and not self._graph.is_constant(c)
            ]
            if present:
                self._blame(node, self._graph.missing_below(missing, self._answers))
            return None
        if answer is MISSING:
            return None
        rebuilt = node.with_children({child: self._new[child] or child for child in node.children})
        _check_values(rebuilt)
        return rebuilt

    def _blame(self, node: Node, culprits: Sequence[Node]) -> None:
        if culprits:
            known = self._lacking.get(node, ())
            self._lacking[node] = tuple(dict.fromkeys((*known, *culprits)))

    def _held(self, root: Node) -> Iterator[ModelNode]:
        for atom in self._graph.atoms((root,)):
            if isinstance(atom, ModelNode) and self._answers[atom] is not MISSING:
                yield atom


def _comparable(answer: Any) -> Any:
    """An answer that is equal to no other: 1, 1.0 and True are, and so are 0.0 and -0.0."""
    is_value = isinstance(answer, int | float | tuple) and answer is not True
    return (type(answer), repr(answer)) if is_value else answer


def _streamed(node: Node) -> Sequence[Node]:
    """The children whose value at the same key is wanted."""
    return () if reads_other_keys(node) else node.children


def _check_values(node: MergeNode) -> None:
    """Hyperparameters that were computed are checked as if they had been written."""
    for name, child in node.named_children:
        spec = node.method.signature[name]
        if isinstance(child, LiteralNode) and not spec.is_tensor and (wrong := spec.check(child.value)):
            raise RecipeError(f"{node.method.identifier}: {name}: {wrong}")
