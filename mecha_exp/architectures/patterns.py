"""Brace patterns: many names written as one.

    {q,k,v}          alternatives, which may be empty and may hold braces themselves
    {0..11}          a range, both ends included; {00..11} keeps the zeros
    {0..layers-1}    a range whose end is a size, known once a model is at hand

Groups multiply: `layers.{0..11}.{q,k,v}_proj` is 36 names, the last group changing fastest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from mecha_exp.errors import ConfigError

MAX_NAMES = 100_000
"""The most names of one pattern: no model has as many keys, and a slip such as {0..99999999} is caught."""

_RANGE = re.compile(r"(\d+)\.\.(?:(\d+)|([a-z_]\w*)(?:-(\d+))?)")
NO_SIZES: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from `start` to `last`, or to a size minus `last`; zeros fill them to `width` digits."""

    start: int
    last: int
    size: str | None
    width: int

    def names(self, sizes: Mapping[str, int]) -> list[str]:
        last = self.last if self.size is None else sizes[self.size] - self.last
        if last - self.start >= MAX_NAMES:
            raise ConfigError(f"the range {self.start}..{last} is longer than {MAX_NAMES:,}.")
        return [str(number).zfill(self.width) for number in range(self.start, last + 1)]

    def first(self) -> str:
        return str(self.start).zfill(self.width)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several patterns."""

    options: tuple[Pattern, ...]

    def names(self, sizes: Mapping[str, int]) -> list[str]:
        return [name for option in self.options for name in option.expand(sizes)]

    def first(self) -> str:
        return self.options[0].first()


@dataclass(frozen=True)
class Pattern:
    """A brace pattern, taken apart: texts and groups in turn.

    >>> Pattern.parse("layers.{0..1}.{q,k}").expand()
    ['layers.0.q', 'layers.0.k', 'layers.1.q', 'layers.1.k']

    Raises:
        ConfigError: braces that do not match, a range that runs backwards, more than MAX_NAMES names.
    """

    text: str
    pieces: tuple[str | Range | Choice, ...]

    @staticmethod
    def parse(text: str) -> Pattern:
        """Take a pattern apart."""
        pieces, end = _parse(text, 0, nested=False)
        if end < len(text):
            raise ConfigError(f"{text!r} has a '}}' at {end + 1} that closes nothing.")
        return Pattern(text, pieces)

    def __str__(self) -> str:
        return self.text

    @cached_property
    def sizes(self) -> frozenset[str]:
        """The names of the sizes that its ranges end at."""
        nested = [o for piece in self._groups if isinstance(piece, Choice) for o in piece.options]
        own = {piece.size for piece in self._groups if isinstance(piece, Range) and piece.size}
        return frozenset(own.union(*(option.sizes for option in nested)))

    @property
    def _groups(self) -> list[Range | Choice]:
        return [piece for piece in self.pieces if not isinstance(piece, str)]

    def expand(self, sizes: Mapping[str, int] = NO_SIZES) -> list[str]:
        """Every name of the pattern."""
        return ["".join(parts) for parts in product(*self._parts(sizes))]

    def count(self, sizes: Mapping[str, int] = NO_SIZES) -> int:
        """The number of names, without making them."""
        return math.prod(len(piece.names(sizes)) for piece in self._groups)

    def first(self) -> str:
        """The first name; an open range starts at its first number."""
        return "".join(piece if isinstance(piece, str) else piece.first() for piece in self.pieces)

    def pairs(self, other: Pattern, sizes: Mapping[str, int] = NO_SIZES) -> Iterator[tuple[str, str]]:
        """Each name with its counterpart in `other`: group by group, alternative by alternative.

        A pattern `other` without groups is the counterpart of every name.

        >>> list(Pattern.parse("down.{0,1}.{a,b}").pairs(Pattern.parse("{2,3}/{x,y}")))
        [('down.0.a', '2/x'), ('down.0.b', '2/y'), ('down.1.a', '3/x'), ('down.1.b', '3/y')]
        """
        names = self.expand(sizes)
        if not other._groups:
            yield from ((name, other.text) for name in names)
            return
        mine = [len(piece.names(sizes)) for piece in self._groups]
        theirs = [len(piece.names(sizes)) for piece in other._groups]
        if mine != theirs:
            raise ConfigError(
                f"{self.text!r} and {other.text!r} do not correspond: groups of {mine} and of {theirs} "
                "alternatives. Each group on the left needs one of the same length on the right."
            )
        yield from zip(names, other.expand(sizes), strict=True)

    def _parts(self, sizes: Mapping[str, int]) -> list[list[str]]:
        parts = [[piece] if isinstance(piece, str) else piece.names(sizes) for piece in self.pieces]
        if math.prod(map(len, parts)) > MAX_NAMES:
            raise ConfigError(f"{self.text!r} stands for more than {MAX_NAMES:,} names.")
        return parts


def _parse(text: str, at: int, nested: bool) -> tuple[tuple[str | Range | Choice, ...], int]:
    """The pieces from `at` to the end, or when nested to the comma or brace that ends the alternative."""
    pieces: list[str | Range | Choice] = []
    literal = at
    while at < len(text) and text[at] != "}" and not (nested and text[at] == ","):
        if text[at] != "{":
            at += 1
            continue
        if at > literal:
            pieces.append(text[literal:at])
        group, at = _group(text, at)
        pieces.append(group)
        literal = at
    if at > literal:
        pieces.append(text[literal:at])
    return tuple(pieces), at


def _group(text: str, start: int) -> tuple[Range | Choice, int]:
    match = _RANGE.match(text, start + 1)
    if match and text[match.end() : match.end() + 1] == "}":
        return _range(text, match), match.end() + 1
    options: list[Pattern] = []
    at = start
    while at < len(text) and text[at] != "}":  # at the brace or at the comma before an alternative
        begin = at + 1
        pieces, at = _parse(text, begin, nested=True)
        options.append(Pattern(text[begin:at], pieces))
    if at >= len(text):
        raise ConfigError(f"{text!r} has a '{{' at {start + 1} that is never closed.")
    if len(options) == 1:
        raise ConfigError(
            f"{text!r}: {text[start : at + 1]} is neither alternatives, as {{q,k,v}}, nor a range, as "
            "{0..11} or {0..layers-1}."
        )
    return Choice(tuple(options)), at + 1


def _range(text: str, match: re.Match[str]) -> Range:
    first, last, size, less = match.groups()
    padded = len(first) > 1 and first.startswith("0")
    width = len(first) if padded else 0
    if size is not None:
        return Range(int(first), int(less or 0), size, width)
    if int(last) < int(first):
        raise ConfigError(f"{text!r}: the range {first}..{last} runs backwards.")
    return Range(int(first), int(last), None, width)
