"""Stacks the layers of models on each other, as depth up-scaling and frankenmerges do."""

from __future__ import annotations

from functools import reduce
from typing import Any

from mecha_exp.errors import RecipeError, brief
from mecha_exp.graph.literals import as_node
from mecha_exp.graph.nodes import Node, call


def stack_layers(*slices: tuple[Any, int, int]) -> Node:
    """A model whose layers are those of the slices, one below the other, renumbered from 0.

    What comes before the layers (embeddings) is that of the first model, and what comes after them (the last
    norm, the output layer) that of the last. Layers are read in place; in a folder's config.json their number
    and lists with an entry for each are changed.

    Args:
        slices: (model, first layer, the one after the last), where a model is a path, a state dict or a node
            of a model.

    Raises:
        RecipeError: a slice has another form, or no layers.

    >>> merge(stack_layers(("a", 0, 24), ("b", 8, 32)), "stacked")
    """
    problem = next((part for part in slices if not _is_slice(part)), None)
    if problem is not None or not slices:
        raise RecipeError(
            "stack_layers: expected slices as (model, first layer, the one after the last), got "
            f"{brief(problem)}."
        )
    nodes = {id(model): as_node(model) for model, _, _ in slices}  # one for a state dict that is there twice
    models = [nodes[id(model)] for model, _, _ in slices]
    parts: list[Node] = []
    position = 0
    for model, (_, first, end), rest in zip(
        models, slices, sides(len(slices), models[0] is models[-1]), strict=True
    ):
        parts.append(call("take_layers", model, first=first, end=end, at=position, rest=rest))
        position += end - first
    return reduce(lambda above, below: above | below, parts)


def sides(count: int, is_one: bool) -> list[str]:
    """The keys outside the layers that each of some slices gives.

    Args:
        is_one: whether the first slice and the last one give the same.
    """
    if is_one:
        return ["all"] + ["none"] * (count - 1)
    return ["before"] + ["none"] * (count - 2) + ["after"]


def _is_slice(part: object) -> bool:
    if not isinstance(part, tuple | list) or len(part) != 3:
        return False
    _, first, end = part
    return all(type(n) is int for n in (first, end)) and 0 <= first < end
