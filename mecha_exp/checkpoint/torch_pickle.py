"""Pickle checkpoints (.ckpt, .pt, .pth, .bin): only tensors, mapped into memory. No code is run."""

from __future__ import annotations

import os
import pickle
import re
import struct
import warnings
import zipfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from mecha_exp.checkpoint.dtypes import dtype_name
from mecha_exp.checkpoint.model import ListedSource
from mecha_exp.checkpoint.positional import file_changed, identity_of, is_still, require_little_endian
from mecha_exp.checkpoint.safetensors.header import SUFFIX, TensorInfo
from mecha_exp.errors import CheckpointError, first_line, prefixed, some

WRAPPERS = ("state_dict", "model_state_dict", "module", "model", "params_ema", "params", "net", "weights")
"""The names under which training programs save a state dict, the likeliest first."""

_MAGIC = re.compile(rb"PK\x03\x04|\x80[\x02-\x05]")
_DAMAGED = (
    *(RuntimeError, EOFError, ValueError, LookupError, OSError, AttributeError, TypeError, OverflowError),
    *(MemoryError, AssertionError, struct.error, zipfile.BadZipFile),
)
"""What torch and zipfile raise for a file whose bytes are spoilt."""

_FORBIDDEN = re.compile(r"GLOBAL (\S+)")

_REPEATED_BYTES = 64 << 20
"""The most bytes by which views that repeat stored values, as `expand` makes them, may exceed the file."""


def begins_as_pickle(start: bytes) -> bool:
    """Whether the first bytes of a file are what `torch.save` or `pickle` writes."""
    return bool(_MAGIC.match(start))


