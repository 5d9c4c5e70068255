"""A GGUF file as a state dict: plain numbers as they lie there, codes as the numbers that they stand for."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mecha_exp.checkpoint.dtypes import stored_bytes
from mecha_exp.checkpoint.gguf.header import GgufHeader, parse_header
from mecha_exp.checkpoint.gguf.types import dequantised, type_of
from mecha_exp.checkpoint.model import FileModel
from mecha_exp.checkpoint.positional import FileRegion, byte_view, fill_by_units
from mecha_exp.checkpoint.safetensors.header import TensorInfo

OWN_FIELDS = "mecha_"
"""The beginning of the names of the fields that say how a merged model was made."""

_DECODED = 1 << 16
"""The numbers that are dequantised at once: memory does not grow, and gguf is fastest with about as many."""


class GgufModel(FileModel):
    """One GGUF file; its keys are llama.cpp's names of tensors.

    Tensors of codes read as float32, to the bit as the package gguf dequantises them; of the file only the
    blocks that are asked for are read.

    Attributes:
        header: its fields and tensors.
    """

    def _read_header(self) -> None:
        self.header: GgufHeader = parse_header(self._file)
        self._infos = {key: self._info_of(key) for key in self.header.tensors}
        kinds = {key: type_of(tensor.kind) for key, tensor in self.header.tensors.items()}
        self.codes = {key: kind.name for key, kind in kinds.items() if kind.block > 1}

    @property
    def metadata(self) -> Mapping[str, str]:
        texts = {name: self.header.text(name) for name in self.header.fields if name.startswith(OWN_FIELDS)}
        return {name: text for name, text in texts.items() if text is not None}

    def read_bytes_into(self, key: str, start: int, view: memoryview) -> None:
        offset = self.info(key).offset
        if key not in self.codes:
            self._file.read_into(offset + start, view)
            return
        number = self.header.tensors[key].kind
        kind = type_of(number)

        def decode(first: int, stop: int) -> torch.Tensor:
            blocks = torch.empty((stop - first) * kind.nbytes, dtype=torch.uint8)
            self._file.read_into(offset + first * kind.nbytes, byte_view(blocks))
            return dequantised(blocks, number)

        fill_by_units(view, start, kind.block * torch.float32.itemsize, _DECODED // kind.block, decode)

    def region(self, key: str) -> FileRegion | None:
        return None if key in self.codes else self._file.region(self.info(key).offset)

    def _info_of(self, key: str) -> TensorInfo:
        tensor = self.header.tensors[key]
        dtype = type_of(tensor.kind).dtype
        return TensorInfo(dtype, tensor.shape, tensor.offset, stored_bytes(dtype, tensor.shape))
