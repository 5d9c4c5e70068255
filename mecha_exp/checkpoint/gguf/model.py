"""A GGUF file as a state dict: plain numbers as they lie there, Q8_0 as the numbers of its codes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mecha_exp.checkpoint.dtypes import stored_bytes
from mecha_exp.checkpoint.gguf.header import GgufHeader, parse_header
from mecha_exp.checkpoint.gguf.types import BLOCK, BLOCK_BYTES, PLAIN, Q8_0, decode_q8_0
from mecha_exp.checkpoint.model import FileModel
from mecha_exp.checkpoint.positional import FileRegion, byte_view, fill_by_units
from mecha_exp.checkpoint.safetensors.header import TensorInfo

OWN_FIELDS = "mecha_"
"""The beginning of the names of the fields that say how a merged model was made."""

_BLOCKS_AT_ONCE = 1 << 15


class GgufModel(FileModel):
    """One GGUF file of F32, F16, BF16 and Q8_0; its keys are llama.cpp's names of tensors.

    Tensors of Q8_0 read as float32, code times scale in float32 arithmetic, as the package gguf dequantises
    them; of the file only the blocks that are asked for are read.

    Attributes:
        header: its fields and tensors.
    """

    def _read_header(self) -> None:
        self.header: GgufHeader = parse_header(self._file)
        self._infos = {key: self._info_of(key) for key in self.header.tensors}
        self.codes = tuple(key for key, tensor in self.header.tensors.items() if tensor.kind == Q8_0)

    @property
    def metadata(self) -> Mapping[str, str]:
        texts = {name: self.header.text(name) for name in self.header.fields if name.startswith(OWN_FIELDS)}
        return {name: text for name, text in texts.items() if text is not None}

    def read_bytes_into(self, key: str, start: int, view: memoryview) -> None:
        offset = self.info(key).offset
        if self.header.tensors[key].kind != Q8_0:
            self._file.read_into(offset + start, view)
            return

        def decode(first: int, stop: int) -> torch.Tensor:
            blocks = torch.empty((stop - first) * BLOCK_BYTES, dtype=torch.uint8)
            self._file.read_into(offset + first * BLOCK_BYTES, byte_view(blocks))
            return decode_q8_0(blocks.reshape(-1, BLOCK_BYTES))

        fill_by_units(view, start, BLOCK * torch.float32.itemsize, _BLOCKS_AT_ONCE, decode)

    def region(self, key: str) -> FileRegion | None:
        is_coded = self.header.tensors[key].kind == Q8_0
        return None if is_coded else self._file.region(self.info(key).offset)

    def _info_of(self, key: str) -> TensorInfo:
        tensor = self.header.tensors[key]
        dtype = "F32" if tensor.kind == Q8_0 else PLAIN[tensor.kind].dtype
        return TensorInfo(dtype, tensor.shape, tensor.offset, stored_bytes(dtype, tensor.shape))
