"""Tables of the rows that each row of an embedding is made of, and their text in recipes."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

from mecha_exp.errors import RecipeError, brief

Origins: TypeAlias = "tuple[tuple[int, int], ...]"
"""The rows that one row is the mean of, as pairs of a model's number and a row of it; none for zeros."""

_JUMPS = 16
"""How often rows may go back and still count as read in their order."""

_RANGE = re.compile(r"(?:(?P<model>\d+)@)?(?P<first>\d+)(?::(?P<end>\d+))?")
_REPEATED = re.compile(r"(?P<word>zero|mean)(?:\*(?P<count>\d+))?")


@dataclass(frozen=True)
class Run:
    """Rows that lie one after the other, in the result and in the models that they come from.

    Attributes:
        at: the first row in the result.
        count: how many there are.
        origins: where the first one comes from.
    """

    at: int
    count: int
    origins: Origins

    @property
    def end(self) -> int:
        """The row after the last."""
        return self.at + self.count


@dataclass(frozen=True)
class RowTable:
    """The origins of the rows of a tensor. Model 0 is the one that is read, the others follow.

    Attributes:
        runs: the rows in order.
        padding: how many rows follow that are the mean of all those before them.
    """

    runs: tuple[Run, ...]
    padding: int = 0

    @staticmethod
    def of(rows: Iterable[Origins], padding: int = 0) -> RowTable:
        """The table of rows with the origins of each."""
        runs: list[Run] = []
        for number, origins in enumerate(rows):
            if runs and _goes_on(runs[-1], origins):
                runs[-1] = Run(runs[-1].at, runs[-1].count + 1, runs[-1].origins)
            else:
                runs.append(Run(number, 1, origins))
        return RowTable(tuple(runs), padding)

    @staticmethod
    def parse(text: str) -> RowTable:
        """Read a table as text: words for rows, one after the other.

        `5` and `0:32000` are rows of model 0, with the end left out; `1@5` and `1@0:9` of model 1; `0@5+1@7`
        is the mean of rows, `zero*3` are three rows of zeros, and `mean*62`, at the end, the mean of all
        rows before.

        Raises:
            RecipeError: a word cannot be read, or there is none.
        """
        runs: list[Run] = []
        padding = at = 0
        for word in text.split():
            repeated = _REPEATED.fullmatch(word)
            count = int(repeated["count"] or 1) if repeated else 0
            if padding:
                raise RecipeError(f"rows: {brief(word)} comes after the mean of all rows, which is the last.")
            if repeated and repeated["word"] == "mean":
                padding = count
                continue
            count, origins = (count, ()) if repeated else _ranges(word)
            runs.append(Run(at, count, origins))
            at += count
        if not at:
            raise RecipeError(f"rows: expected words such as 0:32000, got {brief(text)}.")
        return RowTable(tuple(run for run in runs if run.count), padding)

    def __str__(self) -> str:
        words = [_word(run) for run in self.runs]
        return " ".join([*words, f"mean*{self.padding}"] if self.padding else words)

    @property
    def count(self) -> int:
        """How many rows there are before the padding."""
        return self.runs[-1].end

    @property
    def total(self) -> int:
        """How many rows there are."""
        return self.count + self.padding

    @cached_property
    def ends(self) -> dict[int, int]:
        """By the number of each model that rows come from, the row after the last one of them."""
        ends: dict[int, int] = {}
        for run in self.runs:
            for model, row in run.origins:
                ends[model] = max(ends.get(model, 0), row + run.count)
        return ends

    @property
    def start(self) -> int | None:
        """The row of model 0 that the result begins at, if it is a piece of that model as it is."""
        if len(self.runs) > 1 or self.padding:
            return None
        origins = self.runs[0].origins
        return origins[0][1] if len(origins) == 1 and origins[0][0] == 0 else None

    def reads_through(self, model: int, count: int) -> bool:
        """Whether most of a model's `count` rows are read in about their order, and not here and there.

        What lies elsewhere is fetched ahead in pieces of many rows; rows here and there are fetched alone.
        """
        ranges = [(row, run.count) for run in self.runs for number, row in run.origins if number == model]
        jumps = sum(later < earlier for (earlier, _), (later, _) in pairwise(ranges))
        return 2 * sum(rows for _, rows in ranges) >= count and jumps <= _JUMPS

    def between(self, first: int, end: int) -> Iterator[Run]:
        """The runs that rows of the result lie in; none of them for rows of the padding."""
        place = max(bisect_right(self._starts, first) - 1, 0)
        while place < len(self.runs) and self.runs[place].at < end:
            if self.runs[place].end > first:
                yield self.runs[place]
            place += 1

    @cached_property
    def _starts(self) -> Sequence[int]:
        return [run.at for run in self.runs]


def _goes_on(run: Run, origins: Origins) -> bool:
    """Whether a row follows on a run, in all the models that it comes from."""
    return origins == tuple((model, row + run.count) for model, row in run.origins)


def _ranges(word: str) -> tuple[int, Origins]:
    """The number of rows that a word stands for, and the origins of the first."""
    matches = [_RANGE.fullmatch(part) for part in word.split("+")]
    ranges = [
        (int(m["model"] or 0), int(m["first"]), int(m["end"] or int(m["first"]) + 1)) for m in matches if m
    ]
    counts = {end - first for _, first, end in ranges}
    if None in matches or len(counts) != 1 or min(counts) < 1:
        raise RecipeError(
            f"rows: {brief(word)} cannot be read. Rows are 0:32000, 1@5 of the next model, 0@5+1@7 for a "
            "mean, zero*3, and mean*62 at the end."
        )
    return counts.pop(), tuple((model, first) for model, first, _ in ranges)


def _word(run: Run) -> str:
    """A run as text."""
    if not run.origins:
        return f"zero*{run.count}"
    means = len(run.origins) > 1
    parts = []
    for model, first in run.origins:
        prefix = f"{model}@" if model or means else ""
        parts.append(f"{prefix}{first}" + (f":{first + run.count}" if run.count > 1 else ""))
    return "+".join(parts)
