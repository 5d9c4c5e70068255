"""Where the dtypes of inputs and outputs differ, so that a merge keeps or computes with rounding errors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

import torch

from mecha_exp.checkpoint import is_arithmetic, torch_dtype
from mecha_exp.engine.planner.checks import Classes, MergedModels
from mecha_exp.engine.planner.keys.specialisation import KeyClass
from mecha_exp.errors import counted, some
from mecha_exp.graph.nodes import ModelNode
from mecha_exp.sources.inputs import Sources
from mecha_exp.sources.views.positions import is_of_positions

LEAST = torch.finfo(torch.float32).eps
"""Rounding to float32 is far below what training changes: only coarser dtypes are worth a word."""


def coarser_inputs(
    classes: Classes, merged: MergedModels, sources: Sources, decoded: Collection[ModelNode]
) -> Iterator[str]:
    """Models that store keys in a coarser dtype than another model that they are merged with.

    Args:
        decoded: the models that are stored as codes, of which the plan says so already.
    """
    pairs: dict[tuple[ModelNode, str, ModelNode, str], list[str]] = {}
    for key, stored in _by_key(classes, lambda each: _stored(each, merged, decoded)):
        finest = min(stored, key=lambda model: _step(stored[model]))
        for model, dtype in stored.items():
            if _step(dtype) > max(LEAST, _step(stored[finest])):
                pairs.setdefault((model, dtype, finest, stored[finest]), []).append(key)
    for (model, dtype, finest, fine), keys in pairs.items():
        yield (
            f"{sources[model].name} has {counted(len(keys), 'key')} in {_word(dtype)} that "
            f"{sources[finest].name} has in {_word(fine)}: {some(keys, 3)}. Rounding to {_word(dtype)} moves "
            f"a weight by up to {_step(dtype) / 2:.1g} of it, and is merged as if it had been trained. Take "
            "models of one dtype where there are such."
        )


def coarser_output(
    classes: Classes,
    merged: MergedModels,
    sources: Sources,
    decoded: Collection[ModelNode],
    stored_as: Callable[[KeyClass], str | None],
) -> Iterator[str]:
    """Keys of an output that have the first input's dtype, and another model's is finer.

    Args:
        stored_as: the dtype that the output gets from its first input; None where it is chosen.
    """
    pairs: dict[tuple[str, ModelNode, str], list[str]] = {}
    for key, stored in _by_key(classes, lambda each: _stored(each, merged, decoded)):
        dtype = stored_as(classes[key])
        finest = min(stored, key=lambda model: _step(stored[model]))
        if dtype is not None and is_arithmetic(dtype) and _step(dtype) > max(LEAST, _step(stored[finest])):
            pairs.setdefault((dtype, finest, stored[finest]), []).append(key)
    for (dtype, finest, fine), keys in pairs.items():
        count = counted(len(keys), "key of the output is", "keys of the output are")
        yield (
            f"{count} stored in {_word(dtype)}, as in the first input, where {sources[finest].name} has "
            f"{_word(fine)}: {some(keys, 3)}. An output dtype of {_word(fine)} keeps what that has."
        )


def _by_key(
    classes: Classes, stored_at: Callable[[KeyClass], Mapping[ModelNode, str]]
) -> Iterator[tuple[str, Mapping[ModelNode, str]]]:
    """Each key that some models hold, with their dtypes, which are asked for once for a class of keys."""
    known: dict[KeyClass, Mapping[ModelNode, str]] = {}
    for key, each in classes.items():
        if is_of_positions(key):  # whole numbers are the same in any dtype
            continue
        if each not in known:
            known[each] = stored_at(each)
        if known[each]:
            yield key, known[each]


def _stored(each: KeyClass, merged: MergedModels, decoded: Collection[ModelNode]) -> dict[ModelNode, str]:
    """The dtypes of the checkpoints that are merged at some keys, without deltas, views and codes.

    A delta in a coarser dtype is as exact as its largest digits: its rounding is small beside the change.
    """
    models = (m for m in merged[each] if type(m) is ModelNode and m.space == "weight" and m not in decoded)
    dtypes = {model: each.stored[model].dtype for model in models}
    return {model: dtype for model, dtype in dtypes.items() if is_arithmetic(dtype)}


def _step(dtype: str) -> float:
    """The distance from 1 to the next number of a dtype."""
    return torch.finfo(torch_dtype(dtype)).eps


def _word(dtype: str) -> str:
    return str(torch_dtype(dtype)).removeprefix("torch.")
