"""Model configs: the keys of an architecture as one format names them, in components and blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mecha_exp.architectures.blocks import blocks_by_rules, infer_blocks
from mecha_exp.architectures.patterns import Pattern
from mecha_exp.errors import ConfigError, did_you_mean

DEFAULT_CONVENTION = "sd-mecha"
"""Whose blocks are meant where projects disagree and nobody says otherwise."""


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
class Component:
    """A part of a model: `vae`, `clip_l`, `diffuser`.

    Attributes:
        prefix: what the names of its keys begin with.
        aliases: other prefixes that files have instead.
        optional: whether a whole model may lack it.
        layout: whose names its keys follow below the prefix; parts of one name and equal or convertible
            layouts can be converted into each other.
        blocks: rules from names below the prefix (`down.{0..3}.*`) to blocks (`IN{00..03}`); the longest
            match wins. Without rules blocks are inferred from numbered layers.
        conventions: rules that come before `blocks` in a convention of that name.
    """

    name: str
    prefix: str
    keys: tuple[KeyPattern, ...]
    aliases: tuple[str, ...] = ()
    optional: bool = False
    layout: str | None = None
    blocks: tuple[tuple[Pattern, Pattern], ...] = ()
    conventions: Mapping[str, tuple[tuple[Pattern, Pattern], ...]] | None = None


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
        return tuple(dict.fromkeys(self._block_of(convention).values()))

    def layers(self, convention: str = DEFAULT_CONVENTION) -> tuple[str, ...]:
        """The numbered blocks in the order of depth: what a gradient runs over."""
        return tuple(block for block in self.blocks(convention) if block[-1:].isdecimal())

    @property
    def conventions(self) -> tuple[str, ...]:
        """The names that `convention` may have."""
        named = (name for part in self.parts for name in part.conventions or ())
        return tuple(dict.fromkeys([DEFAULT_CONVENTION, *named]))

    def resolve_alias(self, key: str) -> str:
        """The config's own name of a key that a file may call otherwise; any other name as it is."""
        if key in self._keys:
            return key
        return self._aliases.get(key, key)

    def aliases(self) -> Mapping[str, str]:
        """Every alias, and the config's own name of its key."""
        return self._aliases

    @cached_property
    def _components(self) -> Mapping[str, Mapping[str, KeyInfo]]:
        return {part.name: _expand(self.identifier, part, self.sizes) for part in self.parts}

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
        blocks: dict[str, str] = {}
        for part in self.parts:
            keys = self._components[part.name]
            rules = (*part.blocks, *(part.conventions or {}).get(convention, ()))
            if rules:
                blocks |= blocks_by_rules(self.identifier, part.prefix, keys, rules, self.sizes)
            else:
                blocks |= infer_blocks(keys)
        return blocks

    def _unknown(self, key: str) -> ConfigError:
        return ConfigError(f"{self.identifier} has no key {key!r}.{did_you_mean(key, self._keys)}")


def _expand(identifier: str, part: Component, sizes: Mapping[str, int]) -> Mapping[str, KeyInfo]:
    keys: dict[str, KeyInfo] = {}
    expected = 0
    for pattern in part.keys:
        shape = tuple(size if isinstance(size, int) else sizes[size] for size in pattern.shape)
        info = KeyInfo(shape, pattern.dtype, pattern.optional or part.optional)
        names = pattern.names.expand(sizes)
        expected += len(names)
        if not pattern.aliases and not part.aliases:
            keys |= dict.fromkeys([part.prefix + name for name in names], info)
            continue
        others = [[alias for _, alias in pattern.names.pairs(alias, sizes)] for alias in pattern.aliases]
        for name, *aliases in zip(names, *others, strict=True):
            keys[part.prefix + name] = info._replace(aliases=tuple(_aliases(part, name, aliases)))
    if len(keys) < expected:
        twice = _first_twice(part, sizes)
        raise ConfigError(f"{identifier}: components.{part.name}.keys: {twice!r} is there twice.")
    return keys


def _aliases(part: Component, name: str, aliases: Iterable[str]) -> Iterable[str]:
    """Every other name below every prefix."""
    for prefix in (part.prefix, *part.aliases):
        for other in (name, *aliases):
            if (prefix, other) != (part.prefix, name):
                yield prefix + other


def _first_twice(part: Component, sizes: Mapping[str, int]) -> str:
    seen: set[str] = set()
    names = (name for pattern in part.keys for name in pattern.names.expand(sizes))
    return next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
