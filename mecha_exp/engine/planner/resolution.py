"""Recipes as they are merged: methods in the place of interfaces, and of converted models leaves.

Both depend on the model configs of the files and not on the key, so this comes before `keys`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mecha_exp.architectures import resolve, views
from mecha_exp.conversion.formats import FormatConversion
from mecha_exp.conversion.lora import AdapterConversion, adapter_conversion
from mecha_exp.engine.planner.configs import NodeConfigs
from mecha_exp.errors import MechaError, RecipeError
from mecha_exp.graph.nodes import LiteralNode, MergeNode, ModelNode, Node
from mecha_exp.graph.rewrite import rewrite
from mecha_exp.method_api.method import Kind, MergeMethod
from mecha_exp.sources.format_view import ConvertedSource, convert_source
from mecha_exp.sources.lora import AdapterSource
from mecha_exp.sources.source import Source


@dataclass(frozen=True, eq=False)
class ModelView(ModelNode):
    """A model that is read as if it had the format of another model config, its own `config`.

    Attributes:
        adapter: of differences that a LoRA file makes, the config of the file.
        declared: the config that the file was said to be of.
    """

    adapter: str | None = None
    declared: str | None = None

    def identity(self) -> tuple[Any, ...]:
        return (*super().identity(), self.adapter, self.declared)


def resolve_recipes(
    roots: Sequence[Node], configs: NodeConfigs, budget: int, settled: dict[Node, Node]
) -> tuple[Node, ...]:
    """The recipes as they are merged; what the new leaves are read from is added to `configs.sources`.

    Args:
        budget: how many bytes of a LoRA file's results are kept.
        settled: is told what became of each node.

    Raises:
        RecipeError: an interface that no method implements for the model configs that are there.
    """
    return rewrite(roots, _Resolver(configs, budget).settle, settled)


class _Resolver:
    def __init__(self, configs: NodeConfigs, budget: int) -> None:
        self._configs = configs
        self._sources = configs.sources
        self._budget = budget
        self._adapters: dict[Node, MergeNode] = {}

    def settle(self, node: Node) -> Node:
        """What a node becomes whose children are settled."""
        if not isinstance(node, MergeNode):
            return node
        return self._converted(self._implemented(node) if node.method.kind is Kind.INTERFACE else node)

    # interfaces

    def _implemented(self, node: MergeNode) -> MergeNode:
        """A call of an interface as one of the method that it stands for here."""
        if node.method.choose is None:
            return _called(self._implementation(node), node)
        models = {name: child for name, child in node.arguments if isinstance(child, Node)}
        configs = {
            name: [resolve(found) for found in self._configs.possible(child)]
            for name, child in models.items()
            if not self._configs.is_constant(child)
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
        config = self._configs.of(node)
        return config.identifier if config else None

    # conversions

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
        leaf = ModelView(model.source, node.space, deltas.target.identifier, deltas.config.identifier)
        self._adapters[leaf] = node
        if leaf not in self._sources:
            self._sources[leaf] = AdapterSource(self._sources[model], deltas, self._budget)
        return leaf

    def _in_format(self, node: MergeNode, conversion: FormatConversion) -> Node:
        (model,) = node.children
        if not isinstance(model, ModelNode):
            return node
        leaf = ModelView(model.source, model.space, conversion.target, declared=model.config)
        self._sources[leaf] = self._read_in_format(model, conversion)
        return leaf

    def _read_in_format(self, model: ModelNode, conversion: FormatConversion) -> Source:
        source = self._sources[model]
        if model.config is None:
            return convert_source(source, conversion.target)
        declared = resolve(model.config)  # the file need not be a whole model
        names = {key: alias for alias, key in declared.aliases().items() if alias in source}
        return ConvertedSource(source, views(declared, conversion.target).named(names))


def _called(method: MergeMethod, node: MergeNode) -> MergeNode:
    """A call of what an interface stands for, with what the call of the interface gives and its defaults."""
    given = dict(node.arguments)
    for spec in node.method.signature.parameters:
        if spec.name not in given and not spec.required and isinstance(spec.default, int | float | str):
            given[spec.name] = LiteralNode(spec.default)
    arguments = tuple((name, given[name]) for name in method.signature.names if name in given)
    return MergeNode(method, arguments, node.space)
