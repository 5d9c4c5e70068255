"""Specialises recipes for each key: which keys the nodes have, and the plain graph that remains at a key.

The facts about the key-dependent nodes (see `dependence`) at a key decide everything else. So keys with equal
facts share one graph, in which only models, values, ordinary methods and `DeferredCall`s remain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mecha_exp.checkpoint import TensorInfo
from mecha_exp.conversion.inference import ConfigInference
from mecha_exp.engine.ir.program import DeferredCall
from mecha_exp.engine.options import EngineOptions
from mecha_exp.engine.planner.keys.dependence import (
    LEFT_OUT,
    MISSING,
    Missing,
    reads_other_keys,
    value_at,
    varies_by_key,
)
from mecha_exp.engine.planner.keys.method_calls import ArgumentView
from mecha_exp.engine.planner.keys.state_dicts import StateDictCalls
from mecha_exp.engine.planner.keys.unchanged_modules import without_unchanged
from mecha_exp.engine.planner.resolution import resolve_recipes
from mecha_exp.errors import RecipeError
from mecha_exp.graph.by_key import ByKey
from mecha_exp.graph.nodes import LiteralNode, MergeNode, ModelNode, Node, models_of, walk
from mecha_exp.method_api.method import Kind
from mecha_exp.method_api.state_dict import StateDictKeyError
from mecha_exp.sources.source import Source

KeyFacts = Mapping[Node, Any]
"""The facts that hold at a key, for every node that depends on the key.

