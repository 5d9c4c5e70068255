# mypy: disable-error-code="no-untyped-call"
"""Copies of models on a GPU: one for each tensor and evaluation, and of the next model beforehand.

A tensor is copied through pinned memory, so that the copies need not wait for each other. While a model is
measured, a thread copies the next one on a stream of its own. Tests run it on a simulated GPU, where a copy
that comes too early always shows, and on a real one where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

CUDA = "cuda"
ROOM = 1.1
"""The memory that the next model must find beside what measuring took, as a multiple of its own bytes."""

_transfers: dict[torch.device, Transfers] = {}


def transfers_to(device: torch.device) -> Transfers:
    """The copies on a device that is not the CPU."""
    if device not in _transfers:
        _transfers[device] = Transfers(device)
    return _transfers[device]


def expect(model: Mapping[str, Tensor]) -> None:
    """Begin to copy the model that is measured next to the GPUs on which models have been measured."""
    for transfers in _transfers.values():
        transfers.expect(model)


class _Copy(NamedTuple):
    """A tensor on the device.

    Attributes:
        tensor: the copy.
        dtype: that was asked for.
        version: of the tensor that was copied: another one was changed since.
    """

    tensor: Tensor
    dtype: torch.dtype
    version: int


class Transfers:
    """The copies of the present model and of the next one on a device; they go with the tensors themselves.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._present, self._next = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
        self._dtypes: Mapping[str, torch.dtype] = {}
        self._thread = ThreadPoolExecutor(1, "transfers")
        self._coming: Future[None] | None = None
        self._stream = torch.cuda.Stream(device) if device.type == CUDA else None
        self._taken: int | None = None

    def moved(self, weights: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        """The tensors of a model on the device, by key, in these dtypes; lets go of copies of another one."""
        self.wait()
        self._dtypes, held = dtypes, WeakTensorKeyDictionary()
        for key, dtype in dtypes.items():
            tensor = weights[key]
            known = self._present.get(tensor) or self._next.pop(tensor, None)
            if known is not None and (known.dtype, known.version) == (dtype, _version(tensor)):
                held[tensor] = known
        self._present = held  # before others need the memory
        for key, dtype in dtypes.items():
            if weights[key] not in held:
                held[weights[key]] = self._copied(weights[key], dtype)
        return {key: held[weights[key]].tensor for key in dtypes}

    def expect(self, model: Mapping[str, Tensor]) -> None:
        """Begin to copy the model that is measured next, if there is room for it beside the present one."""
        self.wait()
        tensors = {key: model[key] for key in self._dtypes.keys() & model.keys()}
        needed = sum(tensor.numel() * self._dtypes[key].itemsize for key, tensor in tensors.items())
        if self._device.type == CUDA and tensors and self._has_room(needed):
            self._coming = self._thread.submit(self.fetch, tensors)

    def fetch(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors of the next model, aside from what the device is doing."""
        coming = WeakTensorKeyDictionary()
        with suppress(torch.OutOfMemoryError), self._aside():
            for key, tensor in tensors.items():
                coming[tensor] = self._copied(tensor, self._dtypes[key])
        self._next = coming

    def wait(self) -> None:
        """Wait for the copies that have begun."""
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.result()

    def _copied(self, tensor: Tensor, dtype: torch.dtype) -> _Copy:
        pinned = tensor.pin_memory() if self._device.type == CUDA and tensor.device.type == "cpu" else tensor
        copy = pinned.to(self._device, non_blocking=True).to(dtype)
        return _Copy(copy, dtype, _version(tensor))

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Work on a stream beside that of the networks, and wait for the end of it."""
        if self._stream is None:
            yield
            return
        # memory that a network has given back may still be read by what it has asked the GPU for
        self._stream.wait_stream(torch.cuda.default_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def _has_room(self, needed: int) -> bool:
        """Whether so many bytes are there beside what measuring one model took."""
        if self._taken is None:  # no model was copied beforehand yet
            self._taken = torch.cuda.max_memory_allocated(self._device)
        free, _ = torch.cuda.mem_get_info(self._device)
        return self._taken + ROOM * needed < free + torch.cuda.memory_reserved(self._device)


def _version(tensor: Tensor) -> int:
    """How often a tensor was changed in place; 0 for a tensor of inference mode, which does not count."""
    return 0 if tensor.is_inference() else tensor._version
