"""A state dict in memory as a source, whole or in place of some tensors of another one."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mecha_exp.checkpoint import TensorInfo, dtype_name
from mecha_exp.checkpoint.model import ListedSource
from mecha_exp.checkpoint.positional import FileRegion
from mecha_exp.errors import CheckpointError
from mecha_exp.graph.nodes import InMemory
from mecha_exp.sources.source import Source, SourceView, read_values_as_bytes


class MemorySource(ListedSource):
    """A state dict in memory."""

    path = None
    files = ()
    identity = None

    def __init__(self, model: InMemory) -> None:
        self.name = model.name
        self._tensors = {key: _dense(self.name, key, tensor) for key, tensor in model.state_dict.items()}
        self._infos = {
            key: TensorInfo(dtype_name(t.dtype), tuple(t.shape), 0, t.nbytes)
            for key, t in self._tensors.items()
        }

    def read_into(self, key: str, start: int, out: torch.Tensor) -> None:
        out.copy_(self._tensors[key].view(-1)[start : start + out.numel()])

    def read_bytes_into(self, key: str, start: int, view: memoryview) -> None:
        raw = self._tensors[key].reshape(-1).view(torch.uint8)[start : start + len(view)]
        view[:] = raw.numpy().data

    def check_unchanged(self) -> None:
        """Nothing to check: the tensors are held here."""

    def close(self) -> None:
        """Nothing to close."""


class PartlyInMemory(SourceView):
    """Another source with tensors in memory at some of its keys.

    Args:
        original: the source to read.
        tensors: by key, in place of its own.
    """

    def __init__(self, original: Source, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(original)
        self._tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}

    def info(self, key: str) -> TensorInfo:
        info = self._original.info(key)
        if (tensor := self._tensors.get(key)) is None:
            return info
        return TensorInfo(dtype_name(tensor.dtype), tuple(tensor.shape), info.offset, tensor.nbytes)

    def read_into(self, key: str, start: int, out: torch.Tensor) -> None:
        if key not in self._tensors:
            self._original.read_into(key, start, out)
        else:
            out.copy_(self._tensors[key].view(-1)[start : start + out.numel()])

    def read_bytes_into(self, key: str, start: int, view: memoryview) -> None:
        if key not in self._tensors:
            self._original.read_bytes_into(key, start, view)
        else:
            read_values_as_bytes(self, key, start, view)

    def region(self, key: str) -> FileRegion | None:
        return None if key in self._tensors else self._original.region(key)


def _dense(name: str, key: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as plain memory on the processor.

    Raises:
        CheckpointError: its values do not lie in memory one by one, as those of a sparse tensor.
    """
    kinds = {
        "quantized": (tensor.is_quantized, "its dequantize()"),
        "without values (on the meta device)": (tensor.is_meta, "a tensor that has values"),
        str(tensor.layout).removeprefix("torch."): (tensor.layout is not torch.strided, "its to_dense()"),
    }
    for kind, (is_of_kind, cure) in kinds.items():
        if is_of_kind:
            raise CheckpointError(
                f"{name}: the tensor '{key}' is {kind}, and only dense tensors can be merged. Pass {cure}."
            )
    return tensor.detach().cpu().contiguous()