True for a model, the value for a value by key, the chosen argument for a choice such as `a | b`; MISSING
where there is none, and LEFT_OUT where a choice leaves the key out on purpose.
"""


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


@dataclass(frozen=True, eq=False)
class KeyClass:
    """What keys have in common that every input stores alike and that are specialised alike.

    What does not hang on a key's name is checked and planned once for its class.

    Attributes:
        specialised: the graphs at these keys.
        stored: how each input that has the keys stores them; the offset is that of the first of them.
    """

    specialised: Specialisation
    stored: Mapping[ModelNode, TensorInfo]


class PerKeyGraph:
    """Recipes that are specialised for each key on request.

    Attributes:
        roots: the resolved recipes; see `resolution`.
        configs: infers the model configs of their nodes.
        sources: the opened models, and the views of them that resolving adds.
        lazy: runs the methods that read other keys.
        caches: the callers' caches of methods, by node; nodes of specialised graphs are added.
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
        self._candidates: dict[tuple[Node, ...], list[str]] = {}
        self._specialisations: dict[tuple[Any, ...], Specialisation] = {}
        resolved: dict[Node, Node] = {}
        plain = resolve_recipes(roots, self.sources, self.configs, self.lazy.budget, resolved)
        self.carry_caches(resolved)
        self.roots = tuple(map(without_unchanged, plain))
        self.carry_caches(dict(zip(plain, self.roots, strict=True)))

    def carry_caches(self, new: Mapping[Node, Node]) -> None:
        """Give the cache of each replaced node to its new node."""
        self.caches.update({new[node]: cache for node, cache in self.caches.items() if node in new})

    def at(self, roots: tuple[Node, ...], key: str) -> Specialisation:
        """The graphs specialised for a key; the same object for keys with equal facts."""
        facts: dict[Node, Any] = {}
        for atom in self.atoms(roots):
            facts[atom] = self._fact(atom, key, facts)
        kind = (roots, tuple(map(_comparable, facts.values())))
        if kind not in self._specialisations:
            self._specialisations[kind] = _Specialiser(self, facts).specialise(roots)
        return self._specialisations[kind]

    def classes(self, roots: tuple[Node, ...], keys: Iterable[str]) -> dict[str, KeyClass]:
        """The class of each key, in their order; the same object for keys that are alike."""
        models, sources = tuple(self.sources), tuple(self.sources.values())
        reads_models_only = all(isinstance(atom, ModelNode) for atom in self.atoms(roots))
        known: dict[tuple[Any, ...], KeyClass] = {}
        classes: dict[str, KeyClass] = {}
        for key in keys:
            infos = [source.info(key) if key in source else None for source in sources]
            stored = tuple([info and (info.dtype, info.shape, info.nbytes) for info in infos])
            alike = (stored, None if reads_models_only else self.at(roots, key))
            if (each := known.get(alike)) is None:
                held = {model: info for model, info in zip(models, infos, strict=True) if info}
                each = known[alike] = KeyClass(alike[1] or self.at(roots, key), held)
            classes[key] = each
        return classes

    def node_at(self, node: Node, key: str) -> Node | None:
        """The graph of a node at a key, or None if it has no value there."""
        return self.at((node,), key).roots[0]

    def has(self, node: Node, key: str) -> bool:
        """Whether a node has a value at a key."""
        return self.node_at(node, key) is not None

    def value(self, node: Node, key: str) -> Any:
        """The value of a node at a key, computed now; StateDictKeyError if it has none."""
        return self.lazy.value(node, key)

    def keys_of(self, node: Node) -> list[str]:
        """The keys at which a node has a value, in order."""
        return [key for key in self.candidates((node,)) if self.has(node, key)]

    def candidates(self, roots: tuple[Node, ...]) -> list[str]:
        """The keys at which graphs may have a value, in the order of their models."""
        if roots not in self._candidates:
            atoms = self.atoms(roots)
            reading = [atom for atom in atoms if not self.is_constant(atom)] or atoms
            keys = dict.fromkeys(key for atom in reading for key in self._keys_of_atom(atom))
            self._candidates[roots] = list(keys)
        return self._candidates[roots]

    def is_constant(self, node: Node) -> bool:
        """Whether no model is read for a node."""
        return self.configs.is_constant(node)

    def atoms(self, roots: tuple[Node, ...]) -> list[Node]:
        """The key-dependent nodes of graphs, arguments before their users."""
        if roots not in self._atoms:
            nodes = walk(*roots, children=_children_at_key)
            self._atoms[roots] = [node for node in nodes if varies_by_key(node)]
        return self._atoms[roots]

    def _fact(self, atom: Node, key: str, facts: KeyFacts) -> Any:
        """The fact about a key-dependent node, from those about the nodes below it."""
        if isinstance(atom, ModelNode):
            return True if key in self.sources[atom] else MISSING
        if isinstance(atom, LiteralNode):
            return value_at(atom, key)
        assert isinstance(atom, MergeNode)
        if atom.method.kind is Kind.CHOICE:
            return self._choose(atom, key, facts)
        if not self.missing_below(atom.children if not reads_other_keys(atom) else (), facts):
            return self.lazy.answer(atom, key)
        return MISSING

    def _choose(self, node: MergeNode, key: str, facts: KeyFacts) -> Any:
        """The argument that a choice returns, LEFT_OUT where it skips the key, or MISSING."""

        def has(child: Node, asked_key: str) -> bool:
            at_key = asked_key == key
            return not self.missing_below((child,), facts) if at_key else self.has(child, asked_key)

        views = {child: ArgumentView(self, child, has) for child in node.children}
        try:
            result = self.lazy.choose(node, key, views)
        except StateDictKeyError:
            return LEFT_OUT
        chosen = next((child for child, view in views.items() if view is result), None)
        if chosen is None:
            raise RecipeError(
                f"the choice '{node.method.identifier}' returned {type(result).__name__} for the key "
                f"'{key}'. It returns one of the state dicts that it gets."
            )
        return MISSING if self.missing_below((chosen,), facts) else chosen

    def missing_below(self, nodes: Sequence[Node], facts: KeyFacts) -> list[Node]:
        """The key-dependent nodes below `nodes` that have no value at this key."""
        below = walk(*nodes, children=lambda node: () if varies_by_key(node) else node.children)
        return [node for node in below if varies_by_key(node) and isinstance(facts[node], Missing)]

    def _keys_of_atom(self, atom: Node) -> Collection[str]:
        if isinstance(atom, ModelNode):
            return self.sources[atom].keys()
        if isinstance(atom, LiteralNode):
            assert isinstance(atom.value, ByKey)
            return [pattern for pattern, _ in atom.value.patterns]
        return self.lazy.keys_of(atom) if isinstance(atom, MergeNode) and reads_other_keys(atom) else ()


