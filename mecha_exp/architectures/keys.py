"""A key of a model config: its shape and dtype, alone or as one of the names of a brace pattern."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from mecha_exp.architectures.patterns import Pattern


class HasShape(Protocol):
    """The description of a key: a `TensorInfo`, a `KeyInfo`, a tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each dimension."""

    @property
    def dtype(self) -> object:
        """The number format."""


class KeyInfo(NamedTuple):
    """A key of a config.

    Attributes:
        shape: the sizes.
        dtype: the usual dtype in files, by torch's name: `float32`.
        optional: whether a file of this config may lack it.
        aliases: its other names in files.
        stacked: whether it holds several experts, one for each place on its first axis; None: its name tells.
    """

    shape: tuple[int, ...]
    dtype: str
    optional: bool = False
    aliases: tuple[str, ...] = ()
    stacked: bool | None = None


@dataclass(frozen=True, slots=True)
class KeyPattern:
    """Keys that a brace pattern describes together, without the component's prefix.

    Attributes:
        shape: ints, and names of sizes that are inferred from a file.
        aliases: patterns whose groups correspond to those of `names`.
        stacked: whether each holds several experts, one for each place on its first axis; None: names tell.
    """

    names: Pattern
    shape: tuple[int | str, ...]
    dtype: str
    optional: bool = False
    aliases: tuple[Pattern, ...] = ()
    stacked: bool | None = None
