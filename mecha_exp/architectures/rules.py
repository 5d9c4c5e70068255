"""Rules from names to names: how the keys of one layout become those of another, and keys become blocks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from mecha_exp.architectures.patterns import Pattern

REST = "*"
"""At the end of a name: whatever follows."""

Rules = tuple[tuple[Pattern, Pattern], ...]

_STACKED = re.compile(r"\{([^{}+,]+(?:\+[^{}+,]+)+)\}")
_TRANSPOSED, _SWAPPED = "^T", "^S"


class Renaming:
    """Rules, expanded once for many names: the longest match wins, the last one among equals."""

    def __init__(self, rules: Iterable[tuple[Pattern, Pattern]], sizes: Mapping[str, int]) -> None:
        self._exact: dict[str, str] = {}
        self._below: dict[str, str] = {}
        for left, right in rules:
            for name, other in left.pairs(right, sizes):
                if name.endswith(REST):
                    self._below[name[:-1]] = other
                else:
                    self._exact[name] = other
        self._lengths = sorted({len(name) for name in self._below}, reverse=True)

    def __call__(self, name: str) -> str | None:
        """The new name, its rest in place of a `*`; None where no rule matches."""
        if name in self._exact:
            return self._exact[name]
        length = next((n for n in self._lengths if name[:n] in self._below), None)
        if length is None:
            return None
        other = self._below[name[:length]]
        return other[:-1] + name[length:] if other.endswith(REST) else other


@dataclass(frozen=True, slots=True)
class Way:
    """The change of a tensor that a conversion makes besides its name.

    Attributes:
        index, count, of: `count` of the `of` equal ranges of rows, from the `index`-th on.
        transposed: whether rows and columns change places.
        swapped: whether the two halves of the rows change places.
    """

    index: int = 0
    of: int = 1
    count: int = 1
    transposed: bool = False
    swapped: bool = False


SAME = Way()
"""No change."""


@dataclass(frozen=True, slots=True)
class Link:
    """A tensor of one layout, as a tensor of another or as some of its rows, by a way."""

    here: str
    there: str
    way: Way


@dataclass(frozen=True)
class Conversion:
    """The rules from one layout to another, by the change of the tensors."""

    rules: Mapping[Way, Rules]

    @staticmethod
    def parse(rules: Mapping[str, str]) -> Conversion:
        """Rules as layouts/conversions.yaml has them, where the three signs are explained."""
        by_way: dict[Way, Rules] = {}
        for left, right in rules.items():
            for way, rule in _ways(left, right):
                by_way[way] = (*by_way.get(way, ()), rule)
        return Conversion(by_way)

    def links(self, names: Iterable[str], sizes: Mapping[str, int]) -> list[Link]:
        """A link for each name and each rule that matches it."""
        renamings = [(way, Renaming(rules, sizes)) for way, rules in self.rules.items()]
        renamed = ((name, way, rename(name)) for name in names for way, rename in renamings)
        return [Link(name, other, way) for name, way, other in renamed if other is not None]


def _ways(left: str, right: str) -> Iterator[tuple[Way, tuple[Pattern, Pattern]]]:
    """Each way of a rule, with the names here and there; `{q+k+v+mlp*4}` are four tensors of seven ranges."""
    there = Pattern.parse(right.removesuffix(_TRANSPOSED).removesuffix(_SWAPPED))
    stacked = _STACKED.search(left)
    parts = [part.partition("*") for part in stacked[1].split("+")] if stacked else [("", "", "")]
    counts = [int(count or 1) for _, _, count in parts]
    for i, (part, _, _) in enumerate(parts):
        here = left[: stacked.start()] + part + left[stacked.end() :] if stacked else left
        way = Way(
            sum(counts[:i]), sum(counts), counts[i], right.endswith(_TRANSPOSED), right.endswith(_SWAPPED)
        )
        yield way, (Pattern.parse(here), there)
