"""State dicts and tiles as merge methods receive them."""

from __future__ import annotations

import abc
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class StateDict(Mapping[str, T], Generic[T], abc.ABC):
    """A lazy mapping that a method gets for a parameter declared `StateDict[Tensor]`, or of another type.

    `state_dict[key]` is the value of the argument at a key: the tensor of a model, read on access, or the
    result of a merge, computed on access. A missing key raises `StateDictKeyError`; a method that does not
    catch it leaves the output key out.
    """

    @property
    @abc.abstractmethod
    def model_config(self) -> Any:
        """The model config of the argument."""

    @property
    def parts(self) -> tuple[StateDict[T], ...]:
        """A state dict for each file of `statistics(...)`, to read one at a time; else itself."""
        return (self,)


class StateDictKeyError(KeyError):
    """A merge method has no value for a key: the key is left out, or taken from the recipe behind `|`."""


def skip_key(key: str) -> typing.NoReturn:
    """Leave a key out, from within a merge method.

    A method runs on shapes alone before anything is written, so the decision must depend on names and shapes
    and not on values.
    """
    raise StateDictKeyError(key)


@dataclass(frozen=True)
class Tile:
    """The position of a tile, for an elementwise method with a parameter annotated `Tile`.

    The engine passes it; a recipe cannot.

    Attributes:
        key: the name of the tensor, or of the stack that it is an expert of.
        start, stop: the range of the tile in the flattened tensor.
        shape: the shape of the tensor; of a stack that of one expert.
        expert: the place of the tensor in a stack of experts, from 0; None for a tensor of its own.
    """

    key: str
    start: int
    stop: int
    shape: tuple[int, ...] = ()
    expert: int | None = None

    @property
    def offset(self) -> int:
        """The number of entries of the key before this tensor: those of the experts before it."""
        return 0 if self.expert is None else self.expert * math.prod(self.shape)

    @property
    def name(self) -> str:
        """A name that no other tensor has: the key, of an expert `key[3]`."""
        return self.key if self.expert is None else f"{self.key}[{self.expert}]"
