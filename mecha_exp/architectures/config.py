"""Model configs: the keys of an architecture as one format names them, in components and blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeAlias

from mecha_exp.architectures.blocks import in_order, infer_blocks
from mecha_exp.architectures.patterns import Pattern
from mecha_exp.architectures.rules import Conversion, Renaming, Rules
from mecha_exp.architectures.symmetries import Symmetry, SymmetryRule
from mecha_exp.errors import ConfigError, did_you_mean

DEFAULT_CONVENTION = "sd-mecha"
"""Whose blocks are meant where projects disagree and nobody says otherwise."""


Beginnings: TypeAlias = Sequence[tuple[int, Sequence[str]]]
"""Of patterns of keys the number of dimensions, and what files may call the first key."""


class KeyInfo(NamedTuple):
    """What a config says of a key.

    Attributes:
        shape: the sizes.
        dtype: how it is usually stored, by torch's name: `float32`.
        optional: whether a file of this config may lack it.
        aliases: other names under which files have it.
    """

    shape: tuple[int, ...]
    dtype: str
    optional: bool = False
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KeyPattern:
    """Keys that are written as one: a brace pattern, without the component's prefix.

    Attributes:
        shape: numbers, and names of sizes that are inferred from a file.
        aliases: patterns whose groups correspond to those of `names`.
    """

    names: Pattern
    shape: tuple[int | str, ...]
    dtype: str
    optional: bool = False
    aliases: tuple[Pattern, ...] = ()


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


class ModelConfig:
    """The named set of keys of an architecture and format, such as `sdxl-sgm`.

    Cheap to make: what its patterns stand for is worked out when it is first asked for, and kept.

    Attributes:
        identifier: `architecture-implementation`.
        parts: its components, unexpanded.
        sizes: the numbers that names in shapes and ranges stand for. A config with sizes describes a family
            (any depth and width); `detect` finds those of a file, `with_sizes` sets them.
    """

    def __init__(
        self, identifier: str, parts: Sequence[Component], sizes: Mapping[str, int] | None = None
    ) -> None:
        self.identifier = identifier
        self.parts = tuple(parts)
        self.sizes = dict(sizes or {})

    def __repr__(self) -> str:
        return f"<model config '{self.identifier}'>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModelConfig):
            return NotImplemented
        return self.identifier == other.identifier and self.sizes == other.sizes

    def __hash__(self) -> int:
        return hash((self.identifier, *self.sizes.items()))

    @property
    def architecture(self) -> str:
        """What the model is: `sdxl` of `sdxl-sgm`."""
        return self.identifier.partition("-")[0]

    @property
    def implementation(self) -> str:
        """Whose names the keys have: `sgm` of `sdxl-sgm`."""
        return self.identifier.partition("-")[2]

    def with_sizes(self, sizes: Mapping[str, int]) -> ModelConfig:
        """The member of the family that has these sizes."""
        return ModelConfig(self.identifier, self.parts, {**self.sizes, **sizes}) if sizes else self

    def components(self) -> Mapping[str, Mapping[str, KeyInfo]]:
        """The keys of each component."""
        return self._components

    def keys(self) -> Mapping[str, KeyInfo]:
        """Every key, with its prefix."""
        return self._keys

    def component_of(self, key: str) -> str:
        """The component that a key belongs to; ConfigError for a key that is not in the config."""
        try:
            return self._component_of[self.resolve_alias(key)]
        except KeyError:
            raise self._unknown(key) from None

    def block_of(self, key: str, convention: str = DEFAULT_CONVENTION) -> str:
        """The block that a key belongs to; ConfigError for a key that is not in the config.

        Projects disagree on where a few layers belong: `convention` says whose rules hold.
        """
        try:
            return self._block_of(convention)[self.resolve_alias(key)]
        except KeyError:
            raise self._unknown(key) from None

    def blocks(self, convention: str = DEFAULT_CONVENTION) -> tuple[str, ...]:
        """Every block, in the order of the model."""
        found = set(self._block_of(convention).values())
        named = (block for part in self.parts for block in self._named_blocks(part, convention))
        return tuple(dict.fromkeys(block for block in named if block in found))

    def layers(self, convention: str = DEFAULT_CONVENTION) -> tuple[str, ...]:
        """The numbered blocks in the order of depth: what a gradient runs over."""
        return tuple(block for block in self.blocks(convention) if block[-1:].isdecimal())

    @property
    def conventions(self) -> tuple[str, ...]:
        """The names that `convention` may have."""
        named = (name for part in self.parts for name in part.all_conventions)
        return tuple(dict.fromkeys([DEFAULT_CONVENTION, *named]))

    def resolve_alias(self, key: str) -> str:
        """The config's own name of a key that a file may call otherwise; any other name as it is."""
        if key in self._keys:
            return key
        return self._aliases.get(key, key)

    def aliases(self) -> Mapping[str, str]:
        """Every alias, and the config's own name of its key."""
        return self._aliases

    def symmetries(self, keys: Collection[str] | None = None) -> tuple[Symmetry, ...]:
        """What can be exchanged inside without changing what a network computes.

        Args:
            keys: those that a file has, which then are named as it names them; None: all keys.

        Raises:
            ConfigError: a rule does not fit the keys.
        """
        if keys is None:
            return self._symmetries
        names = {self.resolve_alias(key): key for key in keys}
        optional = {key for key, info in self._keys.items() if info.optional}
        found = (symmetry.among(names, optional) for symmetry in self._symmetries)
        return tuple(symmetry for symmetry in found if symmetry is not None)

    @cached_property
    def _symmetries(self) -> tuple[Symmetry, ...]:
        return tuple(
            symmetry
            for part in self.parts
            for rule in part.all_symmetries
            for symmetry in self._symmetries_by(rule, part)
        )

    def _symmetries_by(self, rule: SymmetryRule, part: Component) -> list[Symmetry]:
        """What a rule says of a component; nothing where it is a layout's and does not fit other sizes."""
        try:
            return list(rule.symmetries(part, self._components[part.name], part.all_sizes(self.sizes)))
        except ConfigError as error:
            if rule not in part.symmetries:
                return []
            where = f"{self.identifier}: components.{part.name}.symmetries['{rule.below}']"
            raise ConfigError(f"{where}: {error}") from None

    @cached_property
    def _components(self) -> Mapping[str, Mapping[str, KeyInfo]]:
        return {part.name: _expand(self.identifier, part, self.sizes) for part in self.parts}

    @cached_property
    def _named(self) -> Mapping[str, Mapping[str, str]]:
        """For each component its keys by their names in its layout."""
        return {part.name: names_of(part, self.sizes) for part in self.parts}

    @cached_property
    def _keys(self) -> Mapping[str, KeyInfo]:
        keys: dict[str, KeyInfo] = {}
        for component in self._components.values():
            keys |= component
        if len(keys) < sum(map(len, self._components.values())):
            raise ConfigError(f"{self.identifier}: two components have the same key.")
        return keys

    @cached_property
    def _component_of(self) -> Mapping[str, str]:
        return {key: name for name, keys in self._components.items() for key in keys}

    @cached_property
    def _aliases(self) -> Mapping[str, str]:
        return {alias: key for key, info in self._keys.items() for alias in info.aliases}

    @cached_property
    def _blocks(self) -> dict[str, Mapping[str, str]]:
        return {}

    def _block_of(self, convention: str) -> Mapping[str, str]:
        if convention not in self._blocks:
            if convention not in self.conventions:
                raise ConfigError(
                    f"{self.identifier} has no block convention {convention!r}."
                    f"{did_you_mean(convention, self.conventions)}"
                )
            self._blocks[convention] = self._assign_blocks(convention)
        return self._blocks[convention]

    def _assign_blocks(self, convention: str) -> Mapping[str, str]:
        return {key: block for part in self.parts for key, block in self._part_blocks(part, convention)}

    def _part_blocks(self, part: Component, convention: str) -> Iterable[tuple[str, str]]:
        named = self._named[part.name]
        if not part.block_rules(convention):
            return infer_blocks(named.values()).items()
        blocks = blocks_by_rules(part, named, part.all_sizes(self.sizes), convention)
        if len(blocks) < len(named):
            lacking = next(key for name, key in named.items() if name not in blocks)
            raise ConfigError(
                f"{self.identifier}: components.{part.name}.blocks: no rule matches {lacking!r}. "
                "Add one for '*', the rest."
            )
        return ((named[name], block) for name, block in blocks.items())

    def _named_blocks(self, part: Component, convention: str) -> Iterable[str]:
        """A component's blocks in their order: that of its rules, or of its numbered layers."""
        rules = part.block_rules(convention)
        if rules:
            return (block for _, right in rules for block in right.expand(part.all_sizes(self.sizes)))
        return in_order(infer_blocks(self._named[part.name].values()).values())

    def _unknown(self, key: str) -> ConfigError:
        return ConfigError(f"{self.identifier} has no key {key!r}.{did_you_mean(key, self._keys)}")


def names_of(part: Component, sizes: Mapping[str, int]) -> Mapping[str, str]:
    """A component's names in its layout, and the keys that they are in the model."""
    own = part.all_sizes(sizes)
    return {name: part.full_name(name) for key in part.patterns for name in key.names.expand(own)}


def _expand(identifier: str, part: Component, sizes: Mapping[str, int]) -> Mapping[str, KeyInfo]:
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
