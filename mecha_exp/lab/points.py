"""Makes the points of a sweep: from axes (a key and its values, or a range) to lists of settings.

A point is a dictionary from configuration keys to texts, as they are typed on the command line.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mecha_exp.errors import ConfigError, counted

Setting = dict[str, str]

DIGITS = 12
"""Significant digits of a number: what computing with it has left beyond them is dropped."""
SAMPLED_DIGITS = 6
EXPERTS_KEY = "models.experts"
SET_KEY = "models.set"
"""The key of the number of a point's set of experts."""
SEED_PATH = "parameters.seed"
"""The key of the seed of a configuration of mergekit."""
BLOCK, EXPERT = "block", "expert"
"""The keys of the block, or the expert, that a point sets apart."""
SUBSET_KEY, BLOCKS_KEY = "subset", "blocks_merged"
"""The keys of the experts, or the blocks, that a point merges where others are left out."""
LEARNED_KEY, STEP_KEY = "learned", "step"
"""The keys of what a point's weights were learned by, and after how many steps."""
SOUP_KEY, TRIAL = "soup", "trial"
"""The key of what a point of a greedy soup is, and its value where the point only tries an expert."""
LABELS = (BLOCK, EXPERT, SUBSET_KEY, BLOCKS_KEY, SET_KEY, LEARNED_KEY, STEP_KEY, SOUP_KEY)
"""Keys that only say what a point is: columns of tables, no hyperparameters."""


@dataclass(frozen=True)
class Axis:
    """A key that is varied.

    Attributes:
        key: of the configuration.
        values: texts, if they are listed.
        low, high: of a range, otherwise.
        logarithmic: whether the range is drawn from by its logarithm.
        is_integer: whether the range has whole numbers alone, both ends included.
    """

    key: str
    values: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    logarithmic: bool = False
    is_integer: bool = False

    @property
    def is_range(self) -> bool:
        """Whether it has no listed values."""
        return not self.values

    def at(self, share: float) -> str:
        """The value at a fraction of the range, from 0 to 1."""
        if self.values:
            return self.values[min(int(share * len(self.values)), len(self.values) - 1)]
        low, high = (self.low - 0.5, self.high + 0.5) if self.is_integer else (self.low, self.high)
        if self.logarithmic:
            value = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
        else:
            value = low + share * (high - low)
        value = min(max(value, self.low), self.high)
        return str(round(value)) if self.is_integer else f"{value:.{SAMPLED_DIGITS}g}"


def normalized(text: str) -> str:
    """A number or a truth value as one would write it; other texts as they are.

    >>> normalized("0.30000000000000004"), normalized("3"), normalized("1e-3"), normalized("ties")
    ('0.3', '3', '0.001', 'ties')
    >>> normalized("True")
    'true'
    """
    if text.lower() in ("true", "false"):
        return text.lower()
    try:
        number = float(text)
    except ValueError:
        return text
    if not any(c in text.lower() for c in ".e") or not math.isfinite(number):
        return text
    short = f"{number:.{DIGITS}g}"
    is_left_over = _digits(short) <= DIGITS - 2  # and not what was typed in full
    return str(float(short)) if is_left_over else str(number)


def _digits(text: str) -> int:
    """How many significant digits a number is written with."""
    return len(text.lower().partition("e")[0].replace(".", "").lstrip("-+0").rstrip("0"))


def _number(text: str) -> str | float:
    """A text as the number that it is; other texts as they are."""
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else text


def grid(axes: Sequence[Axis], mode: str = "grid") -> list[Setting]:
    """Every combination, the last axis changing first.

    Raises:
        ConfigError: a range, which has no values to list.
    """
    _require_lists(axes, mode)
    return [
        dict(zip([a.key for a in axes], v, strict=True)) for v in itertools.product(*(a.values for a in axes))
    ]


def zipped(axes: Sequence[Axis]) -> list[Setting]:
    """The first value of each, the second of each, ...

    Raises:
        ConfigError: lists of different lengths.
    """
    _require_lists(axes, "zip")
    lengths = {axis.key: len(axis.values) for axis in axes}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{key} has {counted(count, 'value')}" for key, count in lengths.items())
        raise ConfigError(f"sweep=zip needs lists of one length: {listed}.")
    return [dict(zip(lengths, values, strict=True)) for values in zip(*(a.values for a in axes), strict=True)]


def at_random(axes: Sequence[Axis], n: int, seed: int) -> list[Setting]:
    """Draw `n` points, each axis independently."""
    chance = random.Random(seed)
    return [{axis.key: axis.at(chance.random()) for axis in axes} for _ in range(n)]


def latin_hypercube(axes: Sequence[Axis], n: int, seed: int) -> list[Setting]:
    """Draw `n` points as a Latin hypercube: each axis has one value in each of its `n` equal parts."""
    chance = random.Random(seed)
    columns = {}
    for axis in axes:
        shares = [(part + chance.random()) / n for part in range(n)]
        chance.shuffle(shares)
        columns[axis.key] = [axis.at(share) for share in shares]
    return [{key: column[number] for key, column in columns.items()} for number in range(n)]


def one_at_a_time(axes: Sequence[Axis], default: Mapping[str, str]) -> list[Setting]:
    """The default point, then each axis varied alone."""
    _require_lists(axes, "one_at_a_time")
    middle = {axis.key: default[axis.key] for axis in axes}
    return [middle, *({**middle, axis.key: value} for axis in axes for value in axis.values)]


