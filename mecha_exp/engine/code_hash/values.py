"""Texts for the values of constants, equal for equal values."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import logging
import re
import types
import typing
from pathlib import PurePath
from typing import Any, Protocol

import numpy as np
import torch

from mecha_exp.architectures import ModelConfig
from mecha_exp.engine.code_hash.data import Data
from mecha_exp.method_api.parameters import Declared

_PLAIN = (bool, int, float, complex, bytes, range, slice, type(None), type(Ellipsis), type(NotImplemented))
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, np.dtype)


class NoValueError(Exception):
    """An object that has no value that could be told, such as a lock."""


class Encoder(Protocol):
    """The encoder of the parts of a value."""

    data: Data

    def encode(self, value: object) -> str:
        """The text of a part."""

    def numbered(self, value: object, describe: typing.Callable[[], str]) -> str:
        """The number of a part that may contain itself."""

    def text(self, word: str) -> str:
        """The text of a string."""


def encode_value(value: Any, walk: Encoder) -> str:
    """The text of a value.

    Raises:
        NoValueError: it has none.
    """
    if isinstance(value, enum.Enum):
        return f"{walk.encode(type(value))}.{value.name}"
    if type(value) is str:
        return repr(walk.text(value))
    if type(value) in _PLAIN or isinstance(value, _NAMED):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, PurePath):
        return _path(value, walk)
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return _numbers(value)
    if isinstance(value, re.Pattern):
        return f"re {value.pattern!r} {value.flags}"
    if isinstance(value, types.BuiltinFunctionType | np.ufunc):
        return _builtin(value, walk)
    if isinstance(value, ModelConfig):
        return f"config {value.digest}"
    if isinstance(value, typing.TypeVar):
        return f"typevar {value.__name__}"
    if isinstance(value, logging.Logger):
        return "logger"
    if typing.get_origin(value) is not None:
        parts = (typing.get_origin(value), *typing.get_args(value))
        return "type " + " ".join(map(walk.encode, parts))
    if type(value) is tuple:
        return f"({', '.join(map(walk.encode, value))})"
    return walk.numbered(value, lambda: _compound(value, walk))


def _compound(value: Any, walk: Encoder) -> str:
    """A value with parts, which may contain itself."""
    if type(value) is list:
        return f"[{', '.join(map(walk.encode, value))}]"
    if type(value) in (set, frozenset):
        return f"set [{', '.join(sorted(map(repr, value)))}]"
    if type(value) in (dict, types.MappingProxyType):
        return "dict {" + ", ".join(f"{walk.encode(k)}: {walk.encode(v)}" for k, v in value.items()) + "}"
    if isinstance(value, types.MethodType):
        return f"method {walk.encode(value.__func__)} of {walk.encode(value.__self__)}"
    if isinstance(value, functools.partial):
        return f"partial {walk.encode(value.func)} {walk.encode(value.args)} {walk.encode(value.keywords)}"
    if isinstance(value, Declared):  # a help text changes nothing
        value = dataclasses.replace(value, help="")
    try:
        parts = value.__reduce_ex__(4)
    except Exception as error:
        raise NoValueError(str(error)) from None
    if isinstance(parts, str):  # a global of its module
        return f"{type(value).__qualname__} {parts}"
    fields = [
        walk.encode(list(part) if i >= 3 and part is not None else part) for i, part in enumerate(parts)
    ]
    return f"object {' '.join(fields)}"


def _builtin(value: Any, walk: Encoder) -> str:
    owner = getattr(value, "__self__", None)
    name = getattr(value, "__name__", "")
    if owner is None or isinstance(owner, types.ModuleType):
        return f"builtin {(getattr(value, '__module__', None) or 'numpy').partition('.')[0]}:{name}"
    return f"builtin {name} of {walk.encode(owner)}"


def _path(value: PurePath, walk: Encoder) -> str:
    """A path by what lies there: code that reads a constant path depends on that file."""
    from pathlib import Path

    path = Path(value)
    if path.is_file():
        walk.data.constants.append(path)
        return f"path {path.name}"
    return f"path {walk.text(str(value))}"


def _numbers(value: torch.Tensor | np.ndarray[Any, Any] | np.generic) -> str:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.device.type == "meta":
            raise NoValueError("a tensor without plain numbers")
        tensor = value.detach().cpu().contiguous()
        shape, dtype = tuple(tensor.shape), str(tensor.dtype)
        content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    else:
        array = np.ascontiguousarray(value)
        if array.dtype.hasobject:
            raise NoValueError("an array of objects")
        shape, dtype, content = array.shape, array.dtype.str, array.tobytes()
    return f"{dtype} {shape} {hashlib.sha256(content).hexdigest()}"
