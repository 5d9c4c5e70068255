"""Tables that number positions, such as CLIP's `position_ids`, which earlier merges made floating point.

Such a table is 0, 1, 2, ... by definition, and is looked up by its numbers. A merge with strengths that
do not sum to 1 leaves 0.583, 1.166, ... there, by which a text encoder repeats and drops tokens.
So a table is an input's that has whole numbers, or is made anew, and is never merged.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mecha_exp.checkpoint import is_arithmetic
from mecha_exp.errors import CheckpointError
from mecha_exp.families import POSITIONS
from mecha_exp.graph.nodes import ModelNode
from mecha_exp.sources.memory import PartlyInMemory
from mecha_exp.sources.source import Source, values_of


def with_whole_positions(
    sources: Mapping[ModelNode, Source],
) -> tuple[dict[ModelNode, Source], list[str]]:
    """The inputs with one table of positions, of integers, where one of them has it in floating point.

    Tables that are floating point everywhere, equal and of whole numbers stay as they are. Otherwise each
    input gets the first one of integers, or 0 to n - 1 if there is none.

    Returns:
        the inputs, and a line about each key.

    Raises:
        CheckpointError: a table that would be made anew is not of the shape [n] or [1, n].
    """
    weights = {model: source for model, source in sources.items() if model.merge_space == "weight"}
    tables: dict[str, torch.Tensor] = {}
    lines: list[str] = []
    for key in dict.fromkeys(key for s in weights.values() for key in s.keys() if is_of_positions(key)):
        having = [source for source in weights.values() if key in source]
        floating = [source for source in having if is_arithmetic(source.info(key).dtype)]
        first = next((source for source in having if source not in floating), None)
        if not floating or (first is None and _are_whole_and_equal(key, floating)):
            continue
        names = " and ".join(dict.fromkeys(source.name for source in floating))
        if first is not None:
            tables[key] = values_of(first, key)
            lines.append(
                f"{key}: positions are floating point in {names}; the table of {first.name} is taken"
            )
        else:
            tables[key] = _made(floating[0], key)
            lines.append(
                f"{key}: positions are not whole numbers, or differ, in {names}; they are made anew, 0 to "
                f"{tables[key].numel() - 1}"
            )
    views = {
        model: PartlyInMemory(source, {key: table for key, table in tables.items() if key in source})
        for model, source in weights.items()
        if any(key in source for key in tables)
    }
    return {**sources, **views}, lines


def is_of_positions(key: str) -> bool:
    """Whether a key is a table of positions, by its name."""
    return key.rpartition(".")[2] == POSITIONS


def _are_whole_and_equal(key: str, sources: list[Source]) -> bool:
    first, *others = [values_of(source, key).double() for source in sources]
    return bool((first == first.round()).all()) and all(torch.equal(first, other) for other in others)


def _made(source: Source, key: str) -> torch.Tensor:
    """The numbers of a table by its definition."""
    shape = source.info(key).shape
    if not shape or set(shape[:-1]) - {1}:
        raise CheckpointError(
            f"{source.name}: '{key}' has positions that are not whole numbers, and is not one row of them, "
            "so that it cannot be made anew. Give it from a file that has whole numbers there."
        )
    return torch.arange(shape[-1]).reshape(shape)
