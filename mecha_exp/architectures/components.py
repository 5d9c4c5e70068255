"""Components of model configs, and the layouts of names that several configs share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from mecha_exp.architectures.keys import KeyInfo, KeyPattern
from mecha_exp.architectures.patterns import Pattern
from mecha_exp.architectures.rules import Conversion, Renaming, Rules
from mecha_exp.architectures.symmetries import SymmetryRule
from mecha_exp.errors import ConfigError

Beginnings: TypeAlias = Sequence[tuple[int, Sequence[str]]]
"""For each pattern of keys the number of dimensions, and the names of its first key in files."""


@dataclass(frozen=True)
class Layout:
    """The keys of a component without their prefix, shared by several configs.

    Attributes:
        sizes: the default values of the sizes in its patterns.
        blocks: rules from names (`down.{0..3}.*`) to blocks (`IN{00..03}`).
        conventions: rules that go before `blocks` in a convention of that name.
        blocks_of: the layout whose blocks hold, under converted names, instead of `blocks`.
        conversions: by the name of another layout the rules that lead to it.
        symmetries: exchanges of units that do not change what the network computes.
    """

    name: str
    keys: tuple[KeyPattern, ...]
    sizes: Mapping[str, int]
    blocks: Rules = ()
    conventions: Mapping[str, Rules] = field(default_factory=dict)
    blocks_of: Layout | None = None
    conversions: Mapping[str, Conversion] = field(default_factory=dict)
    symmetries: tuple[SymmetryRule, ...] = ()


@dataclass(frozen=True)
class Component:
    """A part of a model: `vae`, `clip_l`, `diffuser`.

    Attributes:
        prefix: the beginning of its keys.
        keys: its keys, those of its layout first.
        layout: the layout of its names below the prefix, or None. Components of the same name whose layouts
            are equal or convertible can be converted into each other.
        dots: the replacement of the dots in the layout's names.
        aliases: beginnings of keys, and what some files have in their place.
        optional: whether a complete model may lack it; or the names that may be missing.
        sizes: values for the layout's sizes.
        blocks: rules in place of those of the layout. Without any, blocks are inferred from numbered layers.
        conventions: rules that go before `blocks` in a convention of that name.
        symmetries: rules beside those of the layout.
    """

    name: str
    prefix: str = ""
    keys: tuple[KeyPattern, ...] = ()
    layout: Layout | None = None
    dots: str = "."
    aliases: Mapping[str, str] = field(default_factory=dict)
    optional: bool | tuple[Pattern, ...] = False
    sizes: Mapping[str, int] = field(default_factory=dict)
    blocks: Rules = ()
    conventions: Mapping[str, Rules] = field(default_factory=dict)
    symmetries: tuple[SymmetryRule, ...] = ()

    @property
    def patterns(self) -> tuple[KeyPattern, ...]:
        """All patterns of keys: those of the layout, then its own."""
        return (self.layout.keys if self.layout else ()) + self.keys

    @cached_property
    def beginnings(self) -> Beginnings:
        """The first keys of all patterns that are not optional."""
        required = (pattern for pattern in self.patterns if not pattern.optional)
        return tuple((len(pattern.shape), self.names_of_first(pattern)) for pattern in required)

    def names_of_first(self, pattern: KeyPattern) -> tuple[str, ...]:
        """The names in files of the first key of a pattern."""
        own = self.full_name(pattern.names.first())
        return (own, *self.other_names(own), *(self.full_name(alias.first()) for alias in pattern.aliases))

    @property
    def all_symmetries(self) -> tuple[SymmetryRule, ...]:
        """All rules of symmetry: those of the layout, then its own."""
        return (self.layout.symmetries if self.layout else ()) + self.symmetries

    @property
    def all_conventions(self) -> tuple[str, ...]:
        """The conventions that assign some keys to other blocks."""
        return (*self._inherited.conventions, *self.conventions)

    def block_rules(self, convention: str) -> Rules:
        """The rules from names to blocks; for `blocks_of`, from the names of that layout."""
        inherited = self._inherited
        usual = self.blocks + inherited.blocks
        return usual + inherited.conventions.get(convention, ()) + self.conventions.get(convention, ())

    @property
    def _inherited(self) -> Layout:
        """The layout whose block rules the component inherits; an empty one if it has rules."""
        nothing = Layout("", (), {})
        return nothing if self.blocks or self.layout is None else self.layout.blocks_of or self.layout

    def all_sizes(self, sizes: Mapping[str, int]) -> Mapping[str, int]:
        """The sizes in effect: its own override the model's, which override the layout's."""
        return {**(self.layout.sizes if self.layout else {}), **sizes, **self.sizes}

    def count(self, sizes: Mapping[str, int]) -> int:
        """The number of keys."""
        own = self.all_sizes(sizes)
        return sum(key.names.count(own) for key in self.patterns)

    def full_name(self, name: str) -> str:
        """The key of a name in the layout: with the prefix, and its dots replaced."""
        return self.prefix + (name if self.dots == "." else name.replace(".", self.dots))

    def other_names(self, key: str) -> tuple[str, ...]:
        """The other names of a key in files."""
        aliases = self.aliases.items()
        return tuple(other + key[len(begin) :] for begin, other in aliases if key.startswith(begin))


def names_of(part: Component, sizes: Mapping[str, int]) -> Mapping[str, str]:
    """The keys of a component by their names in its layout."""
    own = part.all_sizes(sizes)
    return {name: part.full_name(name) for key in part.patterns for name in key.names.expand(own)}


def expand(identifier: str, part: Component, sizes: Mapping[str, int]) -> Mapping[str, KeyInfo]:
    """Every key of a component; ConfigError where two patterns have the same key."""
    own = part.all_sizes(sizes)
    patterns = part.optional if isinstance(part.optional, tuple) else ()
    optional = {part.full_name(name) for pattern in patterns for name in pattern.expand(own)}
    keys: dict[str, KeyInfo] = {}
    for pattern in part.patterns:
        shape = tuple(size if isinstance(size, int) else own[size] for size in pattern.shape)
        optional_here = pattern.optional or part.optional is True
        info = KeyInfo(shape, pattern.dtype, optional_here, stacked=pattern.stacked)
        names = [part.full_name(name) for name in pattern.names.expand(own)]
        twice = next((name for name in names if name in keys), None)
        if twice is not None:
            raise ConfigError(f"{identifier}: components.{part.name}.keys: {twice!r} is there twice.")
        keys |= dict.fromkeys(names, info)
        for aliases in pattern.aliases:
            for name, alias in zip(names, aliases.expand(own), strict=True):
                keys[name] = keys[name]._replace(aliases=(*keys[name].aliases, part.full_name(alias)))
    for key in optional & keys.keys():
        keys[key] = keys[key]._replace(optional=True)
    if part.aliases:
        for key, info in keys.items():
            others = [other for name in (key, *info.aliases) for other in part.other_names(name)]
            keys[key] = info._replace(aliases=(*info.aliases, *others))
    return keys


def blocks_by_rules(
    part: Component, names: Iterable[str], sizes: Mapping[str, int], convention: str
) -> dict[str, str]:
    """The block of every name of a component that a rule matches."""
    links = {name: name for name in names}
    layout = part.layout
    if layout is not None and layout.blocks_of is not None and not part.blocks:
        conversion = layout.conversions[layout.blocks_of.name]
        links = {link.here: link.there for link in conversion.links(links, sizes)}
    rename = Renaming(part.block_rules(convention), sizes)
    blocks = ((name, rename(other)) for name, other in links.items())
    return {name: block for name, block in blocks if block is not None}