class PickledModel(ListedSource):
    """A state dict that `torch.save` wrote.

    Files of torch 1.6 and later are mapped, so that a tensor is read on use. Older files, and those that are
    named `.safetensors`, are loaded as a whole, since torch cannot map them. A state dict inside a mapping
    (`WRAPPERS`) is unwrapped. Values other than tensors, and other state dicts beside it, are left
    out; `notes` says so.

    Raises:
        CheckpointError: the file is damaged, holds no state dict, or would run code: only tensors and plain
            containers are accepted.
    """

    path: Path

    def __init__(self, path: str | os.PathLike[str]) -> None:
        require_little_endian()
        self.path = Path(path)
        self.name = str(self.path)
        self.files = (self.path,)
        self._status = identity_of(self.path.stat())
        self.identity = (str(self.path.resolve()), *self._status)
        self._notes: list[str] = []
        tensors = self._load()
        self._infos = {key: self._describe(key, tensor) for key, tensor in tensors.items()}
        self._check_memory(tensors)
        self._tensors = {key: _plain(tensor) for key, tensor in tensors.items()}

    def read_bytes_into(self, key: str, start: int, view: memoryview) -> None:
        raw = self._tensors[key].reshape(-1).view(torch.uint8)
        view[:] = raw[start : start + len(view)].numpy().data

    def notes(self, keys: Collection[str]) -> Iterable[str]:
        """Say what of the file is not read."""
        return self._notes

    def check_unchanged(self) -> None:
        if not is_still(self.path, self._status):
            raise file_changed(self.path)

    def close(self) -> None:
        self._tensors = {}

    def _load(self) -> dict[str, torch.Tensor]:
        try:
            mapped = zipfile.is_zipfile(self.path) and self.path.suffix != SUFFIX
            with warnings.catch_warnings(), self.path.open("rb") as file:
                warnings.simplefilter("ignore")  # of torch, about pickle protocols
                source = self.path if mapped else file  # torch trusts the name where it gets a path
                loaded = torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
        except pickle.UnpicklingError as error:
            raise CheckpointError(self._refused(str(error))) from None
        except _DAMAGED as error:
            raise CheckpointError(
                f"{self.path} cannot be read as a pickle checkpoint: {first_line(error)[:200]}. It is "
                "damaged or was not fully copied: download or copy it again."
            ) from None
        return self._unwrap(loaded)

    def _refused(self, message: str) -> str:
        forbidden = _FORBIDDEN.search(message)
        if forbidden is None:
            cause = (message.partition("WeightsUnpickler error:")[2].strip() or message).splitlines()[0]
            return (
                f"{self.path} is not a checkpoint of tensors as torch.save writes it: {cause[:200]}. "
                "Pickles are read with torch's weights_only loading alone, so that nothing in them runs."
            )
        return (
            f"{self.path} is refused: besides tensors it holds '{forbidden[1]}', and a pickle can run code "
            "when it is loaded. Get the model as safetensors; or, if you trust its author, load it with "
            "torch yourself and save its state dict as safetensors."
        )

    def _unwrap(self, loaded: Any) -> dict[str, torch.Tensor]:
        state_dict = loaded
        for _ in range(len(WRAPPERS)):  # a wrapper may be wrapped
            name = next((w for w in WRAPPERS if _has_mapping(state_dict, w)), None)
            if name is None:
                break
            if others := [other for other in state_dict if other != name and _is_model(state_dict[other])]:
                self._notes.append(
                    f"'{name}' is read, and not {some(others)}, which it holds too. To merge another, save "
                    "that alone to a file."
                )
            state_dict = state_dict[name]
        tensors: dict[str, torch.Tensor] = {}
        left_out = []
        for key, value in state_dict.items() if isinstance(state_dict, Mapping) else ():
            if isinstance(value, torch.Tensor):
                tensors[str(key)] = value
            else:
                left_out.append(str(key))
        if not tensors:
            raise CheckpointError(f"{self.path} holds no state dict: {_outline(loaded)}.")
        if left_out:
            self._notes.append(f"left out, since they are not tensors: {some(left_out)}")
        return tensors

    def _check_memory(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Refuse a small file whose views claim large tensors, before memory is asked for."""
        copied = {key: _copied_bytes(tensor) for key, tensor in tensors.items()}
        needed, size = sum(copied.values()), self.path.stat().st_size
        if needed > size + _REPEATED_BYTES:
            largest = max(copied, key=copied.__getitem__)
            raise CheckpointError(
                f"{self.path} has {size:,} bytes and would take {needed:,} in memory, since its tensors "
                f"repeat stored values ({largest}: {copied[largest]:,} bytes). Save them with .clone() if "
                "this is meant."
            )

    def _describe(self, key: str, tensor: torch.Tensor) -> TensorInfo:
        unmergeable = _unmergeable(tensor)
        if unmergeable:
            raise CheckpointError(f"{self.path}: {key} is {unmergeable}, which cannot be merged.")
        with prefixed(f"{self.path}: {key}: ", CheckpointError):
            return TensorInfo(dtype_name(tensor.dtype), tuple(tensor.shape), 0, tensor.nbytes)


def _unmergeable(tensor: torch.Tensor) -> str:
    """The kind of a tensor that does not hold one stored number for each of its elements; else empty."""
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return "a sparse or quantized tensor"
    if tensor.is_meta:
        return "a tensor without values (on torch's device 'meta')"
    return ""


def _copied_bytes(tensor: torch.Tensor) -> int:
    """The memory that `_plain` asks for."""
    in_order = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return 0 if in_order else tensor.nbytes


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory holds its values in order; a copy where it is a view that does not."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _has_mapping(value: Any, name: str) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get(name), Mapping)


def _is_model(value: object) -> bool:
    """Whether a value is a state dict, such as the averaged weights beside the last ones."""
    return isinstance(value, Mapping) and any(
        isinstance(tensor, torch.Tensor) and tensor.ndim for tensor in value.values()
    )


def _outline(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"it is a mapping of {some(map(repr, value))}" if value else "it is an empty mapping"
    return f"it is a {type(value).__name__}"
