"""Symmetries: exchanges of units in a network that do not change what it computes.

    mlp:                                             # below each of these names, which may be a brace pattern
      - {rows: "fc1.{weight,bias}", columns: fc2.weight}
    self_attn:
      - {head: 64, rows: ["q_proj.{weight,bias}", "k_proj.{weight,bias}"]}
      - {head: 64, rows: "v_proj.{weight,bias}", columns: out_proj.weight}

Each entry is a rule. The units of a hidden layer are rows of the tensors that make it and columns of those
that read it; they may change places if they do so everywhere. `in_proj_weight 2/3` is the second of three
equal parts. In attention the units of one head belong together: `head` is how many those are. Between the two
sides of such a rule there is nothing but a product, so any invertible matrix of a head on one side cancels
with its inverse on the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from mecha_exp.architectures.keys import KeyInfo
from mecha_exp.architectures.patterns import Pattern
from mecha_exp.errors import ConfigError, did_you_mean

OUTPUTS = " (outputs)"
"""The end of the name of what a layer gives; what it receives has the key of its weight alone."""

_PART = re.compile(r"(.*\S) +(\d+)/(\d+)")


class AxisSlice(NamedTuple):
    """The position of a symmetry's units in a tensor: along an axis, from an index on."""

    key: str
    axis: int
    start: int


@dataclass(frozen=True)
class Symmetry:
    """Units that may be permuted, in all of their tensors at once.

    Attributes:
        heads: the number of groups of successive units; units stay in their group.
        width: the number of units of a head; all units where there are no heads.
        sides: slices of tensors, grouped by what belongs together: a weight and its bias.
        linear: whether only products of the two sides matter, so that any invertible matrix may be between.
    """

    heads: int
    width: int
    sides: tuple[tuple[AxisSlice, ...], ...]
    linear: bool = False

    @property
    def places(self) -> tuple[AxisSlice, ...]:
        """The slices of all sides."""
        return tuple(place for side in self.sides for place in side)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of all its tensors."""
        return tuple(dict.fromkeys(place.key for place in self.places))

    @property
    def activations(self) -> tuple[tuple[str, int], ...]:
        """Where the units are seen at work: names of activations, and the first unit's place among them.

        They are the inputs of the layers that read the units. Queries and keys meet in a product and no layer
        reads them: what the layers that make them give.
        """
        inputs = tuple((place.key, place.start) for place in self.places if place.axis == 1)
        return inputs or tuple((place.key + OUTPUTS, place.start) for place in self.places)

    def among(self, names: Mapping[str, str], optional: Collection[str]) -> Symmetry | None:
        """The symmetry of a file that may lack keys; None where it lacks one that is not optional.

        Args:
            names: the file's names of the keys that it has.
            optional: keys that the symmetry does not need, such as biases.
        """
        missing = [key for key in self.keys if key not in names]
        if not all(key in optional for key in missing):
            return None
        sides = tuple(
            tuple(place._replace(key=names[place.key]) for place in side if place.key in names)
            for side in self.sides
        )
        return replace(self, sides=sides) if all(sides) else None


@dataclass(frozen=True, slots=True)
class Side:
    """The tensors of one side of a rule: a pattern, and the `index`-th of their `of` equal parts."""

    names: Pattern
    axis: int
    index: int = 1
    of: int = 1

    @staticmethod
    def parse(text: str, axis: int) -> Side:
        """Parse `in_proj_weight 2/3`; ConfigError where the part does not exist."""
        match = _PART.fullmatch(text)
        if match is None:
            return Side(Pattern.parse(text), axis)
        index, of = int(match[2]), int(match[3])
        if not 1 <= index <= of:
            raise ConfigError(f"{text!r}: there is no part {index} of {of}. Parts are counted from 1.")
        return Side(Pattern.parse(match[1]), axis, index, of)

    def __str__(self) -> str:
        return str(self.names) if self.of == 1 else f"{self.names} {self.index}/{self.of}"

    def slices(self, names: Iterable[str], keys: Mapping[str, KeyInfo]) -> tuple[int, tuple[AxisSlice, ...]]:
        """The number of units, and where they are in the tensors of these names."""
        lengths, slices = set(), []
        for name in names:
            if name not in keys:
                raise ConfigError(f"there is no key {name!r}.{did_you_mean(name, keys)}")
            shape = keys[name].shape
            if len(shape) <= self.axis or shape[self.axis] % self.of:
                lacking = f"{self.of} equal parts" if len(shape) > self.axis else "columns"
                raise ConfigError(f"{name!r} of shape {list(shape)} has no {lacking}")
            length = shape[self.axis] // self.of
            lengths.add(length)
            slices.append(AxisSlice(name, self.axis, (self.index - 1) * length))
        if len(lengths) > 1:
            raise ConfigError(f"the tensors of '{self}' have different numbers of units: {sorted(lengths)}")
        return lengths.pop(), tuple(slices)


@dataclass(frozen=True, slots=True)
class SymmetryRule:
    """A rule that describes several symmetries.

    Attributes:
        below: the modules that hold the tensors; one symmetry for each. It may be empty.
        sides: its tensors: rows are along axis 0, columns along axis 1.
        head: the number of units of a head; None where there are no heads.
    """

    below: Pattern
    sides: tuple[Side, ...]
    head: int | None = None

    def symmetries(
        self, full_name: Callable[[str], str], keys: Mapping[str, KeyInfo], sizes: Mapping[str, int]
    ) -> Iterator[Symmetry]:
        """The symmetries of a component that has these keys.

        Args:
            full_name: (name in the rule) -> the key.

        Raises:
            ConfigError: a key that does not exist, sizes that differ or do not divide.
        """
        for module in self.below.expand(sizes):
            prefix = f"{module}." if module else ""
            names = [
                [full_name(prefix + tensor) for tensor in side.names.expand(sizes)] for side in self.sides
            ]
            slices = [side.slices(of_side, keys) for side, of_side in zip(self.sides, names, strict=True)]
            lengths = {length for length, _ in slices}
            if len(lengths) > 1:
                raise ConfigError(f"its tensors have different numbers of units: {sorted(lengths)}")
            (length,) = lengths
            width = self.head or length
            if length % width:
                raise ConfigError(f"{length} units are not a whole number of heads of {width}")
            sides = tuple(side for _, side in slices)
            yield Symmetry(length // width, width, sides, linear=self.head is not None)


def linked(symmetries: Iterable[Symmetry]) -> list[tuple[Symmetry, ...]]:
    """Group symmetries that share a tensor, directly or through others."""
    groups: dict[str, list[Symmetry]] = {}
    for symmetry in symmetries:
        touched = {id(groups[key]): groups[key] for key in symmetry.keys if key in groups}
        joined = [*(member for group in touched.values() for member in group), symmetry]
        groups |= {key: joined for member in joined for key in member.keys}
    return [tuple(group) for group in {id(group): group for group in groups.values()}.values()]
