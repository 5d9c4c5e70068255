"""What a merge method sees of a model whose other keys it asks for."""

from __future__ import annotations

import abc
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class StateDict(Mapping[str, T], Generic[T], abc.ABC):
    """A lazy mapping that a method gets for a parameter declared `StateDict[Tensor]`, or of another type.

    `state_dict[key]` gives the value that the argument has at that key: a model's tensor, read when it is
    asked for, or the result of the merge that the argument is, computed then. A key that the argument lacks
    raises `StateDictKeyError`; whoever does not catch it leaves the key out.
    """

    @property
    @abc.abstractmethod
    def model_config(self) -> Any:
        """The model config of the argument."""


class StateDictKeyError(KeyError):
    """A merge method has no value for a key: the key is left out, or taken from what stands behind `|`."""


def skip_key(key: str) -> typing.NoReturn:
    """Leave a key out, from within a merge method.

    A method is tried on shapes alone before anything is written, so the decision must depend on names and
    shapes and not on values.
    """
    raise StateDictKeyError(key)


@dataclass(frozen=True)
class Tile:
    """Where a tile lies, for an elementwise method that has a parameter annotated `Tile`.

    The engine fills it in; it is no argument of the recipe.

    Attributes:
        key: the name of the tensor.
        start, stop: the elements of the flattened tensor that the tile holds.
        shape: of the tensor.
    """

    key: str
    start: int
    stop: int
    shape: tuple[int, ...] = ()
