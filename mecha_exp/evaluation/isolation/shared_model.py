"""Share a model with another process through memory: one copy out, none in.

The bytes of the tensors lie one after another in an anonymous file in memory, which the other process maps.
Unlike `/dev/shm` such a file has no limit of its own in a container. Where the system has none, a temporary
file does the same.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mecha_exp.checkpoint import dtype_name, torch_dtype

ALIGNMENT = 64
"""Bytes that the offset of each tensor is a multiple of, as kernels read best."""


@dataclass(frozen=True)
class SharedModel:
    """A state dict that another process of this machine can map.

    Attributes:
        path: the file, which lasts as long as the block of `shared`.
        headers: the key, dtype, shape and offset in bytes of each tensor.
        size: bytes of the file.
    """

    path: str
    headers: tuple[tuple[str, str, tuple[int, ...], int], ...]
    size: int

    def open(self) -> dict[str, Tensor]:
        """Map the tensors; changes to them stay in this process."""
        with Path(self.path).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_COPY)
        return {key: tensor_in(mapped, dtype, shape, offset) for key, dtype, shape, offset in self.headers}


@contextmanager
def shared(model: Mapping[str, Tensor]) -> Iterator[SharedModel]:
    """Copy a state dict to where another process can map it, for the length of a block."""
    tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in model.items()}
    headers, end = [], 0
    for key, tensor in tensors.items():
        headers.append((key, dtype_name(tensor.dtype), tuple(tensor.shape), end))
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    with _anonymous_file() as (descriptor, path):
        os.truncate(descriptor, max(end, 1))
        for tensor, (*_, offset) in zip(tensors.values(), headers, strict=True):
            _write(descriptor, tensor.reshape(-1).view(torch.uint8).numpy().data, offset)
        yield SharedModel(path, tuple(headers), max(end, 1))


@contextmanager
def _anonymous_file() -> Iterator[tuple[int, str]]:
    """A file that no folder lists, and the path by which another process opens it."""
    if sys.platform == "linux":
        descriptor = os.memfd_create("mecha_exp")
        try:
            yield descriptor, f"/proc/{os.getpid()}/fd/{descriptor}"
        finally:
            os.close(descriptor)
        return
    descriptor, path = tempfile.mkstemp(prefix="mecha_exp.")
    try:
        yield descriptor, path
    finally:
        os.close(descriptor)
        Path(path).unlink()


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    os.lseek(descriptor, offset, os.SEEK_SET)
    while len(data):
        data = data[os.write(descriptor, data) :]


def tensor_in(mapped: Any, dtype: str, shape: tuple[int, ...], offset: int = 0) -> Tensor:
    """The tensor whose bytes lie in a buffer, from an offset on; it is not copied."""
    kind = torch_dtype(dtype)
    count = torch.Size(shape).numel() * kind.itemsize
    if not count:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(mapped, dtype=torch.uint8, count=count, offset=offset).view(kind).view(shape)
