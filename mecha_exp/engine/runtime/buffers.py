"""The buffers of a worker, which hold one tile after another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from mecha_exp.engine.devices import CPU, is_cuda


@dataclass(frozen=True)
class Buffer:
    """Memory for one tile, as torch, a file and a compiled loop see it."""

    tensor: torch.Tensor
    view: memoryview
    address: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Buffer:
        return cls(tensor, tensor.view(torch.uint8).numpy().data, tensor.data_ptr())

    def first(self, count: int) -> Buffer:
        """The first `count` elements of the buffer."""
        return Buffer(self.tensor[:count], self.view[: count * self.tensor.itemsize], self.address)


class Scratch:
    """The buffers of one worker, by name and dtype; each tile overwrites the one before it.

    Args:
        device: where the tiles go.
        wait: waits for the device, which may still read from the buffers or write to them.
    """

    def __init__(self, device: str = CPU, wait: Callable[[], None] = lambda: None) -> None:
        self._pinned = is_cuda(device)
        self._wait = wait
        self._later: list[Callable[[], None]] = []
        self._memory: dict[tuple[object, torch.dtype], Buffer] = {}
        self._buffers: dict[tuple[object, torch.dtype], Buffer] = {}

    def take(self, name: object, dtype: torch.dtype, count: int) -> Buffer:
        """A buffer of `count` elements; it still has the values of the last tile."""
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.tensor.shape[0] != count:
            memory = self._memory.get((name, dtype))
            if memory is None or memory.tensor.shape[0] < count:
                memory = Buffer.of(torch.empty(count, dtype=dtype, pin_memory=self._pinned))
                self._memory[name, dtype] = memory
            buffer = self._buffers[name, dtype] = memory.first(count)
        return buffer

    def after(self, action: Callable[[], None]) -> None:
        """Do something once the device has done this step."""
        self._later.append(action)

    def settle(self) -> None:
        """End a step."""
        self._wait()
        while self._later:
            self._later.pop(0)()


def widen(stored: torch.Tensor, out: torch.Tensor) -> None:
    """Fill `out` with the values of a flat tensor; bytes are looked up, torch takes nine times as long."""
    if stored.dtype.itemsize > 1:
        out.copy_(stored)
        return
    table = torch.arange(256, dtype=torch.uint8).view(stored.dtype).to(out.dtype)
    np.take(table.numpy(), stored.view(torch.uint8).numpy(), out=out.numpy(), mode="clip")
