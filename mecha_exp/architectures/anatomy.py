"""What a model's keys are parts of: components, blocks, and how deep in the model they lie."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from mecha_exp.architectures import DEFAULT_CONVENTION, ModelConfig, StructuralConfig, detect
from mecha_exp.architectures.keys import HasShape
from mecha_exp.errors import ConfigError

_BEFORE = re.compile(r"(^|[._])(\w*embed\w*|wte|wpe|conv_in|proj_in|img_in|txt_in|x_embedder)([._]|$)")
"""Names of what a model begins with, where only the names tell."""

UNKNOWN = "(unknown)"
"""The block, where a name is needed, of keys that a model's config does not know."""

_OUTSIDE = ("BASE", "VAE")
"""Blocks of Stable Diffusion that are neither before nor after the others."""


@dataclass(frozen=True, eq=False)
class Anatomy:
    """The parts of one model.

    Attributes:
        keys: its keys.
        config: what it is.
        convention: whose blocks are meant, where projects disagree.
    """

    keys: tuple[str, ...]
    config: ModelConfig = field(repr=False)
    convention: str = DEFAULT_CONVENTION

    @staticmethod
    def of(model: Mapping[str, HasShape], convention: str = DEFAULT_CONVENTION) -> Anatomy:
        """That of a model, by its keys and shapes.

        Raises:
            ConfigError: it has no such convention.
        """
        try:
            config = detect(model).config
        except ConfigError:  # several fit: its own keys then
            config = StructuralConfig(model)
        config.blocks(convention)
        return Anatomy(tuple(model), config, convention)

    @cached_property
    def components(self) -> Mapping[str, str]:
        """The component of each key that the config knows."""
        return {key: self.config.component_of(key) for key in self._known}

    @cached_property
    def blocks(self) -> Mapping[str, str]:
        """The block of each key that the config knows."""
        return {key: self.config.block_of(key, self.convention) for key in self._known}

    def block(self, key: str) -> str:
        """The block of a key, or `UNKNOWN`: what tables are grouped by."""
        return self.blocks.get(key, UNKNOWN)

    def layer(self, key: str) -> tuple[int, int] | None:
        """The place of a key's block among the layers of its stack, and their number; None outside."""
        stack = self._stacks.get(self._stack_of(key), ())
        block = self.blocks.get(key, "")
        return (stack.index(block), len(stack)) if block in stack else None

    def side(self, key: str) -> int | None:
        """Whether a key outside of the layers comes before them (0) or after (1); None where neither is so.

        Only a model with one stack of layers has a before and an after.
        """
        if len(set(map(tuple, self._stacks.values()))) != 1 or self.blocks.get(key, _OUTSIDE[0]) in _OUTSIDE:
            return None
        return 0 if _BEFORE.search(key) else 1

    @cached_property
    def _known(self) -> list[str]:
        known = self.config.keys()
        return [key for key in self.keys if self.config.resolve_alias(key) in known]

    @cached_property
    def _stacks(self) -> Mapping[tuple[str, str], list[str]]:
        """The numbered blocks that keys lie in, in the order of depth, of each stack."""
        order = {block: i for i, block in enumerate(self.config.layers(self.convention))}
        stacks: dict[tuple[str, str], set[str]] = {}
        for key, block in self.blocks.items():
            if block in order:
                stacks.setdefault(self._stack_of(key), set()).add(block)
        if all(len(blocks) == 1 for blocks in stacks.values()):  # conv1, conv2, fc1: one row of layers
            row = sorted({block for blocks in stacks.values() for block in blocks}, key=order.__getitem__)
            return dict.fromkeys(stacks, row)
        return {stack: sorted(blocks, key=_depth(blocks, order)) for stack, blocks in stacks.items()}

    def _stack_of(self, key: str) -> tuple[str, str]:
        return self.components.get(key, ""), self.blocks.get(key, "").rpartition(".")[0]


def _depth(blocks: Iterable[str], order: Mapping[str, int]) -> Callable[[str], int]:
    """By number where there is nothing else in the names, otherwise in the order of the config."""
    numbers = [block.rpartition(".")[2] for block in blocks]
    if all(number.isdecimal() for number in numbers):
        return lambda block: int(block.rpartition(".")[2])
    return order.__getitem__
