"""Values on disk that a trip over the data has found and that are needed again."""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from mecha_exp.checkpoint.positional import byte_view

log = logging.getLogger(__name__)


class _Place(NamedTuple):
    """Where a tensor lies in the file."""

    start: int
    dtype: torch.dtype
    shape: torch.Size


class Spill:
    """Tensors, and tuples and lists of them, in a file without a name, of which a kill leaves nothing.

    It lies in the system's folder of temporary files (TMPDIR). Once that has no room, nothing more is kept.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file: Any = None  # of io.RawIOBase
        self._end = 0
        self._is_full = False
        self._kept: dict[Hashable, Any] = {}

    def __enter__(self) -> Spill:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def keep(self, name: Hashable, value: Any) -> None:
        """Write a value, if there is room for it."""
        with self._lock:
            if self._is_full:
                return
            try:
                self._kept[name] = self._written(value)
            except OSError as error:
                self._is_full = True
                log.info("what a merge needs again is computed again: temporary files: %s", error)

    def find(self, name: Hashable) -> Any:
        """A value, read anew; None if it was not kept."""
        with self._lock:
            return self._read(self._kept.get(name))

    def _written(self, value: Any) -> Any:
        """A value with a place for each tensor."""
        if type(value) in (tuple, list):
            return type(value)([self._written(part) for part in value])
        if not isinstance(value, torch.Tensor):
            return value
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="mecha_exp-", buffering=0)  # noqa: SIM115
        place, left = _Place(self._end, value.dtype, value.shape), byte_view(value.reshape(-1))
        self._file.seek(self._end)
        while left:
            written = self._file.write(left)
            self._end, left = self._end + written, left[written:]
        return place

    def _read(self, value: Any) -> Any:
        if isinstance(value, _Place):
            tensor = torch.empty(value.shape, dtype=value.dtype)
            left = byte_view(tensor.view(-1))
            self._file.seek(value.start)
            while left:
                left = left[self._file.readinto(left) :]
            return tensor
        return type(value)([self._read(part) for part in value]) if type(value) in (tuple, list) else value