class _Specialiser:
    """Builds the graphs that remain with these facts; None stands for a node without a value."""

    def __init__(self, graph: PerKeyGraph, facts: KeyFacts) -> None:
        self._graph = graph
        self._facts = facts
        self._new: dict[Node, Node | None] = {}
        self._lacking: dict[Node, tuple[Node, ...]] = {}

    def specialise(self, roots: tuple[Node, ...]) -> Specialisation:
        for node in walk(*roots, children=_children_at_key):
            self._new[node] = new = self._specialised(node)
            if new is not None and node in self._graph.caches:
                self._graph.caches.setdefault(new, self._graph.caches[node])
        new_roots = tuple(self._new[root] for root in roots)
        return Specialisation(
            new_roots,
            tuple(self._lacking.get(root, ()) for root in roots),
            tuple(tuple(models_of(root)) if root else () for root in new_roots),
            tuple(tuple(self._held(root)) for root in roots),
        )

    def _specialised(self, node: Node) -> Node | None:
        fact = self._facts.get(node, True)
        if isinstance(node, MergeNode) and node.method.kind is Kind.CHOICE:
            return self._specialised_choice(node, fact)
        if isinstance(node, MergeNode) and not reads_other_keys(node):
            return self._specialised_call(node, fact)
        if fact is MISSING:
            return None
        if isinstance(node, LiteralNode) and isinstance(node.value, ByKey):
            return LiteralNode(fact, node.space)
        if isinstance(node, MergeNode):
            is_known = self._graph.lazy.is_known(node)
            return LiteralNode(fact, node.space) if is_known else DeferredCall(node, self._graph.lazy)
        return node

    def _specialised_choice(self, node: MergeNode, chosen: Any) -> Node | None:
        if chosen is LEFT_OUT:
            return None
        for child in node.children if chosen is MISSING else (chosen,):
            self._add_lacking(node, self._lacking.get(child, ()))
        return None if chosen is MISSING else self._new[chosen]

    def _specialised_call(self, node: MergeNode, fact: Any) -> Node | None:
        for child in node.children:
            self._add_lacking(node, self._lacking.get(child, ()))
        missing = [child for child in node.children if self._new[child] is None]
        if missing:
            others = (child for child in node.children if self._new[child] is not None)
            if not all(map(self._graph.is_constant, others)):
                self._add_lacking(node, self._graph.missing_below(missing, self._facts))
            return None
        if fact is MISSING:
            return None
        rebuilt = node.with_children({child: self._new[child] or child for child in node.children})
        _check_values(rebuilt)
        return rebuilt

    def _add_lacking(self, node: Node, lacking: Sequence[Node]) -> None:
        """Record nodes below a node that lack the key."""
        if lacking:
            self._lacking[node] = tuple(dict.fromkeys((*self._lacking.get(node, ()), *lacking)))

    def _held(self, root: Node) -> Iterator[ModelNode]:
        """The models below a root that have the key."""
        for atom in self._graph.atoms((root,)):
            if isinstance(atom, ModelNode) and self._facts[atom] is not MISSING:
                yield atom


def _comparable(fact: Any) -> Any:
    """A fact that differs from all others: 1, 1.0 and True are equal in Python, and so are 0.0 and -0.0."""
    is_value = isinstance(fact, int | float | tuple) and fact is not True
    return (type(fact), repr(fact)) if is_value else fact


def _children_at_key(node: Node) -> Sequence[Node]:
    """The children whose values at the same key a node needs."""
    return () if reads_other_keys(node) else node.children


def _check_values(node: MergeNode) -> None:
    """Check computed hyperparameters as if they were literals of the recipe."""
    for name, child in node.named_children:
        spec = node.method.signature[name]
        if isinstance(child, LiteralNode) and not spec.is_tensor and (wrong := spec.check(child.value)):
            raise RecipeError(f"{node.method.identifier}: {name}: {wrong}")
