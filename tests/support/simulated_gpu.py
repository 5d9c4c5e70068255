"""A GPU made of the CPU: its tensors say that they are elsewhere, and nothing is done before somebody waits.

Real GPUs are seldom so late, and that is what makes this a test: a buffer that is written to while a copy
from it is still waiting gives wrong values here every time. As on a real one, tensors of two devices do not
mix, a number on the CPU and an index apart. One worker at a time: torch's dispatch to Python, which this is
made of, is not safe with several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

NAME = "meta"  # which torch knows everywhere, and nothing here is computed on
DEVICE = torch.device(NAME)
_ATEN = torch.ops.aten
_COPIES = (_ATEN._to_copy, _ATEN.copy_)
_INDEXED = (_ATEN.index, _ATEN.index_put, _ATEN.index_put_)


class There(torch.Tensor):
    """A tensor on that device; `values` is set once the work that gives it has been done."""

    values: torch.Tensor

    @staticmethod
    def __new__(cls, shape: torch.Tensor) -> There:
        return torch.Tensor._make_wrapper_subclass(
            cls, shape.shape, strides=shape.stride(), dtype=shape.dtype, device=DEVICE
        )

    def __init__(self, shape: torch.Tensor) -> None:
        self.shape_of = shape

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise RuntimeError(f"{function} outside of a stream")


class Stream(TorchDispatchMode):
    """What one thread has asked the device to do, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[Callable[[], None]] = []

    def wait(self) -> None:
        for work in self._waiting:
            work()
        self._waiting = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        flat = tree_flatten((args, kwargs))[0]
        given = [value for value in flat if isinstance(value, torch.Tensor)]
        target = next((value for value in flat if isinstance(value, torch.device)), None)
        if target != DEVICE and not any(isinstance(value, There) for value in given):
            return function(*args, **kwargs)
        with self:
            made_of_others = function.decompose(*args, **kwargs)
        if made_of_others is not NotImplemented:
            return made_of_others
        _check_devices(function.overloadpacket, args, kwargs)
        arrives = target is not None and target != DEVICE
        if function is _ATEN.copy_.default and not isinstance(args[0], There):
            arrives = True
        here = {**kwargs, "device": torch.device("cpu")} if target is not None else kwargs
        shape = None if arrives else _shape_of(function, args, here)
        if shape is None:
            self.wait()
            found = function(*tree_map(_values, args), **tree_map(_values, here))
            return found if arrives else tree_map(_done, found)
        if function._schema.is_mutable:
            self._waiting.append(lambda: function(*tree_map(_values, args), **tree_map(_values, here)))
            result = kwargs.get("out", args[0])
        else:
            result = tree_map(There, shape)
            self._waiting.append(
                lambda: _fill(result, function(*tree_map(_values, args), **tree_map(_values, here)))
            )
        if function is _ATEN._to_copy.default and not kwargs.get("non_blocking"):
            self.wait()
        return result


@contextmanager
def own_stream(name: str) -> Iterator[None]:
    """In the place of `devices.own_stream`."""
    with Stream() as stream:
        yield stream.wait


def install(monkeypatch: Any) -> None:
    """Let the engine use it, for small keys too, which it leaves to the CPU otherwise."""
    monkeypatch.setattr("mecha_exp.engine.runtime.scheduler.own_stream", own_stream)
    monkeypatch.setattr("mecha_exp.engine.planner.keys.key_plan.SMALL_KEY", 0)


def _check_devices(operation: Any, args: Any, kwargs: Any) -> None:
    if operation in _INDEXED:
        args = (args[0], *args[2:])  # without the indices
    if operation not in _COPIES:
        for value in tree_flatten((args, kwargs))[0]:
            if isinstance(value, torch.Tensor) and value.ndim and not isinstance(value, There):
                raise RuntimeError(f"{operation}: expected all tensors to be on the same device")


def _shape_of(function: Any, args: Any, kwargs: Any) -> Any:
    """The results without values; None where they depend on the values, which must be waited for."""
    try:
        there = {**kwargs, "device": torch.device("meta")} if "device" in kwargs else kwargs
        found = function(*tree_map(_shape, args), **tree_map(_shape, there))
    except (NotImplementedError, RuntimeError):
        return None
    only_tensors = all(isinstance(value, torch.Tensor) for value in tree_flatten(found)[0])
    return found if only_tensors else None


def _shape(value: Any) -> Any:
    if isinstance(value, There):
        return value.shape_of
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _values(value: Any) -> Any:
    return value.values if isinstance(value, There) else value


def _done(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    result = There(value.to("meta"))
    result.values = value
    return result


def _fill(result: Any, found: Any) -> None:
    for there, values in zip(tree_flatten(result)[0], tree_flatten(found)[0], strict=True):
        there.values = values
