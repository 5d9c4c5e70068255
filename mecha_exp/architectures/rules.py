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
_TRANSPOSED = "^T"


@dataclass(frozen=True, slots=True)
class Link:
    """A tensor of one layout, as a tensor of another or as the `index`-th of its `of` equal ranges of rows.

    Attributes:
        transposed: whether rows and columns change places.
    """

    here: str
    there: str
    index: int = 0
    of: int = 1
    transposed: bool = False


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
    """The change of a tensor that a conversion makes besides its name."""

    index: int = 0
    of: int = 1
    transposed: bool = False


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
        return [
            Link(name, other, way.index, way.of, way.transposed)
            for name, way, other in renamed
            if other is not None
        ]


def _ways(left: str, right: str) -> Iterator[tuple[Way, tuple[Pattern, Pattern]]]:
    there = Pattern.parse(right.removesuffix(_TRANSPOSED))
    stacked = _STACKED.search(left)
    parts = stacked[1].split("+") if stacked else [""]
    for i, part in enumerate(parts):
        here = left[: stacked.start()] + part + left[stacked.end() :] if stacked else left
        yield Way(i, len(parts), right.endswith(_TRANSPOSED)), (Pattern.parse(here), there)
