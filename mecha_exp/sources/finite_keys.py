"""A source without the keys that hold NaN or infinity."""

from __future__ import annotations

import math
from typing import Any

import torch

from mecha_exp.checkpoint import is_arithmetic, torch_dtype
from mecha_exp.sources.source import _LOOK, Source


class FiniteSource:
    """The keys of another source whose values are all finite; made by looking at all of them.

    Attributes:
        spoilt: the other keys.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._finite = {key: None for key in source.keys() if _is_finite(source, key)}
        self.spoilt = frozenset(source.keys()) - self._finite.keys()
        self.keys = self._finite.keys

    def __contains__(self, key: str) -> bool:
        return key in self._finite

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def _is_finite(source: Source, key: str) -> bool:
    info = source.info(key)
    if not is_arithmetic(info.dtype):
        return True
    count = math.prod(info.shape)
    tile = torch.empty(min(count, _LOOK), dtype=torch_dtype(info.dtype))
    for start in range(0, count, _LOOK):
        part = tile[: min(_LOOK, count - start)]
        source.read_into(key, start, part)
        if not (part if part.dtype.itemsize > 1 else part.float()).isfinite().all():
            return False
    return True
