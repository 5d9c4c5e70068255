"""Resolves recipes for planning: interfaces become methods; conversions and layers of models become views.

Both depend on the model configs of the files and not on the key, so this comes before specialisation by key.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mecha_exp.architectures import member_of, resolve, views
from mecha_exp.architectures.lora import LORA_DELTA
from mecha_exp.conversion.formats import FormatConversion
from mecha_exp.conversion.inference import ConfigInference
from mecha_exp.conversion.lora import AdapterConversion, adapter_conversion
from mecha_exp.engine.planner.statistics import STATISTICS, StatisticsChecks
from mecha_exp.engine.planner.vocabulary import APPROXIMATE_ROWS, RENAME_KEYS, TAKE_LAYERS, TAKE_ROWS
from mecha_exp.errors import MechaError, RecipeError
from mecha_exp.graph.nodes import LiteralNode, MergeNode, ModelNode, Node, is_call, walk
from mecha_exp.graph.rewrite import rewrite
from mecha_exp.method_api.method import Kind, MergeMethod
from mecha_exp.peft.deltas import PeftDeltas
from mecha_exp.peft.metadata import with_alphas
from mecha_exp.peft.recipes import adapter_call
from mecha_exp.sources.format_view import ConvertedSource, convert_source
from mecha_exp.sources.layers import LayersSource, Span
from mecha_exp.sources.lora import AdapterSource, DeltaSource
from mecha_exp.sources.source import Source
from mecha_exp.sources.statistics import StatisticsSource
from mecha_exp.sources.views.approximation import ApproximatedRows, Approximation
from mecha_exp.sources.views.names import in_other_names
from mecha_exp.sources.views.row_table import RowTable
from mecha_exp.sources.views.rows import RowsSource


@dataclass(frozen=True, eq=False)
class ModelView(ModelNode):
    """A model that is read as if it had the format of another model config, its own `config`.

    Attributes:
        adapter: the config of the LoRA file whose differences these are.
        declared: the config that was declared for the file.
        span: the layers that are taken.
        rows: the origins of the rows of its tokens, as `RowTable` writes them.
        approximation: the rows of its tokens that are approximated.
        names: the rules by which its keys are renamed.
        models: the models, or views of them, that the view reads.
        statistic: the kind of statistics of a model on data that are read.
        base: the model that an adapter is a difference to.
    """

    adapter: str | None = None
    declared: str | None = None
    span: Span | None = None
    rows: str | None = None
    approximation: Approximation | None = None
    names: str | None = None
    models: tuple[ModelNode, ...] = ()
    statistic: str | None = None
    base: ModelNode | None = None

    def identity(self) -> tuple[Any, ...]:
        how = (self.span, self.rows, self.approximation, self.names, self.models)
        return (*super().identity(), self.adapter, self.declared, *how, self.statistic, self.base)


def is_statistics(model: ModelNode) -> bool:
    """Whether a leaf reads statistics of a model, and not a model."""
    return isinstance(model, ModelView) and model.statistic is not None


def span_of(node: Node) -> Span | None:
    """The layers that a call takes of a model that is read; None for all other nodes."""
    if not is_call(node, TAKE_LAYERS):
        return None
    values = node.literals
    model = node.children[0]
    is_read = isinstance(model, ModelNode) and len(values) == len(node.arguments) - 1
    return Span(**values) if is_read else None


def layer_views(roots: Sequence[Node], sources: Mapping[ModelNode, Source]) -> dict[Node, LayersSource]:
    """The view of each call that takes layers of a model.

    Raises:
        CheckpointError: its layers cannot be told, or one of them is not there.
    """
    return {
        node: LayersSource(sources[model], span)
        for node in walk(*roots)
        if (span := span_of(node)) is not None
        if isinstance(model := node.children[0], ModelNode) and model in sources
    }


def resolve_recipes(
    roots: Sequence[Node],
    sources: dict[ModelNode, Source],
    configs: ConfigInference,
    budget: int,
    resolved: dict[Node, Node],
) -> tuple[Node, ...]:
    """Replace interfaces by methods, and conversions of models by views of these models.

    Args:
        sources: the opened models; the views are added.
        configs: infers the model configs of the sources.
        budget: how many bytes of a LoRA file's results are cached.
        resolved: is filled with the new node of each node.

    Raises:
        RecipeError: an interface without an implementation for the model configs of its arguments.
    """
    return rewrite(roots, _Resolver(sources, configs, budget).resolve, resolved)


class _Resolver:
    def __init__(self, sources: dict[ModelNode, Source], configs: ConfigInference, budget: int) -> None:
        self._sources = sources
        self._configs = configs
        self._budget = budget
        self._adapters: dict[Node, MergeNode] = {}
        self._statistics_checks = StatisticsChecks(sources)
        self._viewers: dict[str, Callable[[MergeNode], Node]] = {
            TAKE_LAYERS: self._some_layers,
            TAKE_ROWS: self._some_rows,
            APPROXIMATE_ROWS: self._approximated_rows,
            RENAME_KEYS: self._renamed,
        }

    def resolve(self, node: Node) -> Node:
        """The new node for a node whose children are resolved."""
        if not isinstance(node, MergeNode):
            return node
        if node.method.identifier == STATISTICS:
            return self._statistics(node)
        if (pair := adapter_call(node, self._sources)) is not None:
            return self._peft_deltas(*pair)
        if node.method.identifier == LORA_DELTA:
            return self._with_deltas(self._implemented(node), node.children[1])
        self._statistics_checks.check(node)
        return self._converted(self._implemented(node) if node.method.kind is Kind.INTERFACE else node)

    def _view(self, leaf: ModelView, open_view: Callable[[], Source]) -> ModelView:
        """A view of a model; its source is opened where no other call reads the same view."""
        if leaf not in self._sources:
            self._sources[leaf] = open_view()
        return leaf

    def _statistics(self, node: MergeNode) -> MergeNode:
        """The call on views of its files: one kind of statistics under the keys of their models."""
        arguments = dict(node.arguments)
        literal = arguments["kind"]
        assert isinstance(literal, LiteralNode) and isinstance(literal.value, str)
        kind = literal.value
        views: list[Node] = []
        for file in node.children:
            if isinstance(file, LiteralNode):
                continue
            if not isinstance(file, ModelNode):
                raise RecipeError(f"statistics: expected a file that calibrate wrote, got {file!r}.")
            source = self._sources[file]
            leaf = ModelView(file.source, file.space, None, statistic=kind)
            views.append(self._view(leaf, partial(StatisticsSource, source, kind)))
        return MergeNode(node.method, tuple((arguments | {"files": tuple(views)}).items()), node.space)

    # interfaces

    def _implemented(self, node: MergeNode) -> MergeNode:
        """The call of the method that an interface stands for."""
        if node.method.choose is None:
            return _called(self._implementation(node), node)
        try:
            method = self._configs.chosen(node)
        except MechaError as error:
            raise RecipeError(f"{node.method.identifier}: {error}") from error
        return _called(method, node)

    def _implementation(self, node: MergeNode) -> MergeMethod:
        """The first implementation whose declared configs are those of the arguments."""
        configs = {name: self._identifier(child) for name, child in node.arguments if isinstance(child, Node)}
        for method in node.method.implementations:
            declared = {p.name: p.config for p in method.signature.parameters if p.config}
            if all(configs.get(name) == config for name, config in declared.items()):
                return method
        known = ", ".join(m.identifier for m in node.method.implementations) or "none"
        raise RecipeError(
            f"no method implements '{node.method.identifier}' for the model configs "
            f"{', '.join(f'{name}: {config}' for name, config in configs.items())}. Implemented: {known}."
        )

    def _identifier(self, node: Node) -> str | None:
        config = self._configs.of(node)
        return config.identifier if config else None

    # conversions

    def _converted(self, node: MergeNode) -> Node:
        """A view, if the node converts a model; the node itself, if it converts a merge."""
        method = node.method
        if isinstance(method, FormatConversion):
            adapters = self._adapters_below(node, method)
            return self._with_deltas(adapters) if adapters is not None else self._in_format(node, method)
        if isinstance(method, AdapterConversion):
            return self._with_deltas(node)
        viewer = self._viewers.get(method.identifier)
        return viewer(node) if viewer else node

    def _some_layers(self, node: MergeNode) -> Node:
        """A view of some layers of a model."""
        model, span = node.children[0], span_of(node)
        if not isinstance(model, ModelNode) or span is None:
            return node
        source = self._sources[model]
        return self._view(_view_of(model, span=span), lambda: LayersSource(source, span, _all_keys(source)))

    def _some_rows(self, node: MergeNode) -> Node:
        """A view of a model with the rows of its tokens taken from other places."""
        arguments = dict(node.arguments)
        rows = arguments["rows"]
        models = tuple(child for child in node.children if isinstance(child, ModelNode))
        if not isinstance(rows, LiteralNode) or len(models) < len(arguments["models"]):  # type: ignore[arg-type]
            return node
        text = str(rows.value)

        def open_rows() -> Source:
            source, *donors = (self._sources[model] for model in models)
            table = RowTable.parse(text)
            if max(table.ends, default=0) > len(donors):
                raise RecipeError(
                    f"take_rows: rows are taken from model {max(table.ends)}, counted from 0, and "
                    f"{len(models)} are given."
                )
            return RowsSource(source, table, donors, _all_keys(source))

        return self._view(_view_of(*models, rows=text), open_rows)

    def _approximated_rows(self, node: MergeNode) -> Node:
        """A view of a model with rows for tokens that it lacks."""
        model, donor, *others = node.children
        values = node.literals
        if not isinstance(model, ModelNode) or not isinstance(donor, ModelNode) or len(values) < len(others):
            return node
        approximation = Approximation(**values)
        source, donor_source = self._sources[model], self._sources[donor]
        return self._view(
            _view_of(model, donor, approximation=approximation),
            lambda: ApproximatedRows(source, donor_source, approximation, _all_keys(source)),
        )

    def _renamed(self, node: MergeNode) -> Node:
        """A view of a model under other keys."""
        model, rules = node.children
        if not isinstance(model, ModelNode) or not isinstance(rules, LiteralNode):
            return node
        source, text = self._sources[model], str(rules.value)
        return self._view(
            _view_of(model, names=text), lambda: in_other_names(source, text, _all_keys(source))
        )

    def _peft_deltas(self, adapter: ModelNode, base: ModelNode) -> Node:
        """A view of an adapter of PEFT as the differences that it makes to its base."""
        fit = self._configs.only_fit(base)
        leaf = ModelView(adapter.source, "delta", fit.identifier if fit else None, base=base)
        return self._view(leaf, lambda: PeftDeltas(self._sources[adapter], self._sources[base], self._budget))

    def _adapters_below(self, node: MergeNode, conversion: FormatConversion) -> MergeNode | None:
        """One conversion of a LoRA file to differences in another format, instead of two in a row."""
        (below,) = (self._adapters.get(child, child) for child in node.children)
        if not isinstance(below, MergeNode) or not isinstance(below.method, AdapterConversion):
            return None
        config = below.method.deltas.config
        direct = adapter_conversion(config, member_of(resolve(conversion.target), config.base))
        return None if direct is None else MergeNode(direct, below.arguments, below.space)

    def _with_deltas(self, node: MergeNode, base: Node | None = None) -> Node:
        """A view of a LoRA file as the differences that it stands for.

        Args:
            base: the model, for modules that depend on its tensors.
        """
        (model,) = node.children
        assert isinstance(node.method, AdapterConversion)
        if not isinstance(model, ModelNode):
            return node
        deltas = node.method.deltas
        source = with_alphas(self._sources[model])
        base = base if isinstance(base, ModelNode) and deltas.reading(source.keys()) else None
        leaf = ModelView(
            model.source, node.space, deltas.target.identifier, deltas.config.identifier, base=base
        )
        self._adapters[leaf] = node
        base_source = None if base is None else self._sources[base]
        return self._view(leaf, lambda: AdapterSource(source, deltas, self._budget, base_source))

    def _in_format(self, node: MergeNode, conversion: FormatConversion) -> Node:
        (model,) = node.children
        if not isinstance(model, ModelNode):
            self._configs.require_known_keys(model, conversion.source)
            return node
        leaf = ModelView(model.source, model.space, conversion.target, declared=model.config)
        self._sources[leaf] = self._read_in_format(model, conversion)
        return leaf

    def _read_in_format(self, model: ModelNode, conversion: FormatConversion) -> Source:
        source = self._sources[model]
        if model.config is None:
            return convert_source(source, conversion.target)
        declared = resolve(model.config)  # the file may be only a part of a model
        names = {key: alias for alias, key in declared.aliases().items() if alias in source}
        return ConvertedSource(source, views(declared, conversion.target).named(names))


def _view_of(*models: ModelNode, **how: Any) -> ModelView:
    """A view of the first of some models, which says how they are read."""
    first = models[0]
    base = first.base if isinstance(first, ModelView) else None
    return ModelView(first.source, first.space, None, declared=first.config, models=models, base=base, **how)


def _all_keys(source: Source) -> Collection[str] | None:
    """The keys of differences that are zero, too; None for sources that list all their keys."""
    return source.all_keys() if isinstance(source, DeltaSource) else None


def _called(method: MergeMethod, node: MergeNode) -> MergeNode:
    """A call of a method with the arguments of a call of its interface, and the defaults of the interface."""
    arguments = dict(node.arguments)
    for spec in node.method.signature.parameters:
        if spec.name not in arguments and not spec.required and isinstance(spec.default, int | float | str):
            arguments[spec.name] = LiteralNode(spec.default)
    named = tuple((name, arguments[name]) for name in method.signature.names if name in arguments)
    return MergeNode(method, named, node.space)
