"""State dicts and tiles as merge methods receive them."""

from __future__ import annotations

import abc
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
        key: the name of the tensor.
        start, stop: the range of the tile in the flattened tensor.
        shape: the shape of the tensor.
    """

    key: str
    start: int
    stop: int
    shape: tuple[int, ...] = ()
