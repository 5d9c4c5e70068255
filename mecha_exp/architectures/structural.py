"""The config of a file of an unknown architecture: its own keys, in components and blocks by their names."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from mecha_exp.architectures.blocks import in_order, infer_blocks
from mecha_exp.architectures.config import DEFAULT_CONVENTION, ModelConfig
from mecha_exp.architectures.keys import HasShape, KeyInfo

STRUCTURAL = "structural"
"""The identifier of such a config, also in recipe texts."""
MAX_COMPONENTS = 32
"""With more first words than this they are not taken for components: a LoRA file has hundreds."""


class StructuralConfig(ModelConfig):
    """The config of a file of unknown keys; files with the same keys have equal configs.

    Components are the first words in which the keys differ (`encoder`, `decoder`, `lm_head`), blocks the
    numbered layers.
    """

    def __init__(self, keys: Mapping[str, HasShape]) -> None:
        super().__init__(STRUCTURAL, ())
        self._own = {key: KeyInfo(tuple(info.shape), _dtype(info.dtype)) for key, info in keys.items()}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StructuralConfig):
            return NotImplemented
        return {key: info.shape for key, info in self._own.items()} == {
            key: info.shape for key, info in other._own.items()
        }

    def __hash__(self) -> int:
        return hash(frozenset(self._own))

    @cached_property
    def _components(self) -> Mapping[str, Mapping[str, KeyInfo]]:
        words = {key: key.split(".") for key in self._own}
        common = _common_words(list(words.values()))
        components: dict[str, dict[str, KeyInfo]] = {}
        for key, info in self._own.items():
            components.setdefault(words[key][common], {})[key] = info
        return components if len(components) <= MAX_COMPONENTS else {"model": self._own}

    def blocks(self, convention: str = DEFAULT_CONVENTION) -> tuple[str, ...]:
        return tuple(in_order(self._block_of(convention).values()))

    def _assign_blocks(self, convention: str) -> Mapping[str, str]:
        return infer_blocks(self._own)


def _common_words(names: list[list[str]]) -> int:
    """The number of first words that all names share; a name's last word does not count."""
    shortest = min(map(len, names), default=1)
    return next((i for i in range(shortest - 1) if len({name[i] for name in names}) > 1), shortest - 1)


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
