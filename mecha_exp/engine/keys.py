"""What a recipe is at one key: which keys its nodes have, and the plain graph that is left there.

The answers of a recipe's atoms (see `atoms`) at a key decide everything else, so keys with the same answers
share one graph, in which only models, values and ordinary methods are left, and `LazyNode`s.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mecha_exp.adapters import AdapterConversion, adapter_conversion
from mecha_exp.architectures import ModelConfig, candidates, detect, resolve, views
from mecha_exp.conversion import FormatConversion
from mecha_exp.engine.adapter_source import AdapterSource
from mecha_exp.engine.atoms import MISSING, is_atom, is_lazy, value_at
from mecha_exp.engine.converting import ConvertedSource, convert_source
from mecha_exp.engine.inputs import Source, infos_of
from mecha_exp.engine.lazy import Lazy, View
from mecha_exp.engine.program import LazyNode
from mecha_exp.errors import MechaError, Problems, RecipeError, did_you_mean, some
from mecha_exp.method import Kind, MergeMethod
from mecha_exp.nodes import LiteralNode, MergeNode, ModelNode, Node, models_of, walk
from mecha_exp.signature import ParameterSpec, StateDictKeyError
from mecha_exp.weighting import ByKey

Answers = Mapping[Node, Any]
"""Of each atom what it is at a key: of a model whether it has it, of a value the value, of `a | b` the one
that is taken; MISSING where there is nothing."""


@dataclass(frozen=True, eq=False)
class ConvertedModel(ModelNode):
    """A model that is read as if it had the format of another model config, its own `config`.

    Attributes:
        adapter: of differences that a LoRA file makes, the config of the file.
    """

    adapter: str | None = None

    def identity(self) -> tuple[Any, ...]:
        return (*super().identity(), self.adapter)


@dataclass(frozen=True, eq=False)
class Situation:
    """The recipes at the keys of one kind.

    Attributes:
        roots: of each recipe the graph that is left, or None where it has no value.
        lacking: of each recipe what lacks the key while something that it is merged with has it.
        models: of each recipe the models that its graph reads.
        held: of each recipe the models that have the key, whether they are used or not.
    """

    roots: tuple[Node | None, ...]
    lacking: tuple[tuple[Node, ...], ...]
    models: tuple[tuple[ModelNode, ...], ...]
    held: tuple[tuple[ModelNode, ...], ...]


class KeyedGraph:
    """Answers what recipes are at each key; see the module.

    Attributes:
        roots: the recipes, with every interface replaced by the method that fits.
        caches: what the caller gave to methods, by node; nodes of the graphs that are left are added.
    """

    def __init__(
        self,
        roots: Sequence[Node],
        sources: Mapping[ModelNode, Source],
        lazy: Lazy,
        caches: Mapping[Node, Any],
    ) -> None:
        self.sources = dict(sources)
        self.caches = dict(caches)
        self.lazy = lazy
        lazy.graph = self
        self._configs: dict[ModelNode, ModelConfig] = {}
        self._atoms: dict[tuple[Node, ...], list[Node]] = {}
        self._constant: dict[Node, bool] = {}
        self._adapters: dict[Node, MergeNode] = {}
        self._situations: dict[tuple[Any, ...], Situation] = {}
        self.roots = self._with_implementations(roots)
        self._check_configs()

    # what is asked

    def at(self, roots: tuple[Node, ...], key: str) -> Situation:
        """The graphs at a key; the same object for keys with the same answers."""
        answers = self._answers(roots, key)
        kind = (roots, tuple(answers.values()))
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

    def config_of(self, node: Node) -> ModelConfig | None:
        """The model config of a node: the declared one, or that of the first model below; None for values."""
        while True:
            if isinstance(node, ModelNode):
                return self._config_of_model(node)
            if isinstance(node, LiteralNode):
                return resolve(node.config) if node.config else None
            assert isinstance(node, MergeNode)
            declared = node.method.signature.returned.config
            if declared:
                return resolve(declared)
            models = [child for child in node.children if not self.is_constant(child)]
            if not models and not node.children:
                return None
            node = (models or node.children)[0]

    def is_constant(self, node: Node) -> bool:
        """Whether no model is read for a node: it is a hyperparameter, known when a merge is planned."""
        if node not in self._constant:
            for below in walk(node, skip=self._constant):
                is_leaf = isinstance(below, ModelNode)
                self._constant[below] = not is_leaf and all(self._constant[c] for c in below.children)
        return self._constant[node]

    # atoms

    def atoms(self, roots: tuple[Node, ...]) -> list[Node]:
        """The nodes of the graphs that differ from key to key, arguments before their users."""
        if roots not in self._atoms:
            nodes = walk(*roots, children=_streamed)
            self._atoms[roots] = [node for node in nodes if is_atom(node)]
        return self._atoms[roots]

    def _answers(self, roots: tuple[Node, ...], key: str) -> dict[Node, Any]:
        answers: dict[Node, Any] = {}
        for atom in self.atoms(roots):
            answers[atom] = self._answer(atom, key, answers)
        return answers

    def _answer(self, atom: Node, key: str, answers: Answers) -> Any:
        if isinstance(atom, ModelNode):
            return True if key in self.sources[atom] else MISSING
        if isinstance(atom, LiteralNode):
            return value_at(atom, key)
        assert isinstance(atom, MergeNode)
        if atom.method.kind is Kind.CHOICE:
            return self._choose(atom, key, answers)
        if not self.missing_below(atom.children if not is_lazy(atom) else (), answers):
            return self.lazy.answer(atom, key)
        return MISSING

    def _choose(self, node: MergeNode, key: str, answers: Answers) -> Any:
        """Which argument of a choice is taken: the argument, or MISSING."""

        def has(child: Node, asked: str) -> bool:
            return not self.missing_below((child,), answers) if asked == key else self.has(child, asked)

        views = {child: View(self, child, has) for child in node.children}
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

    def missing_below(self, nodes: Sequence[Node], answers: Answers) -> list[Node]:
        """The atoms that nodes need at once and that have no value."""
        found = walk(*nodes, children=lambda node: () if is_atom(node) else node.children)
        return [node for node in found if is_atom(node) and answers[node] is MISSING]

    def _keys_of_atom(self, atom: Node) -> Collection[str]:
        if isinstance(atom, ModelNode):
            return self.sources[atom].keys()
        if isinstance(atom, LiteralNode):
            assert isinstance(atom.value, ByKey)
            return [pattern for pattern, _ in atom.value.patterns]
        return self.lazy.keys_of(atom) if isinstance(atom, MergeNode) and is_lazy(atom) else ()

    # model configs

    def _config_of_model(self, node: ModelNode) -> ModelConfig:
        if node not in self._configs:
            source = self.sources[node]
            declared = resolve(node.config) if node.config else None
            self._configs[node] = declared or detect(infos_of(source)).config
        return self._configs[node]

    def _with_implementations(self, roots: Sequence[Node]) -> tuple[Node, ...]:
        new: dict[Node, Node] = {}
        for node in walk(*roots):
            rebuilt = node.with_children(new) if isinstance(node, MergeNode) else node
            if isinstance(rebuilt, MergeNode) and rebuilt.method.kind is Kind.INTERFACE:
                rebuilt = self._implemented(rebuilt)
            if isinstance(rebuilt, MergeNode):
                rebuilt = self._converted(rebuilt)
            new[node] = rebuilt
            if node in self.caches:
                self.caches[rebuilt] = self.caches[node]
        return tuple(new[root] for root in roots)

    def _converted(self, node: MergeNode) -> Node:
        """A converted model is a leaf that is read where it lies; of a merge the node stays."""
        method = node.method
        if isinstance(method, FormatConversion):
            adapters = self._adapters_below(node, method)
            return self._with_deltas(adapters) if adapters is not None else self._in_format(node, method)
        return self._with_deltas(node) if isinstance(method, AdapterConversion) else node

    def _adapters_below(self, node: MergeNode, conversion: FormatConversion) -> MergeNode | None:
        """LoRA files whose differences are converted to another format, as one conversion."""
        (below,) = (self._adapters.get(child, child) for child in node.children)
        if not isinstance(below, MergeNode) or not isinstance(below.method, AdapterConversion):
            return None
        direct = adapter_conversion(below.method.deltas.config.identifier, conversion.target)
        return None if direct is None else MergeNode(direct, below.arguments, below.space)

    def _with_deltas(self, node: MergeNode) -> Node:
        """The differences that a LoRA file makes."""
        (model,) = node.children
        assert isinstance(node.method, AdapterConversion)
        if not isinstance(model, ModelNode):
            return node
        deltas = node.method.deltas
        leaf = ConvertedModel(model.source, node.space, deltas.target.identifier, deltas.config.identifier)
        self._adapters[leaf] = node
        if leaf not in self.sources:
            self.sources[leaf] = AdapterSource(self.sources[model], deltas, self.lazy.budget)
        return leaf

    def _in_format(self, node: MergeNode, conversion: FormatConversion) -> Node:
        (model,) = node.children
        if not isinstance(model, ModelNode):
            return node
        leaf = ConvertedModel(model.source, model.space, conversion.target)
        self.sources[leaf] = self._read_in_format(model, conversion)
        return leaf

    def _read_in_format(self, model: ModelNode, conversion: FormatConversion) -> Source:
        source = self.sources[model]
        if model.config is None:
            return convert_source(source, conversion.target)
        declared = resolve(model.config)  # the file need not be a whole model
        names = {key: alias for alias, key in declared.aliases().items() if alias in source}
        return ConvertedSource(source, views(declared, conversion.target).named(names))

    def _implemented(self, node: MergeNode) -> MergeNode:
        """A call of an interface as one of the method that it stands for here."""
        if node.method.choose is None:
            return _called(self._implementation(node), node)
        models = {name: child for name, child in node.arguments if isinstance(child, Node)}
        configs = {
            name: [resolve(found) for found in self._identifiers(child)]
            for name, child in models.items()
            if not self.is_constant(child)
        }
        try:
            method = node.method.choose(configs)
        except MechaError as error:
            raise RecipeError(f"{node.method.identifier}: {error}") from error
        return _called(method, node)

    def _implementation(self, node: MergeNode) -> MergeMethod:
        found = {name: self._identifier(child) for name, child in node.arguments if isinstance(child, Node)}
        for method in node.method.implementations:
            declared = {p.name: p.config for p in method.signature.parameters if p.config}
            if all(found.get(name) == config for name, config in declared.items()):
                return method
        known = ", ".join(m.identifier for m in node.method.implementations) or "none"
        raise RecipeError(
            f"no method implements '{node.method.identifier}' for the model configs "
            f"{', '.join(f'{name}: {config}' for name, config in found.items())}. Implemented: {known}."
        )

    def _identifier(self, node: Node) -> str | None:
        config = self.config_of(node)
        return config.identifier if config else None

    def _check_configs(self) -> None:
        """Every state dict has the model config that the method declares for it."""
        problems = Problems()
        for node in walk(*self.roots):
            if isinstance(node, MergeNode):
                for spec, child in _by_parameter(node):
                    wrong = self._mismatch(spec.config, child) if spec.config else None
                    if wrong := wrong or self._other_keys(node, spec, child):
                        problems.add(f"{node.method.identifier}: {spec.name}: {wrong}")
        problems.raise_as(RecipeError)

    def _mismatch(self, wanted: str, node: Node) -> str | None:
        if isinstance(node, LiteralNode) and node.config is None:
            if not isinstance(node.value, ByKey):
                return None
            known = resolve(wanted).keys()
            unknown = [pattern for pattern, _ in node.value.patterns if pattern not in known]
            return (
                unknown and f"'{wanted}' has no key '{unknown[0]}'.{did_you_mean(unknown[0], known)}"
            ) or None
        found = self._identifiers(node)
        if not found or wanted in found:
            return None
        named = " or ".join(map(repr, found))
        return f"expected '{wanted}', got {node!r} of {named}. Try convert(..., '{wanted}')."

    def _other_keys(self, node: MergeNode, spec: ParameterSpec, value: Node) -> str | None:
        """What is wrong where values are for keys of another model config than what they are used with."""
        if not isinstance(value, LiteralNode) or not isinstance(value.value, ByKey) or not value.config:
            return None
        wanted = resolve(value.config)
        for beside in node.children if not spec.is_state_dict else ():
            if self.is_constant(beside):
                continue
            names, keys = self._identifiers(beside), self.candidates((beside,))
            if names and wanted.identifier not in names:
                return (
                    f"the values are for the keys of '{wanted.identifier}', and {beside!r} is of "
                    f"{' or '.join(map(repr, names))}, whose keys are others. Say them for that."
                )
            if not any(wanted.resolve_alias(key) in wanted.keys() for key in keys):
                return (
                    f"the values are for the keys of '{wanted.identifier}', and {beside!r} has none of them, "
                    f"but {some(keys, 3)}. Say them for its own keys, components or blocks."
                )
        return None

    def _identifiers(self, node: Node) -> list[str]:
        """The known model configs that a node may be of; none for values and for unknown models."""
        while isinstance(node, MergeNode):
            if node.method.signature.returned.config:
                return [node.method.signature.returned.config]
            models = [child for child in node.children if not self.is_constant(child)]
            if not models and not node.children:
                return []
            node = (models or node.children)[0]
        declared = getattr(node, "config", None)
        if declared or not isinstance(node, ModelNode):
            return [declared] if declared else []
        return [found.config.identifier for found in candidates(infos_of(self.sources[node]))]


class _Builder:
    """Makes the graphs that are left where the atoms have given answers."""

    def __init__(self, graph: KeyedGraph, answers: Answers) -> None:
        self._graph = graph
        self._answers = answers
        self._new: dict[Node, Node | None] = {}
        self._lacking: dict[Node, tuple[Node, ...]] = {}

    def build(self, roots: tuple[Node, ...]) -> Situation:
        for node in walk(*roots, children=_streamed):
            self._new[node] = left = self._left(node)
            if left is not None and node in self._graph.caches:
                self._graph.caches.setdefault(left, self._graph.caches[node])
        left_over = tuple(self._new[root] for root in roots)
        return Situation(
            left_over,
            tuple(self._lacking.get(root, ()) for root in roots),
            tuple(tuple(models_of(root)) if root else () for root in left_over),
            tuple(tuple(self._held(root)) for root in roots),
        )

    def _left(self, node: Node) -> Node | None:
        answer = self._answers.get(node, True)
        if isinstance(node, MergeNode) and not is_lazy(node):
            return self._left_of_call(node, answer)
        if answer is MISSING:
            return None
        if isinstance(node, LiteralNode) and isinstance(node.value, ByKey):
            return LiteralNode(answer, node.space)
        if isinstance(node, MergeNode):
            settled = self._graph.lazy.is_settled(node)
            return LiteralNode(answer, node.space) if settled else LazyNode(node, self._graph.lazy)
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


def _streamed(node: Node) -> Sequence[Node]:
    """The children whose value at the same key is wanted."""
    return () if is_lazy(node) else node.children


def _by_parameter(node: MergeNode) -> Iterator[tuple[ParameterSpec, Node]]:
    for name, value in node.arguments:
        for child in value if isinstance(value, tuple) else (value,):
            yield node.method.signature[name], child


def _called(method: MergeMethod, node: MergeNode) -> MergeNode:
    """A call of what an interface stands for, with what the call of the interface gives and its defaults."""
    given = dict(node.arguments)
    for spec in node.method.signature.parameters:
        if spec.name not in given and not spec.required and isinstance(spec.default, int | float | str):
            given[spec.name] = LiteralNode(spec.default)
    arguments = tuple((name, given[name]) for name in method.signature.names if name in given)
    return MergeNode(method, arguments, node.space)


def _check_values(node: MergeNode) -> None:
    """Hyperparameters that were computed are checked as if they had been written."""
    for spec, child in _by_parameter(node):
        if isinstance(child, LiteralNode) and not spec.is_tensor and (wrong := spec.check(child.value)):
            raise RecipeError(f"{node.method.identifier}: {spec.name}: {wrong}")
