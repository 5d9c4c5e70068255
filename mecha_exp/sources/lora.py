"""A LoRA file read as the differences that it makes to the tensors of a model."""

from __future__ import annotations

from collections.abc import Collection

import torch

from mecha_exp.architectures.lora_deltas import Deltas
from mecha_exp.checkpoint import TensorInfo, dtype_name, stored_bytes, torch_dtype
from mecha_exp.checkpoint.positional import byte_view
from mecha_exp.sources.source import DerivedSource, Source, infos_of
from mecha_exp.system.byte_cache import ByteCache

AT_A_TIME = 4
"""So many of the largest differences are kept: workers share the tiles of a few keys."""


class AdapterSource(DerivedSource):
    """A source whose keys are tensors of a model, and whose values what a LoRA adds to them.

    Its keys are those that it changes; asked for any other tensor of the model it gives zeros. A difference
    is made as a whole, in float32 or in what is finer in the file, and kept until others need the room.

    Attributes:
        unused: keys of modules that change nothing that the model has, such as a text encoder beside a UNet.

    Args:
        budget: how many bytes of differences are kept at most.

    Raises:
        CheckpointError: the file has keys of no module, or modules that do not fit the model.
    """

    def __init__(self, original: Source, deltas: Deltas, budget: int) -> None:
        infos = infos_of(original)
        deltas.check({key: info.shape for key, info in infos.items()}, original.name)
        super().__init__(original)
        self._deltas = deltas
        finer = any(torch_dtype(info.dtype) == torch.float64 for info in infos.values())
        self._dtype = torch.float64 if finer else torch.float32
        self._changed = dict.fromkeys(deltas.changed(infos))
        self.unused = tuple(deltas.unused(infos))
        largest = max((self.info(key).nbytes for key in self._changed), default=0)
        self._kept = ByteCache(min(budget, AT_A_TIME * largest))

    def keys(self) -> Collection[str]:
        return self._changed.keys()

    def __contains__(self, key: str) -> bool:
        return key in self._deltas

    def info(self, key: str) -> TensorInfo:
        dtype, shape = dtype_name(self._dtype), self._deltas.shape(key)
        return TensorInfo(dtype, shape, 0, stored_bytes(dtype, shape))

    def read_into(self, key: str, start: int, out: torch.Tensor) -> None:
        if key in self._changed:
            made = self._kept.get(key, lambda: self._make(key))
            out.copy_(made[start : start + out.numel()])
        else:
            out.zero_()

    def read_bytes_into(self, key: str, start: int, view: memoryview) -> None:
        values = torch.empty(len(view) // self._dtype.itemsize, dtype=self._dtype)
        self.read_into(key, start // self._dtype.itemsize, values)
        view[:] = byte_view(values)

    def _make(self, key: str) -> torch.Tensor:
        return self._deltas.delta(key, self._original.__contains__, self._read).to(self._dtype).reshape(-1)

    def _read(self, key: str) -> torch.Tensor:
        info = self._original.info(key)
        stored = torch.empty(info.shape, dtype=torch_dtype(info.dtype))
        if stored.numel():
            self._original.read_into(key, 0, stored.view(-1))
        return stored.to(self._dtype)
