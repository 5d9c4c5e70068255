"""The component, the block and the depth of every key of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from mecha_exp.architectures import DEFAULT_CONVENTION, ModelConfig, StructuralConfig, detect
from mecha_exp.architectures.blocks import blocks_beside, in_order, stack_and_number
from mecha_exp.architectures.keys import HasShape, is_stack
from mecha_exp.errors import ConfigError
from mecha_exp.families import AFTER_LAYERS, BEFORE_LAYERS, is_embedding, shared_words, token_tables

_OUTSIDE = ("BASE", "VAE")
"""Blocks of Stable Diffusion that are neither before nor after the others."""


@dataclass(frozen=True, eq=False)
class Anatomy:
    """The parts of one model.

    Attributes:
        infos: the shape of each of its keys.
        config: its config.
        convention: the block convention, where projects disagree.
    """

    infos: Mapping[str, HasShape] = field(repr=False)
    config: ModelConfig = field(repr=False)
    convention: str = DEFAULT_CONVENTION

    @staticmethod
    def of(model: Mapping[str, HasShape], convention: str = DEFAULT_CONVENTION) -> Anatomy:
        """The anatomy of a model, by its keys and shapes.

        Raises:
            ConfigError: the config has no such convention.
        """
        try:
            config = detect(model).config
        except ConfigError:  # several configs fit
            config = StructuralConfig(model)
        config.blocks(convention)
        return Anatomy(dict(model), config, convention)

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The keys of the model, in its order."""
        return tuple(self.infos)

    @cached_property
    def components(self) -> Mapping[str, str]:
        """The component of each key: of one that the config does not list, the one with its prefix.

        Where no component has its prefix, that is the first word of its name.
        """
        known = {key: self.config.component_of(key) for key in self._known}
        prefixes = {part.prefix: part.name for part in self.config.parts if part.prefix}
        inner_first = sorted(prefixes, key=len, reverse=True)

        def by_prefix(key: str) -> str:
            around = next((prefix for prefix in inner_first if key.startswith(prefix)), None)
            return key.partition(".")[0] if around is None else prefixes[around]

        return {key: known.get(key) or by_prefix(key) for key in self.keys}

    @cached_property
    def blocks(self) -> Mapping[str, str]:
        """The block of each key.

        What the config does not list belongs to the layer that its name says, see `blocks_beside`.
        """
        known = {key: self.config.block_of(key, self.convention) for key in self._known}
        if others := [key for key in self.keys if key not in known]:
            known |= blocks_beside(known, others)
        return {key: known[key] for key in self.keys}

    @cached_property
    def unplaced(self) -> tuple[str, ...]:
        """The keys that the config does not list and that lie in no layer of it."""
        listed = set(self.config.blocks(self.convention))
        return tuple(key for key, block in self.blocks.items() if block not in listed)

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The blocks that have keys, in the order of the config and then of the names."""
        used = dict.fromkeys(self.blocks.values())
        listed = [block for block in self.config.blocks(self.convention) if block in used]
        return (*listed, *in_order(block for block in used if block not in set(listed)))

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """The numbered blocks that have keys, in the order of depth.

        Where names alone tell, a number of its own is a layer, and `conv1` is one if there is no such number.
        """
        ending_so = [block for block in self.order if block[-1:].isdecimal()]
        own = set() if isinstance(self.config, StructuralConfig) else set(self.config.blocks(self.convention))
        layers = [block for block in ending_so if block in own or block.rpartition(".")[2].isdecimal()]
        return tuple(layers or ending_so)

    def is_stack(self, key: str) -> bool:
        """Whether a key holds several experts, one for each place on its first axis."""
        known = self.config.info_of(key)
        return bool(is_stack(key, tuple(self.infos[key].shape), known))

    def layer(self, key: str) -> tuple[int, int] | None:
        """The index of a key's block in its stack of layers, and the number of layers; None outside."""
        stack = self._stacks.get(self._stack_of(key), ())
        block = self.blocks.get(key, "")
        return (stack.index(block), len(stack)) if block in stack else None

    @property
    def has_layers(self) -> bool:
        """Whether layers of the model are known."""
        return bool(self._stacks)

    def side(self, key: str) -> int | None:
        """0 for a key before the layers, 1 for one after them; None where its name does not tell.

        Embeddings lie before all layers, and what writes tokens after them. Otherwise the first word of a
        name that is known decides, where there is one stack of layers, or one that is nearest to the key.
        """
        if self.blocks[key] in _OUTSIDE:
            return None
        if key in self._tokens:
            return 0 if is_embedding(key) else 1
        return side_of(key) if self._has_one_stack or self._is_near_one_stack(key) else None

    @cached_property
    def selected(self) -> dict[str, tuple[frozenset[str], int]]:
        """The keys of selectors, by name: values by key that are bound to this model share them."""
        return {}

    def groups(
        self, names: tuple[str, ...], held: Sequence[frozenset[str]]
    ) -> list[tuple[str, tuple[frozenset[int], object]]]:
        """Each key, with what decides its value: which selectors hold it, and where it lies in depth.

        Args:
            names: the selectors, by which the result is kept.
            held: the keys of each.
        """
        if names not in self._groups:
            places = {key: (self.layer(key), self.side(key)) for key in self.keys}
            holders = {key: frozenset(i for i, keys in enumerate(held) if key in keys) for key in self.keys}
            self._groups[names] = [(key, (holders[key], places[key])) for key in self.keys]
        return self._groups[names]

    @cached_property
    def _groups(self) -> dict[tuple[str, ...], list[tuple[str, tuple[frozenset[int], object]]]]:
        return {}

    @cached_property
    def _known(self) -> list[str]:
        known = self.config.keys()
        return [key for key in self.keys if self.config.resolve_alias(key) in known]

    @cached_property
    def _stacks(self) -> Mapping[tuple[str, str], list[str]]:
        """The numbered blocks of each stack that has keys, in the order of depth."""
        order = {block: i for i, block in enumerate(self.layers)}
        stacks: dict[tuple[str, str], set[str]] = {}
        for key, block in self.blocks.items():
            if block in order:
                stacks.setdefault(self._stack_of(key), set()).add(block)
        if all(len(blocks) == 1 for blocks in stacks.values()):  # conv1, conv2, fc1: one row of layers
            row = sorted({block for blocks in stacks.values() for block in blocks}, key=order.__getitem__)
            return dict.fromkeys(stacks, row)
        return {stack: sorted(blocks, key=_depth(blocks, order)) for stack, blocks in stacks.items()}

    @cached_property
    def _tokens(self) -> Mapping[str, int]:
        return token_tables({key: info.shape for key, info in self.infos.items()})

    @cached_property
    def _has_one_stack(self) -> bool:
        return len(set(map(tuple, self._stacks.values()))) == 1

    @cached_property
    def _around_stacks(self) -> list[str]:
        """The modules that hold the stacks of layers."""
        stacks = dict.fromkeys(stack_and_number(key)[0] for key in self.keys if self.layer(key))
        return list(dict.fromkeys(stack.rpartition(".")[0] for stack in stacks))

    def _is_near_one_stack(self, key: str) -> bool:
        """Whether a key shares more words with one stack than with any other."""
        shared = sorted(shared_words(key, stack) for stack in self._around_stacks)
        return len(shared) > 1 and shared[-1] > shared[-2]

    def _stack_of(self, key: str) -> tuple[str, str]:
        return self.components.get(key, ""), self.blocks.get(key, "").rpartition(".")[0]


def side_of(key: str) -> int | None:
    """0 for a key before the layers, 1 for one after them, by the first word of its name that is known."""
    sides = (_side_of(word) for word in key.split("."))
    return next((side for side in sides if side is not None), None)


def _side_of(word: str) -> int | None:
    """The side of the layers where a module or parameter of a name lies; None for other names."""
    if AFTER_LAYERS.fullmatch(word):
        return 1
    return 0 if BEFORE_LAYERS.fullmatch(word) else None


def _depth(blocks: Iterable[str], order: Mapping[str, int]) -> Callable[[str], int]:
    """A sort key for blocks: their number, or the order of the config where a name has no number."""
    numbers = [block.rpartition(".")[2] for block in blocks]
    if all(number.isdecimal() for number in numbers):
        return lambda block: int(block.rpartition(".")[2])
    return order.__getitem__
