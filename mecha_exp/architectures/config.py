"""Model configs: the keys of an architecture as one format names them, in components and blocks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property

from mecha_exp.architectures.blocks import in_order, infer_blocks
from mecha_exp.architectures.components import Component, blocks_by_rules, expand, names_of
from mecha_exp.architectures.keys import KeyInfo
from mecha_exp.architectures.symmetries import Symmetry, SymmetryRule
from mecha_exp.errors import ConfigError, did_you_mean

DEFAULT_CONVENTION = "sd-mecha"
"""The block convention that holds where projects disagree and none is named."""


class ModelConfig:
    """The named set of keys of an architecture and format, such as `sdxl-sgm`.

    Cheap to make: patterns are expanded at the first use, and the result is kept.

    Attributes:
        identifier: `architecture-implementation`.
        parts: its components, unexpanded.
        sizes: values of the names in shapes and ranges. A config with sizes describes a family (any depth and
            width); `detect` finds those of a file, `with_sizes` sets them.
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
        """The first part of the identifier: `sdxl` of `sdxl-sgm`."""
        return self.identifier.partition("-")[0]

    @property
    def implementation(self) -> str:
        """The project that named the keys: `sgm` of `sdxl-sgm`."""
        return self.identifier.partition("-")[2]

    def with_sizes(self, sizes: Mapping[str, int]) -> ModelConfig:
        """The member of the family that has these sizes."""
        return ModelConfig(self.identifier, self.parts, {**self.sizes, **sizes}) if sizes else self

    def sized_like(self, other: ModelConfig) -> ModelConfig:
        """The member of the family that has the sizes which another config names, too."""
        return self.with_sizes({name: other.sizes[name] for name in self.sizes.keys() & other.sizes.keys()})

    def components(self) -> Mapping[str, Mapping[str, KeyInfo]]:
        """The keys of each component."""
        return self._components

    def keys(self) -> Mapping[str, KeyInfo]:
        """Every key, with its prefix."""
        return self._keys

    def component_of(self, key: str) -> str:
        """The component of a key; ConfigError for a key that is not in the config."""
        try:
            return self._component_of[self.resolve_alias(key)]
        except KeyError:
            raise self._unknown(key) from None

    def block_of(self, key: str, convention: str = DEFAULT_CONVENTION) -> str:
        """The block of a key; ConfigError for a key that is not in the config.

        Projects assign a few layers to different blocks: `convention` chooses the project.
        """
        try:
            return self._block_of(convention)[self.resolve_alias(key)]
        except KeyError:
            raise self._unknown(key) from None

    def blocks(self, convention: str = DEFAULT_CONVENTION) -> tuple[str, ...]:
        """Every block, in the order of the model."""
        used = set(self._block_of(convention).values())
        named = (block for part in self.parts for block in self._named_blocks(part, convention))
        return tuple(dict.fromkeys(block for block in named if block in used))

    def layers(self, convention: str = DEFAULT_CONVENTION) -> tuple[str, ...]:
        """The numbered blocks in the order of depth: a gradient runs over them."""
        return tuple(block for block in self.blocks(convention) if block[-1:].isdecimal())

    @property
    def conventions(self) -> tuple[str, ...]:
        """The names of all block conventions."""
        named = (name for part in self.parts for name in part.all_conventions)
        return tuple(dict.fromkeys([DEFAULT_CONVENTION, *named]))

    def resolve_alias(self, key: str) -> str:
        """The config's name of a key that a file may name otherwise; an unknown name as it is."""
        if key in self._keys:
            return key
        return self._aliases.get(key, key)

    def info_of(self, key: str) -> KeyInfo | None:
        """What the config says about a key, under any of its names; None for a key that it does not have."""
        return self.keys().get(self.resolve_alias(key))

    def aliases(self) -> Mapping[str, str]:
        """The config's name of the key, by alias."""
        return self._aliases

    def symmetries(self, keys: Collection[str] | None = None) -> tuple[Symmetry, ...]:
        """Exchanges of units that do not change what the network computes.

        Args:
            keys: the keys of a file, whose names the result has; None: all keys of the config.

        Raises:
            ConfigError: a rule does not fit the keys.
        """
        if keys is None:
            return self._symmetries
        names = {self.resolve_alias(key): key for key in keys}
        optional = {key for key, info in self._keys.items() if info.optional}
        present = (symmetry.among(names, optional) for symmetry in self._symmetries)
        return tuple(symmetry for symmetry in present if symmetry is not None)

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of all that the config says: keys with their fields, components, blocks, symmetries.

        Equal for equal configs, whatever patterns they were written with.
        """
        blocks = {name: dict(self._block_of(name)) for name in self.conventions}
        symmetries = [repr(symmetry) for symmetry in self.symmetries()]
        keys = {key: [*info[:4], self._component_of[key]] for key, info in self._keys.items()}
        stacks = {key: info.stacked for key, info in self._keys.items() if info.stacked is not None}
        content = [self.identifier, keys, blocks, symmetries, *([stacks] if stacks else [])]
        text = json.dumps(content, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def _symmetries(self) -> tuple[Symmetry, ...]:
        return tuple(
            symmetry
            for part in self.parts
            for rule in part.all_symmetries
            for symmetry in self._symmetries_by(rule, part)
        )

    def _symmetries_by(self, rule: SymmetryRule, part: Component) -> list[Symmetry]:
        """The symmetries of a component by one rule; none where a layout's rule does not fit other sizes."""
        try:
            return list(
                rule.symmetries(part.full_name, self._components[part.name], part.all_sizes(self.sizes))
            )
        except ConfigError as error:
            if rule not in part.symmetries:
                return []
            where = f"{self.identifier}: components.{part.name}.symmetries['{rule.below}']"
            raise ConfigError(f"{where}: {error}") from None

    @cached_property
    def _components(self) -> Mapping[str, Mapping[str, KeyInfo]]:
        return {part.name: expand(self.identifier, part, self.sizes) for part in self.parts}

    @cached_property
    def _named(self) -> Mapping[str, Mapping[str, str]]:
        """The keys by their names in the layout, for each component."""
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
            unmatched = next(key for name, key in named.items() if name not in blocks)
            raise ConfigError(
                f"{self.identifier}: components.{part.name}.blocks: no rule matches {unmatched!r}. "
                "Add one for '*', the rest."
            )
        return ((named[name], block) for name, block in blocks.items())

    def _named_blocks(self, part: Component, convention: str) -> Iterable[str]:
        """A component's blocks, in the order of its rules or of its numbered layers."""
        rules = part.block_rules(convention)
        if rules:
            return (block for _, right in rules for block in right.expand(part.all_sizes(self.sizes)))
        return in_order(infer_blocks(self._named[part.name].values()).values())

    def _unknown(self, key: str) -> ConfigError:
        return ConfigError(f"{self.identifier} has no key {key!r}.{did_you_mean(key, self._keys)}")
