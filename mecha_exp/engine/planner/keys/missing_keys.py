"""Keys that some inputs of a recipe lack: which of them may be missing, and messages about the others.

A component that a model lacks as a whole (a UNet alone, a checkpoint without its VAE) may be missing, and so
may a key that its config calls optional: the result has the tensor of the first input that has it. Any other
missing key is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mecha_exp.architectures import AdapterConfig, ModelConfig
from mecha_exp.architectures.lora import other_kind
from mecha_exp.conversion.inference import ConfigInference
from mecha_exp.conversion.lora import AdapterConversion
from mecha_exp.errors import counted, some
from mecha_exp.graph.nodes import MergeNode, ModelNode, Node
from mecha_exp.sources.source import Source
from mecha_exp.sources.views.finite_keys import FiniteSource
from mecha_exp.sources.views.prefixes import prefixes_between

SHOWN_KEYS = 10

NodesByKey = Mapping[str, Sequence[Node]]
ModelsByKey = Mapping[str, Sequence[ModelNode]]


class MissingKeys:
    """Decides which missing keys are errors, by the configs of the models that have them."""

    def __init__(self, sources: Mapping[ModelNode, Source], configs: ConfigInference) -> None:
        self._sources = sources
        self._configs = configs
        self._components: dict[tuple[ModelNode, ModelConfig], frozenset[str]] = {}

    def check(self, lacking: NodesByKey, holders: ModelsByKey) -> tuple[Iterator[str], NodesByKey]:
        """Notes about the keys of one recipe that may be missing, and the others.

        Args:
            lacking: by key the nodes that have no value for it.
            holders: by key the models that have it.
        """
        components = {key: self._part(key, nodes, holders[key]) for key, nodes in lacking.items()}
        parts = {key: part for key, part in components.items() if part is not None}
        wrong = {key: nodes for key, nodes in lacking.items() if key not in parts}
        return self._notes(parts, lacking, holders), wrong

    def _notes(self, parts: Mapping[str, str], lacking: NodesByKey, holders: ModelsByKey) -> Iterator[str]:
        """A line for each pair of models that lack something and the model it is taken from."""
        parts_by_models: dict[tuple[str, str], dict[str, None]] = {}
        for key, part in parts.items():
            if all(map(self._is_lora, lacking[key])):
                continue  # a LoRA has only what it changes
            models = [node for node in lacking[key] if isinstance(node, ModelNode)]
            names = ", ".join(self._sources[model].name for model in models)
            parts_by_models.setdefault((names, self._sources[holders[key][0]].name), {})[part] = None
        for (names, source), listed in parts_by_models.items():
            yield f"{names} without {some(listed, 5)}: taken from {source} as it is"

    def problems(self, lacking: NodesByKey, total: int) -> Iterator[str]:
        """A message for the inputs that lack the same keys, and for each result that lacks keys.

        Args:
            lacking: as above, of keys that may not be missing.
            total: how many keys the recipe is about.
        """
        keys_by_node: dict[Node, list[str]] = {}
        for key, nodes in lacking.items():
            for node in nodes:
                keys_by_node.setdefault(node, []).append(key)
        yield from self._other_prefixes(keys_by_node)
        alike: dict[tuple[str, ...], list[str]] = {}
        for node, keys in keys_by_node.items():
            if isinstance(node, ModelNode):
                source = self._sources[node]
                alike.setdefault((_why_missing(source, keys), *keys), []).append(source.name)
                continue
            yield (
                f"the result of {node!r} lacks {len(keys)} of the {counted(total, 'key')} of what it is "
                f"merged with: {some(keys, SHOWN_KEYS)}. Say what to take instead (`node | model`), or leave "
                "such keys out with on_missing=skip."
            )
        for (reason, *keys), names in alike.items():
            lack = f"{' and '.join(names)} lack" if len(names) > 1 else f"{names[0]} lacks"
            yield (
                f"{lack} {len(keys)} of the {counted(total, 'key')} that the other inputs have: "
                f"{some(keys, SHOWN_KEYS)}. {reason} on_missing=skip leaves such keys out, "
                "on_missing=base takes them from the first input that has them."
            )

    def _other_prefixes(self, lacking: dict[Node, list[str]]) -> Iterator[str]:
        """A message for each model with the keys of the first but for their prefixes.

        The keys that are missing because of them are taken out of `lacking`.
        """
        models = [model for model in self._sources if model in lacking]
        for model in models[1:]:
            source, first = self._sources[model], self._sources[models[0]]
            if (found := prefixes_between(source, first)) is None:
                continue
            yield (
                f"{source.name} has keys that are equal to those of {first.name} but for the prefix: "
                f"{found.shared} of its {counted(len(found.names), 'key')}, {found}. on_prefix=match reads "
                f"them as the same. rename_keys, or models.rename on the command line, does so by rules: "
                f"'{found.rules}'."
            )
            names = {*found.names.values()}
            for node, keys in [*lacking.items()]:
                explained = names if node == model else found.names
                lacking[node] = [key for key in keys if key not in explained]
        for node in [node for node, keys in lacking.items() if not keys]:
            del lacking[node]

    def _part(self, key: str, nodes: Sequence[Node], holders: Sequence[ModelNode]) -> str | None:
        """The component of a key that all these nodes lack, or the key if it is optional; None: an error.

        A LoRA may lack any key.
        """
        nodes = [node for node in nodes if not self._is_lora(node)]
        if not nodes:
            return key
        for config in map(self._config_of, holders):
            info = config.info_of(key) if config else None
            if config is None or info is None:
                continue
            components = [self._components_of(node, config) for node in nodes]
            if not all(components):  # a node of another config
                return None
            part = config.component_of(key)
            if not any(part in present for present in components):
                return part
            return key if info.optional else None
        return None

    def _is_lora(self, node: Node) -> bool:
        if isinstance(node, MergeNode):
            return isinstance(node.method, AdapterConversion)
        return isinstance(node, ModelNode) and self._sources[node].is_partial

    def _config_of(self, model: ModelNode) -> ModelConfig | None:
        """The only config that a model fits; None for LoRA files, which have no components."""
        config = self._configs.only_fit(model)
        return None if isinstance(config, AdapterConfig) else config

    def _components_of(self, node: Node, config: ModelConfig) -> frozenset[str]:
        """The components of a config that a model has any key of; none for the result of a method."""
        if not isinstance(node, ModelNode):
            return frozenset()
        if (node, config) not in self._components:
            names = map(config.resolve_alias, self._sources[node].keys())
            components = frozenset(config.component_of(name) for name in names if name in config.keys())
            self._components[node, config] = components
        return self._components[node, config]


def _why_missing(source: Source, keys: Sequence[str]) -> str:
    if isinstance(source, FiniteSource) and source.spoilt.issuperset(keys):
        return "Their values are not finite, so they count as missing."
    return f"Are these models of one architecture?{other_kind(source.keys())}"
