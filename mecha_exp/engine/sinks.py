"""Where a merged model goes: a file, or a dictionary in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

from mecha_exp.checkpoint import CheckpointWriter, torch_dtype

Layout = Mapping[str, tuple[str, tuple[int, ...]]]
"""The dtype (by its safetensors name) and the shape of each key."""


class Sink(Protocol):
    """Takes tiles of flattened tensors in any order, from any thread."""

    def write(self, key: str, start: int, values: torch.Tensor) -> None:
        """Elements from `start` on of a key, in the key's dtype."""

    def write_bytes(self, key: str, start: int, data: memoryview) -> None:
        """Bytes from `start` on of a key."""

    def commit(self) -> object:
        """All has been written: make the result appear."""

    def abort(self) -> None:
        """Leave no trace."""


class MemorySink:
    """Fills a dictionary that the caller owns; the tensors are there when all has been written."""

    def __init__(self, target: dict[str, torch.Tensor], layout: Layout) -> None:
        self._target = target
        self._tensors = {
            key: torch.empty(shape, dtype=torch_dtype(dtype)) for key, (dtype, shape) in layout.items()
        }

    def write(self, key: str, start: int, values: torch.Tensor) -> None:
        self._tensors[key].view(-1)[start : start + values.numel()] = values

    def write_bytes(self, key: str, start: int, data: memoryview) -> None:
        raw = self._tensors[key].view(-1).view(torch.uint8)
        raw[start : start + len(data)] = torch.frombuffer(data, dtype=torch.uint8)

    def commit(self) -> None:
        self._target.update(self._tensors)

    def abort(self) -> None:
        self._tensors.clear()


def open_sink(
    output: Path | dict[str, torch.Tensor], layout: Layout, metadata: Mapping[str, str], durable: bool
) -> Sink:
    """The sink for a job's output."""
    if isinstance(output, dict):
        return MemorySink(output, layout)
    return CheckpointWriter(output, layout, metadata, durable=durable)
