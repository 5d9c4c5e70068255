"""Of which model configs the nodes of recipes are, as far as files and methods tell."""

from __future__ import annotations

from collections.abc import Mapping

from mecha_exp.architectures import ModelConfig, candidates, detect, resolve
from mecha_exp.graph.nodes import MergeNode, ModelNode, Node, walk
from mecha_exp.sources.source import Source, infos_of


class NodeConfigs:
    """The model config of each node; hyperparameters are of none.

    Attributes:
        sources: what the models are read from. Leaves that are put in for models are added.
    """

    def __init__(self, sources: Mapping[ModelNode, Source]) -> None:
        self.sources = dict(sources)
        self._of_models: dict[ModelNode, ModelConfig] = {}
        self._constant: dict[Node, bool] = {}

    def is_constant(self, node: Node) -> bool:
        """Whether no model is read for a node: it is a hyperparameter, known when a merge is planned."""
        if node not in self._constant:
            for below in walk(node, skip=self._constant):
                is_leaf = isinstance(below, ModelNode)
                self._constant[below] = not is_leaf and all(self._constant[c] for c in below.children)
        return self._constant[node]

    def of(self, node: Node) -> ModelConfig | None:
        """The model config of a node: the declared one, or that of the first model below; None for values."""
        origin, declared = self._origin(node)
        if isinstance(origin, ModelNode):
            return self._of_model(origin)
        return resolve(declared) if declared else None

    def possible(self, node: Node) -> list[str]:
        """The known model configs that a node may be of; none for values and for unknown models."""
        origin, declared = self._origin(node)
        if declared or not isinstance(origin, ModelNode):
            return [declared] if declared else []
        return [found.config.identifier for found in candidates(infos_of(self.sources[origin]))]

    def _origin(self, node: Node) -> tuple[Node, str | None]:
        """The node, or the first one below, that tells the config; with the config that it declares."""
        while isinstance(node, MergeNode):
            below = [child for child in node.children if not self.is_constant(child)] or node.children
            if node.declared_config or not below:
                break
            node = below[0]
        return node, node.declared_config

    def _of_model(self, node: ModelNode) -> ModelConfig:
        if node not in self._of_models:
            declared = resolve(node.config) if node.config else None
            self._of_models[node] = declared or detect(infos_of(self.sources[node])).config
        return self._of_models[node]
