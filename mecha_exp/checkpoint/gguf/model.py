"""A GGUF file as a state dict: plain numbers as they lie there, Q8_0 as the numbers of its codes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from mecha_exp.checkpoint.dtypes import stored_bytes
from mecha_exp.checkpoint.gguf.header import GgufHeader, parse_header
from mecha_exp.checkpoint.gguf.types import BLOCK, BLOCK_BYTES, PLAIN, Q8_0, decode_q8_0
from mecha_exp.checkpoint.model import ListedSource
from mecha_exp.checkpoint.positional import (
    FileRegion,
    byte_view,
    file_changed,
    fill_by_units,
    require_little_endian,
)
from mecha_exp.checkpoint.safetensors.header import TensorInfo, open_regular

OWN_FIELDS = "mecha_"
"""The beginning of the names of the fields that say how a merged model was made."""

_BLOCKS_AT_ONCE = 1 << 15


class GgufModel(ListedSource):
    """One GGUF file of F32, F16, BF16 and Q8_0; its keys are llama.cpp's names of tensors.

    Tensors of Q8_0 read as float32, code times scale in float32 arithmetic, as the package gguf dequantises
    them; of the file only the blocks that are asked for are read.

    Attributes:
        header: its fields and tensors.
    """

    path: Path

    def __init__(self, path: str | os.PathLike[str]) -> None:
        require_little_endian()
        self.path = Path(path)
        self.name = str(self.path)
        self.files = (self.path,)
        self._file = open_regular(path)
        try:
            self.header: GgufHeader = parse_header(self._file)
        except BaseException:
            self._file.close()
            raise
        self.identity = self._file.identity
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

    def check_unchanged(self) -> None:
        if not self._file.is_unchanged():
            raise file_changed(self.path)

    def close(self) -> None:
        self._file.close()

    def _info_of(self, key: str) -> TensorInfo:
        tensor = self.header.tensors[key]
        dtype = "F32" if tensor.kind == Q8_0 else PLAIN[tensor.kind].dtype
        return TensorInfo(dtype, tensor.shape, tensor.offset, stored_bytes(dtype, tensor.shape))
