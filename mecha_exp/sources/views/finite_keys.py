"""A source without the keys that hold NaN or infinity."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch

from mecha_exp.checkpoint import is_arithmetic, torch_dtype
from mecha_exp.sources.source import Source, SourceView

_SCANNED_ELEMENTS = 1 << 20  # are read at once


class FiniteSource(SourceView):
    """The keys of another source whose values are all finite. All of them are read to find out.

    Attributes:
        spoilt: the other keys.
    """

    def __init__(self, original: Source) -> None:
        super().__init__(original)
        self._finite = {key: None for key in original.keys() if _is_finite(original, key)}
        self.spoilt = frozenset(original.keys()) - self._finite.keys()

    def keys(self) -> Collection[str]:
        return self._finite.keys()

    def read_into(self, key: str, start: int, out: torch.Tensor) -> None:
        self._original.read_into(key, start, out)


def _is_finite(source: Source, key: str) -> bool:
    info = source.info(key)
    if not is_arithmetic(info.dtype):
        return True
    count = math.prod(info.shape)
    tile = torch.empty(min(count, _SCANNED_ELEMENTS), dtype=torch_dtype(info.dtype))
    for start in range(0, count, _SCANNED_ELEMENTS):
        part = tile[: min(_SCANNED_ELEMENTS, count - start)]
        source.read_into(key, start, part)
        if not (part if part.dtype.itemsize > 1 else part.float()).isfinite().all():
            return False
    return True
