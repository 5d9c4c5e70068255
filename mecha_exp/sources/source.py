"""A source made of another one: the base of all that read a model otherwise than it is stored."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mecha_exp.checkpoint import StateDictSource, TensorInfo, torch_dtype
from mecha_exp.checkpoint.positional import FileRegion, byte_view

Source = StateDictSource
"""The short name of the interface in signatures."""

_COMPARED_BYTES = (1 << 16, 1 << 23)
"""The bytes that are compared first, as different tensors differ early, and the most at once."""


def infos_of(source: Source) -> dict[str, TensorInfo]:
    """The dtype and the shape of every key, in a dictionary of the caller's own."""
    return dict(source.infos())


def read_values_as_bytes(source: Source, key: str, start: int, view: memoryview) -> None:
    """Fill `view` with the bytes of a key from `start` on by `read_into`, where values are computed."""
    dtype = torch_dtype(source.info(key).dtype)
    values = torch.empty(len(view) // dtype.itemsize, dtype=dtype)
    source.read_into(key, start // dtype.itemsize, values)
    view[:] = byte_view(values)


def values_of(source: Source, key: str) -> torch.Tensor:
    """The tensor of a key, in its dtype."""
    info = source.info(key)
    values = torch.empty(info.shape, dtype=torch_dtype(info.dtype))
    source.read_into(key, 0, values.view(-1))
    return values


def same_bytes(key: str, sources: Sequence[Source]) -> bool:
    """Whether sources hold the same bytes at a key that all of them have; two buffers do for any number."""
    size = min((source.info(key).nbytes for source in sources), default=0)
    tile, most = _COMPARED_BYTES
    start = 0
    while start < size:
        first, other = (bytearray(min(tile, size - start)) for _ in range(2))
        sources[0].read_bytes_into(key, start, memoryview(first))
        for source in sources[1:]:
            source.read_bytes_into(key, start, memoryview(other))
            if first != other:
                return False
        start, tile = start + len(first), most
    return True


class SourceView(StateDictSource):
    """Another source under the same name, with the same files. Subclasses change what is read."""

    def __init__(self, original: Source) -> None:
        self._original = original
        self.name = original.name
        self.path = original.path
        self.files = original.files
        self.identity = original.identity

    @staticmethod
    def changed_entries(path: Path, views: Sequence[Any]) -> Mapping[str, Any]:
        """The entries of the config.json beside a model that views of this class change together."""
        return {}

    @property
    def metadata(self) -> Mapping[str, str]:
        return self._original.metadata

    def notes(self, keys: Collection[str]) -> Iterable[str]:
        return self._original.notes(keys)

    def keys(self) -> Collection[str]:
        return self._original.keys()

    def info(self, key: str) -> TensorInfo:
        return self._original.info(key)

    def read_bytes_into(self, key: str, start: int, view: memoryview) -> None:
        self._original.read_bytes_into(key, start, view)

    def region(self, key: str) -> FileRegion | None:
        return self._original.region(key)

    def expect(self, keys: Iterable[str]) -> None:
        self._original.expect(key for key in keys if key in self._original)

    def check_unchanged(self) -> None:
        self._original.check_unchanged()

    def close(self) -> None:
        self._original.close()


class RenamedSource(SourceView):
    """Another source under other keys. Nothing is copied.

    Args:
        original: the source to read.
        original_keys: each key with its key in the original.
    """

    def __init__(self, original: Source, original_keys: Mapping[str, str]) -> None:
        super().__init__(original)
        self._original_keys = original_keys

    def keys(self) -> Collection[str]:
        return self._original_keys.keys()

    def info(self, key: str) -> TensorInfo:
        return self._original.info(self._original_keys[key])

    def read_into(self, key: str, start: int, out: torch.Tensor) -> None:
        self._original.read_into(self._original_keys[key], start, out)

    def read_bytes_into(self, key: str, start: int, view: memoryview) -> None:
        self._original.read_bytes_into(self._original_keys[key], start, view)

    def region(self, key: str) -> FileRegion | None:
        return self._original.region(self._original_keys[key])

    def expect(self, keys: Iterable[str]) -> None:
        self._original.expect(self._original_keys[key] for key in keys if key in self._original_keys)
