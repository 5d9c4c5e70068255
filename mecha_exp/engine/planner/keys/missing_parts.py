"""Models that are only some parts of what they are merged with: a UNet alone, a checkpoint without its VAE.

A part that a model lacks as a whole, or a key that its config calls optional, is nothing that went wrong:
there is nothing to merge, so the result has what the first input that has it has. Any other key that is
missing inside of a part is an error all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mecha_exp.architectures import AdapterConfig, ModelConfig, candidates
from mecha_exp.conversion.lora import AdapterConversion
from mecha_exp.errors import some
from mecha_exp.graph.nodes import MergeNode, ModelNode, Node
from mecha_exp.sources.lora import AdapterSource
from mecha_exp.sources.source import Source, infos_of


class Parts:
    """What models may lack, by the configs of what they are merged with."""

    def __init__(self, sources: Mapping[ModelNode, Source]) -> None:
        self._sources = sources
        self._configs: dict[ModelNode, ModelConfig | None] = {}
        self._components: dict[tuple[ModelNode, ModelConfig], frozenset[str]] = {}

    def lacked(
        self, lacking: Mapping[str, Sequence[Node]], held: Mapping[str, Sequence[ModelNode]]
    ) -> dict[str, str]:
        """Of the keys that inputs lack those that they may lack: each with its component, or itself.

        Args:
            lacking: by key what has no value for it.
            held: by key the models that have it.
        """
        found = {key: self._part(key, nodes, held[key]) for key, nodes in lacking.items()}
        return {key: part for key, part in found.items() if part is not None}

    def notes(
        self,
        lacked: Mapping[str, str],
        lacking: Mapping[str, Sequence[Node]],
        held: Mapping[str, Sequence[ModelNode]],
    ) -> Iterator[str]:
        """A line about each model that is taken from, and the models that lack what is taken."""
        taken: dict[tuple[str, str], dict[str, None]] = {}
        for key, part in lacked.items():
            names = ", ".join(
                self._sources[node].name for node in lacking[key] if isinstance(node, ModelNode)
            )
            if all(map(self._is_of_adapter, lacking[key])):
                continue  # of a LoRA nobody expects more than what it changes
            taken.setdefault((names, self._sources[held[key][0]].name), {})[part] = None
        for (names, source), parts in taken.items():
            yield f"{names} without {some(parts, 5)}: taken from {source} as it is"

    def _part(self, key: str, nodes: Sequence[Node], holders: Sequence[ModelNode]) -> str | None:
        """The component of a key, if all that lack the key lack that; the key, if it is optional.

        What LoRA files add to a model has all numbers of the model, and never its counters.
        """
        nodes = [node for node in nodes if not self._is_of_adapter(node)]
        if not nodes:
            return key
        for holder in holders:
            config = self._config_of(holder)
            info = config.keys().get(config.resolve_alias(key)) if config else None
            if config is None or info is None:
                continue
            part = config.component_of(key)
            has = [self._components_of(n, config) if isinstance(n, ModelNode) else () for n in nodes]
            if not all(has):  # something else altogether
                return None
            if not any(part in components for components in has):
                return part
            return key if info.optional else None
        return None

    def _is_of_adapter(self, node: Node) -> bool:
        if isinstance(node, MergeNode):
            return isinstance(node.method, AdapterConversion)
        return isinstance(node, ModelNode) and isinstance(self._sources[node], AdapterSource)

    def _config_of(self, model: ModelNode) -> ModelConfig | None:
        """What a model is, where exactly one known config fits; a file of LoRA modules has no parts."""
        if model not in self._configs:
            fitting = [found.config for found in candidates(infos_of(self._sources[model]))]
            is_one = len(fitting) == 1 and not isinstance(fitting[0], AdapterConfig)
            self._configs[model] = fitting[0] if is_one else None
        return self._configs[model]

    def _components_of(self, model: ModelNode, config: ModelConfig) -> frozenset[str]:
        """The components of which a model has anything."""
        if (model, config) not in self._components:
            names = map(config.resolve_alias, self._sources[model].keys())
            found = frozenset(config.component_of(name) for name in names if name in config.keys())
            self._components[model, config] = found
        return self._components[model, config]
