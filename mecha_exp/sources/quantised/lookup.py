"""NF4 and FP4 of bitsandbytes: entries of a table, times the largest magnitude of their block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mecha_exp.documents import parse_json, typed
from mecha_exp.errors import CheckpointError
from mecha_exp.sources.quantised.tensor import QuantisedTensor, read_part
from mecha_exp.sources.source import Source


class LookupTensor(QuantisedTensor):
    """table[code] * largest, where `largest` is the greatest magnitude of a block of consecutive elements.

    A byte holds two codes, the first one in its upper half. With nested quantisation the magnitudes are codes
    themselves: nested_table[code] * nested_largest + offset. The shape and the sizes of the blocks stand in a
    tensor that is JSON.

    Source: bitsandbytes, `functional.py` (`QuantState`, `dequantize_4bit`).

    Args:
        source: the stored model.
        codes: the key of the codes.
        state: the key of the JSON.

    Raises:
        CheckpointError: a tensor is missing or does not fit the others.
    """

    def __init__(self, source: Source, codes: str, state: str) -> None:
        self._source, self._codes = source, codes
        described = _json_of(source, state)
        try:
            self.shape = tuple(int(size) for size in described["shape"])
            self._block = int(described["blocksize"])
            self._nested_block = int(described.get("nested_blocksize") or 0)
            self._offset = float(described.get("nested_offset") or 0.0)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{state} does not say its shape and blocks: {error!r}") from None
        blocks = -(-self.numel // max(self._block, 1))
        expected = {codes: -(-self.numel // 2), f"{codes}.absmax": blocks, f"{codes}.quant_map": 16}
        if self._nested_block:
            nested = {"nested_absmax": -(-blocks // self._nested_block), "nested_quant_map": 256}
            expected |= {f"{codes}.{name}": count for name, count in nested.items()}
        for key, count in expected.items():
            if key not in source:
                raise CheckpointError(f"{key} is missing")
            if source.info(key).numel != count:
                raise CheckpointError(f"{key} has {source.info(key).numel} elements instead of {count}")
        if source.info(f"{codes}.absmax").dtype != ("U8" if self._nested_block else "F32"):
            raise CheckpointError(f"{codes}.absmax is {source.info(f'{codes}.absmax').dtype}")
        self.keys = (*expected, state)
        self._table = source.read(f"{codes}.quant_map").float()

    def decode(self, start: int, stop: int) -> Tensor:
        first = start // 2
        packed = read_part(self._source, self._codes, first, -(-stop // 2))
        codes = torch.stack([packed >> 4, packed & 15], dim=1).view(-1)[start - 2 * first :][: stop - start]
        low = start // self._block
        largest = self._largest(low, -(-stop // self._block))
        block = torch.arange(start, stop) // self._block - low
        return self._table[codes.int()] * largest[block]

    def _largest(self, low: int, high: int) -> Tensor:
        """The greatest magnitudes of some blocks."""
        stored = read_part(self._source, f"{self._codes}.absmax", low, high)
        if not self._nested_block:
            return stored
        first = low // self._nested_block
        scales = read_part(
            self._source, f"{self._codes}.nested_absmax", first, -(-high // self._nested_block)
        ).float()
        table = self._source.read(f"{self._codes}.nested_quant_map").float()
        block = torch.arange(low, high) // self._nested_block - first
        return table[stored.int()] * scales[block] + self._offset


def _json_of(source: Source, key: str) -> dict[str, Any]:
    """The JSON in the bytes of a tensor."""
    try:
        return typed(parse_json(bytes(source.read(key).tolist())), dict[str, Any])
    except (ValueError, TypeError) as error:  # of bytes, for numbers that are none
        raise CheckpointError(f"{key} is not a mapping of JSON: {error}") from None
