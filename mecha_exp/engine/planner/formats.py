"""Brings the inputs of a merge to one format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mecha_exp.architectures import (
    AdapterConfig,
    Detection,
    ModelConfig,
    Views,
    candidates,
    views,
)
from mecha_exp.errors import ConfigError
from mecha_exp.graph.nodes import MergeNode, ModelNode, Node, walk
from mecha_exp.sources.format_view import ConvertedSource
from mecha_exp.sources.source import Source, infos_of


def in_one_format(
    recipes: Sequence[Node], sources: Mapping[ModelNode, Source]
) -> tuple[dict[ModelNode, Source], list[str]]:
    """The inputs of a merge with the keys of one of them, where one architecture is there in several formats.

    The format is that of the first input that all others fit into without a loss. Inputs are left as they are
    where they have a config declared, where a method that takes them asks for one, and where they are not
    known or there is no such format: if that is wrong the merge says so by their keys.

    Returns:
        the sources, and a line about each that is read as another format.
    """
    free = [model for model in sources if model.config is None and model not in _asked_for(recipes)]
    if len({frozenset(sources[model].keys()) for model in free}) < 2:
        return dict(sources), []
    fitting_each = {model: candidates(infos_of(sources[model])) for model in free}
    found = {model: each for model, each in fitting_each.items() if each and not _is_adapter(each)}
    for fitting in found.values():
        target = fitting[0].config
        conversions = _conversions_into(target, found) if len(fitting) == 1 else None
        if conversions is not None:
            read = {model: ConvertedSource(sources[model], backend) for model, backend in conversions.items()}
            was = {model: found[model][0].config.identifier for model in read}
            notes = [f"{read[m].name} is {was[m]}: read as {target.identifier}" for m in read]
            return {**sources, **read}, notes
    return dict(sources), []


def _is_adapter(fitting: Sequence[Detection]) -> bool:
    """Whether a file is a LoRA, which is no model in another format."""
    return all(isinstance(found.config, AdapterConfig) for found in fitting)


def _conversions_into(
    target: ModelConfig, found: Mapping[ModelNode, Sequence[Detection]]
) -> dict[ModelNode, Views] | None:
    """For each model that is not of the config the conversion into it; None where one of them has none."""
    conversions: dict[ModelNode, Views] = {}
    for model, fitting in found.items():
        if any(one.config == target and not one.renamed for one in fitting):
            continue
        backends = (_lossless(one, target) for one in fitting)
        conversion = next((backend for backend in backends if backend is not None), None)
        if conversion is None:
            return None
        conversions[model] = conversion
    return conversions


def _asked_for(recipes: Sequence[Node]) -> set[ModelNode]:
    """The models that some method takes in a config of its own choice."""
    return {
        child
        for node in walk(*recipes)
        if isinstance(node, MergeNode) and any(p.config for p in node.method.signature.parameters)
        for child in node.children
        if isinstance(child, ModelNode)
    }


def _lossless(found: Detection, target: ModelConfig) -> Views | None:
    """The conversion, unless it loses keys that the model's own config requires, or there is none."""
    try:
        conversion = views(found.config, target)
    except ConfigError:
        return None
    if any(not found.config.keys()[key].optional for key in conversion.lost):
        return None
    return conversion.named({name: key for key, name in found.renamed.items()})