def listed(points: Sequence[Mapping[str, Any]]) -> list[Setting]:
    """Points that are listed one by one.

    Raises:
        ConfigError: there are none, or one is not a mapping.
    """
    wrong = next((p for p in points if not isinstance(p, Mapping)), None)
    if not points or wrong is not None:
        fault = "there is none" if not points else f"{wrong!r} is none"
        raise ConfigError(
            "sweep=points needs points, as in sweep.points=[{alpha:0.3,k:0.2},{alpha:0.5,k:0.1}] or "
            f"sweep.file=points.csv: {fault}."
        )
    return [{str(key): as_text(value) for key, value in point.items()} for point in points]


def read_points(path: Path) -> list[Setting]:
    """Read points from a CSV file: keys in the first row, then one point per row; empty fields set nothing.

    Raises:
        ConfigError: it cannot be read, or a row has more fields than there are keys.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"sweep.file={path} cannot be read: {error}.") from None
    for number, row in enumerate(rows, 2):
        if None in row:
            raise ConfigError(f"sweep.file={path}, line {number}: more fields than the first line has keys.")
    points = [
        {key.strip(): text.strip() for key, text in row.items() if text and text.strip()} for row in rows
    ]
    if not points:
        raise ConfigError(f"sweep.file={path} has no points: put keys in its first line and values below.")
    return points


def blocks_apart(blocks: Sequence[str], mode: str, strength: str) -> list[Setting]:
    """The points of a block ablation: one undisturbed, then one for each block.

    Args:
        blocks: of the model.
        mode: `leave_one_block_out` gives each block 0 in turn; `only_one_block` gives all others 0, and the
            undisturbed point has 0 everywhere.
        strength: what the blocks have otherwise.
    """
    if mode == "leave_one_block_out":
        return [{}, *({"++block": b, f"++blocks.{b}": "0"} for b in blocks)]
    nothing = {"++blocks.default": "0"}
    return [nothing, *({**nothing, "++block": b, f"++blocks.{b}": strength} for b in blocks)]


def replicated(points: Sequence[Setting], first_seed: int, n: int, key: str = "seed") -> list[Setting]:
    """Each point with `n` seeds; `key` names the seed."""
    return [{**point, key: str(first_seed + i)} for point in points for i in range(n)]


def with_each_set(points: Sequence[Setting], names: Sequence[Sequence[str]]) -> list[Setting]:
    """Each point with each set of experts; a point with a subset has the experts of these names.

    Args:
        points: of a sweep.
        names: of the experts of each set, alike for all sets where points have subsets.
    """
    return [
        {**point, f"++{SET_KEY}": str(i), EXPERTS_KEY: _experts_in(i, point, of_set)}
        for point in points
        for i, of_set in enumerate(names)
    ]


def _experts_in(number: int, point: Setting, names: Sequence[str]) -> str:
    """A reference to a set of experts, or to those of its experts that a point merges."""
    subset = point.get(f"++{SUBSET_KEY}")
    if subset is None:
        return f"${{models.sets.{number}}}"
    members = subset.strip("[]").split(",")
    return as_text([f"${{models.sets.{number}.{names.index(name)}}}" for name in members])


def subsets_at_random(count: int, size: int, n: int, seed: int) -> list[tuple[int, ...]]:
    """Draw `n` different subsets of `size` places out of `count`, sorted; all of them where `n` suffices."""
    if math.comb(count, size) <= n:
        return list(itertools.combinations(range(count), size))
    chance = random.Random(seed * 1000 + size)
    drawn: set[tuple[int, ...]] = set()
    while len(drawn) < n:
        drawn.add(tuple(sorted(chance.sample(range(count), size))))
    return sorted(drawn)


def unique(points: Iterable[Setting]) -> list[Setting]:
    """The points without repetitions, their numbers normalized; 1 and 1.0 are the same one."""
    settings: dict[frozenset[tuple[str, str | float]], Setting] = {}
    for point in points:
        normal = {key: normalized(text) for key, text in point.items()}
        settings.setdefault(frozenset((key, _number(text)) for key, text in normal.items()), normal)
    return list(settings.values())


def shared(points: Sequence[Setting], share: str | None) -> list[Setting]:
    """One machine's part of the points: of `2/4` every fourth one, from the second on.

    Raises:
        ConfigError: not of that form, or more parts than points.
    """
    if share is None:
        return list(points)
    part, _, parts = str(share).partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise ConfigError(f"sweep.share={share}: expected a part such as 1/4, 2/4, 3/4 or 4/4.")
    if int(part) > len(points):
        raise ConfigError(
            f"sweep.share={share}: of {counted(len(points), 'point')} there is none left for this part."
        )
    return list(points[int(part) - 1 :: int(parts)])


def as_text(value: Any) -> str:
    """A value as it is typed on the command line."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{as_text(v)}" for key, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(as_text, value)) + "]"
    return json.dumps(value)


def _require_lists(axes: Sequence[Axis], mode: str) -> None:
    ranges = [axis.key for axis in axes if axis.is_range]
    if ranges:
        raise ConfigError(
            f"{', '.join(ranges)}: sweep={mode} needs values, not a range. Draw from ranges with "
            "sweep=latin or sweep=random."
        )
