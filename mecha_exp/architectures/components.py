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
    """The names inside a part, however a file prefixes them: what several configs have in common.

    Attributes:
        sizes: what the sizes in its patterns are where a component does not say otherwise.
        blocks: rules from names (`down.{0..3}.*`) to blocks (`IN{00..03}`).
        conventions: rules that go before `blocks` in a convention of that name.
        blocks_of: the layout whose blocks these are, under other names, instead of `blocks`.
        conversions: the rules to other layouts, by their names.
        symmetries: what can be exchanged inside without changing what the network computes.
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
        prefix: what the names of its keys begin with.
        keys: its keys, those of its layout first.
        layout: the layout that its names follow below the prefix, if it has one. Parts of the same name whose
            layouts are equal or convertible can be converted into each other.
        dots: what stands for the dots of the layout's names.
        aliases: how keys may begin, and how they begin instead in some files.
        optional: whether a whole model may lack it; or the names that it may lack.
        sizes: numbers for the layout's sizes.
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
        """The patterns of its layout and its own."""
        return (self.layout.keys if self.layout else ()) + self.keys

    @cached_property
    def beginnings(self) -> Beginnings:
        """Those of the keys that it must have."""
        required = (pattern for pattern in self.patterns if not pattern.optional)
        return tuple((len(pattern.shape), self.names_of_first(pattern)) for pattern in required)

    def names_of_first(self, pattern: KeyPattern) -> tuple[str, ...]:
        """What files may call the first key of one of its patterns."""
        own = self.full_name(pattern.names.first())
        return (own, *self.other_names(own), *(self.full_name(alias.first()) for alias in pattern.aliases))

    @property
    def all_symmetries(self) -> tuple[SymmetryRule, ...]:
        """The rules of its layout and its own."""
        return (self.layout.symmetries if self.layout else ()) + self.symmetries

    @property
    def all_conventions(self) -> tuple[str, ...]:
        """The conventions in which some of its blocks are others."""
        return (*self._inherited.conventions, *self.conventions)

    def block_rules(self, convention: str) -> Rules:
        """The rules that give its names, or those that its layout takes its blocks from, their blocks."""
        inherited = self._inherited
        usual = self.blocks + inherited.blocks
        return usual + inherited.conventions.get(convention, ()) + self.conventions.get(convention, ())

    @property
    def _inherited(self) -> Layout:
        """Where rules come from that it does not have itself."""
        nothing = Layout("", (), {})
        return nothing if self.blocks or self.layout is None else self.layout.blocks_of or self.layout

    def all_sizes(self, sizes: Mapping[str, int]) -> Mapping[str, int]:
        """The sizes that hold in it: its own before those of the model before those of the layout."""
        return {**(self.layout.sizes if self.layout else {}), **sizes, **self.sizes}

    def count(self, sizes: Mapping[str, int]) -> int:
        """How many keys it has."""
        own = self.all_sizes(sizes)
        return sum(key.names.count(own) for key in self.patterns)

    def full_name(self, name: str) -> str:
        """The key of one of its patterns' names."""
        return self.prefix + (name if self.dots == "." else name.replace(".", self.dots))

    def other_names(self, key: str) -> tuple[str, ...]:
        """What files may call the key instead."""
        found = (other + key[len(begin) :] for begin, other in self.aliases.items() if key.startswith(begin))
        return tuple(found)


def names_of(part: Component, sizes: Mapping[str, int]) -> Mapping[str, str]:
    """A component's names in its layout, and the keys that they are in the model."""
    own = part.all_sizes(sizes)
    return {name: part.full_name(name) for key in part.patterns for name in key.names.expand(own)}


def expand(identifier: str, part: Component, sizes: Mapping[str, int]) -> Mapping[str, KeyInfo]:
    own = part.all_sizes(sizes)
    lackable = part.optional if isinstance(part.optional, tuple) else ()
    optional = {part.full_name(name) for pattern in lackable for name in pattern.expand(own)}
    keys: dict[str, KeyInfo] = {}
    for pattern in part.patterns:
        shape = tuple(size if isinstance(size, int) else own[size] for size in pattern.shape)
        info = KeyInfo(shape, pattern.dtype, pattern.optional or part.optional is True)
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
    """The block of each of a component's names that some rule matches."""
    links = {name: name for name in names}
    layout = part.layout
    if layout is not None and layout.blocks_of is not None and not part.blocks:
        conversion = layout.conversions[layout.blocks_of.name]
        links = {link.here: link.there for link in conversion.links(links, sizes)}
    rename = Renaming(part.block_rules(convention), sizes)
    found = ((name, rename(other)) for name, other in links.items())
    return {name: block for name, block in found if block is not None}
