"""Some of the layers of a model, under other numbers: what depth up-scaling and frankenmerges are made of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mecha_exp.architectures.anatomy import side_of
from mecha_exp.checkpoint.sidecars import config_beside
from mecha_exp.errors import CheckpointError, some
from mecha_exp.families import LAYER_COUNTS
from mecha_exp.sources.source import RenamedSource, Source

ALL, NONE, BEFORE, AFTER = "all", "none", "before", "after"
"""The choices of keys outside the layers that a view has."""

_SIDES = {BEFORE: 0, AFTER: 1}

_NUMBERED = re.compile(r"(?P<stack>(?:[^.]+\.)*?)(?P<layer>\d+)\.")


@dataclass(frozen=True)
class Layers:
    """The layers of a model.

    Attributes:
        stack: what stands before the number in a key: `model.layers.`.
        count: how many there are.
    """

    stack: str
    count: int

    @staticmethod
    def of(keys: Iterable[str], name: str, path: Path | None) -> Layers:
        """The one row of numbered modules in the keys of a model, as many as its config.json says.

        Args:
            name: of the model, for messages.
            path: its file or folder, beside which a config.json may lie.

        Raises:
            CheckpointError: there is none, or there are several.
        """
        stacks: dict[str, set[int]] = {}
        for key in keys:
            if match := _NUMBERED.match(key):
                stacks.setdefault(match["stack"], set()).add(int(match["layer"]))
        config = config_beside(path)
        declared = next((config[entry] for entry in LAYER_COUNTS if entry in config), None)
        fitting = [
            s for s, numbers in stacks.items() if declared in (None, len(numbers)) and _is_row(numbers)
        ]
        if len(fitting) != 1:
            listed = ", ".join(f"{stack}* ({len(numbers)})" for stack, numbers in stacks.items()) or "none"
            expected = f", of which its config.json says {declared}" if declared is not None else ""
            raise CheckpointError(
                f"{name}: its layers cannot be told{expected}. Numbered modules in its keys: {listed}. "
                "Gradients and ranges need one row of layers; give numbers, and filters by the names of keys."
            )
        return Layers(fitting[0], len(stacks[fitting[0]]))

    def index(self, key: str) -> int | None:
        """The number of the layer that a key belongs to; None outside the layers."""
        match = _NUMBERED.match(key)
        return int(match["layer"]) if match and match["stack"] == self.stack else None

    def renamed(self, key: str, index: int) -> str:
        """The key of another layer."""
        return f"{self.stack}{index}.{key.removeprefix(self.stack).partition('.')[2]}"


@dataclass(frozen=True)
class Span:
    """Layers that are taken, and their new numbers.

    Attributes:
        first, end: the first layer, and the one after the last.
        at: the new number of the first.
        rest: which keys outside the layers are taken: `all`, `none`, those `before` or those `after` them.
    """

    first: int
    end: int
    at: int = 0
    rest: str = NONE


class LayersSource(RenamedSource):
    """A source that has some of the layers of another one, renumbered. Nothing is copied.

    Attributes:
        layers: the layers of the original.
        span: those that are taken.

    Args:
        original: the source to read.
        span: the layers that are taken.

    Raises:
        CheckpointError: its layers cannot be told, a layer is not there, or a key outside the layers is on
            no known side of them.
    """

    def __init__(self, original: Source, span: Span) -> None:
        keys = original.all_keys()
        self.layers = Layers.of(keys, original.name, original.path)
        self.span = span
        if not 0 <= span.first < span.end <= self.layers.count:
            raise CheckpointError(
                f"{original.name}: layers {span.first} to {span.end - 1} are asked for, and it has "
                f"{self.layers.count}, numbered from 0."
            )
        super().__init__(original, renamed_keys(keys, self.layers, span, original.name))

    @staticmethod
    def changed_entries(path: Path, views: Sequence[LayersSource]) -> dict[str, Any]:
        """The entries of a config.json that stacked layers change: their number, and lists of one for each.

        Args:
            path: of the model whose config.json is written.
            views: those that the layers come from; where several have a layer, the first counts.
        """
        config = config_beside(path)
        before = next((config[entry] for entry in LAYER_COUNTS if entry in config), None)
        origins: dict[int, tuple[LayersSource, int]] = {}
        for source in views:
            for index in range(source.span.first, source.span.end):
                origins.setdefault(source.span.at + index - source.span.first, (source, index))
        entries: dict[str, Any] = {entry: len(origins) for entry in LAYER_COUNTS if entry in config}
        for entry, value in config.items():
            if isinstance(value, list) and before is not None and len(value) == before:
                entries[entry] = [
                    config_beside(source.path).get(entry, value)[index]
                    for _, (source, index) in sorted(origins.items())
                ]
        return entries


def renamed_keys(keys: Iterable[str], layers: Layers, span: Span, name: str) -> dict[str, str]:
    """The keys that a span of layers has, each with the key of the original.

    Raises:
        CheckpointError: a key outside the layers lies on no known side of them.
    """
    renamed: dict[str, str] = {}
    unknown: list[str] = []
    for key in keys:
        index = layers.index(key)
        if index is not None:
            if span.first <= index < span.end:
                renamed[layers.renamed(key, span.at + index - span.first)] = key
        elif span.rest == ALL:
            renamed[key] = key
        elif span.rest != NONE:
            side = side_of(key)
            if side is None:
                unknown.append(key)
            elif side == _SIDES[span.rest]:
                renamed[key] = key
    if unknown:
        raise CheckpointError(
            f"{name}: the names of {some(unknown, 5)} do not tell whether they come before or after the "
            "layers. Take all of them from one model: rest=all."
        )
    return renamed


def _is_row(numbers: set[int]) -> bool:
    return numbers == set(range(len(numbers)))
