"""Models that differ in their vocabulary: a missing output layer, more or fewer rows.

A language model may use its embedding as its output layer and store it once (tied), and fine-tuning may have
added tokens. Neither can be merged with a model that is otherwise without a decision, which is the user's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from mecha_exp.checkpoint import TensorInfo, stored_bytes, torch_dtype
from mecha_exp.checkpoint.positional import FileRegion
from mecha_exp.sources.source import Source


def as_stored(source: Source) -> Source:
    """A source as its file has it."""
    return source.original if isinstance(source, VocabularyView) else source


class VocabularyView:
    """Another source with keys that it lends a tensor of its own, without some keys, or with other rows.

    Args:
        source: what is adapted.
        lent: new keys, and the key whose tensor each is.
        hidden: keys that are left out.
        rows: of keys that get another number of rows that number, and who has those that are missing.
    """

    def __init__(
        self,
        source: Source,
        lent: Mapping[str, str] | None = None,
        hidden: Collection[str] = (),
        rows: Mapping[str, tuple[int, Source]] | None = None,
    ) -> None:
        self._source = source
        self._lent = dict(lent or {})
        self._rows = dict(rows or {})
        self._keys = dict.fromkeys([key for key in source.keys() if key not in hidden] + list(self._lent))
        self.keys = self._keys.keys
        self.original = as_stored(source)

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def info(self, key: str) -> TensorInfo:
        info = self._source.info(self._lent.get(key, key))
        if key not in self._rows:
            return info
        shape = (self._rows[key][0], *info.shape[1:])
        return replace(info, shape=shape, nbytes=stored_bytes(info.dtype, shape))

    def read_into(self, key: str, start: int, out: torch.Tensor) -> None:
        own = self._lent.get(key, key)
        has = max(0, min(self._source.info(own).numel - start, out.numel()))
        if has:
            self._source.read_into(own, start, out[:has])
        if has < out.numel():
            donor = self._rows[key][1]
            rest = torch.empty(out.numel() - has, dtype=torch_dtype(donor.info(key).dtype))
            donor.read_into(key, start + has, rest)
            out[has:] = rest

    def read_bytes_into(self, key: str, start: int, view: memoryview) -> None:
        dtype = torch_dtype(self.info(key).dtype)
        values = torch.empty(len(view) // dtype.itemsize, dtype=dtype)
        self.read_into(key, start // dtype.itemsize, values)
        view[:] = values.view(torch.uint8).numpy().data

    def region(self, key: str) -> FileRegion | None:
        return None if key in self._rows else self._source.region(self._lent.get(key, key))
