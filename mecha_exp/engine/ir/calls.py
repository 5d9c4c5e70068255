"""Calls of merge methods: their arguments, and the errors that they raise."""

from __future__ import annotations

import enum
import traceback
from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch

from mecha_exp.errors import MechaError, MergeError
from mecha_exp.graph.nodes import LiteralNode, MergeNode, Node
from mecha_exp.method_api.key_map import KeyRelation
from mecha_exp.method_api.method import Kind, MergeMethod
from mecha_exp.method_api.parameters import ParameterSpec
from mecha_exp.method_api.state_dict import StateDict, StateDictKeyError, Tile

NO_EXTRA: Mapping[str, Any] = MappingProxyType({})


class Extent(enum.Enum):
    """How much of a value exists at a time."""

    SMALL = "small"
    TILE = "tile"
    WHOLE = "whole"
    FACTOR = "factor"


class Call:
    """One method of a program with its constants at hand, to be run on the values of its arguments.

    Small values are float64 among themselves and have the dtype of the arithmetic where they meet a tile.

    Attributes:
        node, method: what is called.
        dtype: of the arithmetic.
        arguments: nodes for what is computed before, values for the rest.
    """

    def __init__(
        self,
        node: MergeNode,
        extents: Mapping[Node, Extent],
        compute_dtype: torch.dtype,
        cache: Any = None,
    ) -> None:
        self.node = node
        self.method = node.method
        self._cache = cache
        small = extents[node] is Extent.SMALL and self.method.kind is not Kind.REDUCTION
        self.dtype = torch.float64 if small else compute_dtype
        self._extents = extents
        nodes = dict(node.arguments)
        self.arguments = {
            spec.name: self._operand(spec, nodes.get(spec.name)) for spec in self.method.signature.parameters
        }
        self._later = {name: v for name, v in self.arguments.items() if isinstance(v, Node | tuple)}

    def __call__(self, values: Mapping[Node, torch.Tensor], tile: Tile) -> torch.Tensor:
        """The result for one tile; a method that works on rows gets them as such."""
        return self._checked(self._run(values, tile))

    def factor(self, values: Mapping[Node, torch.Tensor], tile: Tile) -> Any:
        """The result of a factor, of any form."""
        return self._run(values, tile)

    def partial(
        self, values: Mapping[Node, torch.Tensor], tile: Tile, state: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """The terms of a reduction for one tile or block; several tensors if it has several sums."""
        extra = {"state": state} if self.method.signature.has_state else {}
        result = self._run(values, tile, **extra)
        return [self._checked(r) for r in (result if isinstance(result, tuple | list) else (result,))]

    def _run(self, values: Mapping[Node, torch.Tensor], tile: Tile, **extra: Any) -> Any:
        columns = self.method.columns(tile.shape) if self.method.columns else None
        later = {name: self._value(operand, values, columns) for name, operand in self._later.items()}
        arguments = {**self.arguments, **later}
        if self.method.signature.wants_tile:
            extra[self.method.signature.wants_tile] = tile
        if self.method.signature.wants_key:
            relation = KeyRelation((tile.name,), dict.fromkeys(arguments, (tile.name,)))
            extra |= {"key": tile.name, "key_relation": relation, "cache": self._cache}
        try:
            return run_method(self.method, arguments, tile.name, extra)
        except StateDictKeyError:
            raise skipped_too_late(self.method, tile.name) from None

    def _checked(self, result: Any) -> torch.Tensor:
        if not isinstance(result, torch.Tensor):
            raise MergeError(f"'{self.method.identifier}' returned {type(result).__name__}, not a tensor")
        return result

    @cached_property
    def hyperparameters(self) -> dict[str, Any]:
        """The arguments that are plain Python values."""
        return {
            spec.name: self.arguments[spec.name]
            for spec in self.method.signature.parameters
            if not spec.is_tensor
        }

    def _operand(self, spec: ParameterSpec, argument: Node | tuple[Node, ...] | None) -> Any:
        """A node whose value comes later, or the value itself; for varargs a tuple of them."""
        if isinstance(argument, tuple):
            return tuple(self._operand(spec, node) for node in argument)
        if isinstance(argument, LiteralNode) or argument is None:
            value = argument.value if argument is not None else () if spec.variadic else spec.default
            if spec.interface is torch.Tensor and isinstance(value, float | int):
                return torch.tensor(value, dtype=self.dtype)
            if spec.is_tensor and isinstance(value, torch.Tensor):
                return value.to(self.dtype).reshape(()) if value.numel() == 1 else argument
            return list(value) if isinstance(value, tuple) and spec.interface is list else value
        return argument

    def _value(self, operand: Any, values: Mapping[Node, torch.Tensor], columns: int | None) -> Any:
        if isinstance(operand, tuple):
            return tuple(self._value(o, values, columns) for o in operand)
        if not isinstance(operand, Node):
            return operand
        value = values[operand]
        if self._extents[operand] is Extent.SMALL:
            return value if value.dtype is self.dtype else value.to(self.dtype)
        if self._extents[operand] is Extent.FACTOR:
            return value
        return value.view(-1, columns) if columns is not None else value


def run_method(
    method: MergeMethod,
    values: Mapping[str, Any],
    key: str | None = None,
    extra: Mapping[str, Any] = NO_EXTRA,
) -> Any:
    """Call a method's function; what goes wrong inside says which method, for which key, with what, where."""
    args, kwargs = method.signature.arrange(values)
    try:
        return method.instantiate()(*args, **kwargs, **extra)
    except StateDictKeyError:
        raise
    except MechaError as error:
        raise type(error)(f"{method.identifier}: {error}") from error
    except Exception as error:
        where = f" on the key '{key}'" if key else ""
        listed = ", ".join(f"{name}: {_described(value)}" for name, value in values.items())
        raise MergeError(
            f"the merge method '{method.identifier}' failed{where}: {type(error).__name__}: {error}\n"
            f"  given {listed}\n{lines_of(error, outside=1)}"
        ) from error


def lines_of(error: BaseException, outside: int) -> str:
    """The lines of a user's function that led to an error, without the `outside` frames that called it."""
    return "".join(traceback.format_list(traceback.extract_tb(error.__traceback__)[outside:])).rstrip()


def skipped_too_late(method: MergeMethod, key: str) -> MergeError:
    """For a key that a method skips although it did not when it was tried."""
    return MergeError(
        f"the merge method '{method.identifier}' skipped the key '{key}' only when it saw the values, and "
        "the output was laid out with it. Let it decide by the names and shapes, or return a tensor."
    )


def changed_shape(
    method: MergeMethod, key: str, shape: tuple[int, ...], result: tuple[int, ...]
) -> MergeError:
    """For a result that is not of the key's shape."""
    return MergeError(
        f"the merge method '{method.identifier}' turned the key '{key}' of shape {list(shape)} into "
        f"{list(result)}. A merged tensor keeps its shape."
    )


def _described(value: Any) -> str:
    """An argument for a message: of a tensor its shape and dtype."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{value.item():g}" if not value.ndim and not value.is_meta else f"{list(value.shape)} {dtype}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_described, value)) + "]"
    return "a state dict" if isinstance(value, StateDict) else repr(value)
