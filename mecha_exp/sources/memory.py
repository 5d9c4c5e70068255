"""A state dict in memory as a source."""

from __future__ import annotations

import torch

from mecha_exp.checkpoint import TensorInfo, dtype_name
from mecha_exp.checkpoint.model import ListedSource
from mecha_exp.errors import CheckpointError
from mecha_exp.graph.nodes import InMemory


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
