"""Where the layers of a sliced configuration come from, and where they go."""

from __future__ import annotations

from collections.abc import Mapping

from mecha_exp.errors import ConfigError, counted
from mecha_exp.mergekit.reader import Configuration, Slice
from mecha_exp.mergekit.references import Reference, StoredModel
from mecha_exp.recipe.layers import sides
from mecha_exp.sources.layers import Span


def spans_of(
    configuration: Configuration, models: Mapping[Reference, StoredModel]
) -> list[dict[Reference, Span]]:
    """For each slice the layers that it takes of its inputs, with their numbers in the output.

    Embeddings are merged as in the first slice, the last norm and the output layer as in the last.

    Raises:
        ConfigError: the inputs of a slice have different numbers of layers, or a layer is not there.
        CheckpointError: the layers of a model cannot be told.
    """
    slices = configuration.slices
    first, last = slices[0], slices[-1]
    is_one = _rest_of(first) == _rest_of(last)
    if not is_one and len(first.inputs) != len(last.inputs):
        raise ConfigError(
            f"{last.where}: has {counted(len(last.inputs), 'source')}, and {first.where} has "
            f"{len(first.inputs)}. "
            "mergekit merges the last norm and the output layer wrongly then. Give both as many."
        )
    spans: list[dict[Reference, Span]] = []
    at = 0
    for part, rest in zip(slices, sides(len(slices), is_one), strict=True):
        counts = {entry.layers[1] - entry.layers[0] for entry in part.inputs}
        if len(counts) > 1:
            raise ConfigError(
                f"{part.where}: its sources have different numbers of layers: {sorted(counts)}."
            )
        for entry in part.inputs:
            _require_layers(entry.where, entry.layers[1], models[entry.reference])
        spans.append({entry.reference: Span(*entry.layers, at, rest) for entry in part.inputs})
        at += counts.pop()
    return spans


def _rest_of(part: Slice) -> object:
    """What decides how the keys outside the layers are merged in a slice."""
    return part.base, part.settings, [(entry.reference, entry.settings) for entry in part.inputs]


def _require_layers(where: str, end: int, model: StoredModel) -> None:
    if end > model.layers.count:
        raise ConfigError(
            f"{where}.layer_range: ends at {end}, and {model.source} has "
            f"{counted(model.layers.count, 'layer')}, numbered from 0."
        )
