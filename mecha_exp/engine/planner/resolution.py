"""Resolves recipes for planning: interfaces become methods, and calls that are read become leaves.

Both depend on the model configs of the files and not on the key, so this comes before specialisation by key.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from mecha_exp.conversion.inference import ConfigInference
from mecha_exp.errors import MechaError, RecipeError
from mecha_exp.graph.nodes import LiteralNode, MergeNode, ModelNode, Node
from mecha_exp.graph.rewrite import rewrite
from mecha_exp.method_api.method import STATISTICS, Kind, MergeMethod
from mecha_exp.method_api.views import ModelView, Reading, Reads, View, hyperparameters
from mecha_exp.sources.readers import readers_of
from mecha_exp.sources.source import Source


def resolve_recipes(
    roots: Sequence[Node],
    sources: dict[ModelNode, Source],
    configs: ConfigInference,
    budget: int,
    resolved: dict[Node, Node],
) -> tuple[Node, ...]:
    """Replace interfaces by methods, and calls that are read by leaves.

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
        self._reading = Reading(sources, configs, budget)
        self._readers = readers_of(sources.values())

    def resolve(self, node: Node) -> Node:
        """The new node for a node whose children are resolved."""
        if not isinstance(node, MergeNode):
            return node
        if node.method.reads is not None:
            return self._with_data(node, node.method.reads)
        known = (reader.read(node, self._reading) for reader in self._readers)
        if (view := next(filter(None, known), None)) is not None:
            return self._leaf(view)
        self._check_statistics(node)
        call = self._implemented(node) if node.method.kind is Kind.INTERFACE else node
        read = call.method.read(call, node, self._reading)
        return self._leaf(read) if isinstance(read, View) else read

    def _leaf(self, view: View) -> ModelView:
        """The leaf of a view; its source is opened where no other call reads the same view."""
        leaf = view.leaf
        if leaf not in self._sources:
            self._sources[leaf] = view.open()
        return leaf

    def _with_data(self, node: MergeNode, reads: Reads) -> MergeNode:
        """A call whose models are read as its method says, each by itself."""
        values = hyperparameters(node)
        given = [(name, child) for name, child in node.named_children if node.method.signature[name].is_model]
        leaves: dict[Node, Node] = {}
        for name, file in given:
            if not isinstance(file, ModelNode):
                help = node.method.signature[name].help
                raise RecipeError(f"{node.method.identifier}: {name} is {file!r}, not a file ({help}).")
            alone = tuple((n, (file,) if n == name else value) for n, value in node.arguments)
            known_by = MergeNode(node.method, alone, file.space)
            leaves[file] = self._leaf(View(known_by, partial(reads, self._sources[file], **values)))
        return node.with_children({child: child for child in node.children} | leaves)

    def _check_statistics(self, call: MergeNode) -> None:
        """Check that a call receives the statistics that it needs, and those of its models."""
        argument, needed = dict(call.arguments).get(STATISTICS), call.method.statistics
        if needed is not None and isinstance(argument, LiteralNode):
            raise RecipeError(
                f"{call.method.identifier}: {STATISTICS} is {argument!r}, and not "
                f"{STATISTICS}(FILE, FILE, kind={needed}) of files that calibrate wrote."
            )
        if isinstance(argument, MergeNode) and argument.method.reads is not None:
            files = [child for child in argument.children if isinstance(child, ModelNode)]
            argument.method.reads.check(call, files, self._sources)

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


def _called(method: MergeMethod, node: MergeNode) -> MergeNode:
    """A call of a method with the arguments of a call of its interface, and the defaults of the interface."""
    arguments = dict(node.arguments)
    for spec in node.method.signature.parameters:
        if spec.name not in arguments and not spec.required and isinstance(spec.default, int | float | str):
            arguments[spec.name] = LiteralNode(spec.default)
    named = tuple((name, arguments[name]) for name in method.signature.names if name in arguments)
    return MergeNode(method, named, node.space)
