"""The weight of each block of a model, for hyperparameters that vary by key."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from mecha_exp.architectures import DEFAULT_CONVENTION
from mecha_exp.architectures.anatomy import Anatomy
from mecha_exp.checkpoint.folder import open_stored
from mecha_exp.errors import MechaError
from mecha_exp.graph.by_key import ByKey, Value
from mecha_exp.graph.literals import SELECT
from mecha_exp.graph.nodes import LiteralNode, MergeNode, Node, walk
from mecha_exp.sources.quantised.view import with_plain_keys
from mecha_exp.sources.source import infos_of


def block_weights(recipe: Node, files: Iterable[Path]) -> dict[str, dict[str, float]]:
    """The mean of each hyperparameter with values by key, over the keys of each block.

    A hyperparameter with a list of numbers, such as the weights of the models, has one for each place in the
    list: `weights.0`, `weights.1` and so on.

    Args:
        recipe: the graph.
        files: of its models, the first of which says what blocks there are.
    """
    values = {
        part: value
        for node in walk(recipe)
        if isinstance(node, MergeNode) and node.method.identifier != SELECT  # whose numbers are of recipes
        for name, child in node.arguments
        if isinstance(child, LiteralNode) and isinstance(child.value, ByKey)
        for part, value in _parts(name, child.value, is_list=node.method.signature[name].interface is list)
    }
    first = next(iter(files), None)
    if not values or first is None:
        return {}
    changed = first.stat().st_mtime_ns
    return {
        name: _means(value, _anatomy(first, changed, value.convention or DEFAULT_CONVENTION))
        for name, value in values.items()
    }


def _parts(name: str, value: ByKey, *, is_list: bool) -> list[tuple[str, ByKey]]:
    """The values of a hyperparameter by name; of lists those of each place."""
    listed = [v for v in value.values if isinstance(v, tuple)]
    if not is_list or not listed:
        return [(name, value)]

    def at(place: int, whole: Value) -> Value:
        return (whole[place] if place < len(whole) else None) if isinstance(whole, tuple) else whole

    def part(place: int) -> ByKey:
        patterns = tuple((selector, at(place, whole)) for selector, whole in value.patterns)
        return replace(value, patterns=patterns, default=at(place, value.default))

    return [(f"{name}.{place}", part(place)) for place in range(max(map(len, listed)))]


def _means(value: ByKey, anatomy: Anatomy) -> dict[str, float]:
    bound = value.with_curves().over(anatomy)
    by_block: dict[str, list[float]] = {}
    for key, block in anatomy.blocks.items():
        try:
            by_block.setdefault(block, []).append(float(bound(key)))  # type: ignore[arg-type]
        except (MechaError, TypeError, ValueError):  # no value, or not a number
            continue
    means = {block: math.fsum(values) / len(values) for block, values in by_block.items() if values}
    return {block: means[block] for block in anatomy.order if block in means}


@functools.lru_cache(maxsize=16)
def _anatomy(path: Path, changed: int, convention: str) -> Anatomy:
    with open_stored(path) as model:
        return Anatomy.of(infos_of(with_plain_keys(model)), convention)
