"""The interface of a quantised tensor, and how parts of stored tensors are read for it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from mecha_exp.checkpoint import torch_dtype
from mecha_exp.sources.source import Source


class QuantisedTensor(ABC):
    """One tensor that is stored as codes.

    Attributes:
        shape: of the numbers.
        keys: the stored tensors that it is made of; its codes are the first.
    """

    shape: tuple[int, ...]
    keys: tuple[str, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @abstractmethod
    def decode(self, start: int, stop: int) -> Tensor:
        """The flattened elements from `start` to `stop`, float32; of the file only what they need is read."""


def read_part(source: Source, key: str, start: int, stop: int) -> Tensor:
    """Some of the flattened elements of a stored tensor."""
    values = torch.empty(stop - start, dtype=torch_dtype(source.info(key).dtype))
    source.read_into(key, start, values)
    return values


def widened(codes: Tensor) -> Tensor:
    """Codes as float32; those of one byte are looked up, which is faster than a conversion."""
    if codes.dtype.itemsize > 1:
        return codes.float()
    numbers = np.take(_table(codes.dtype).numpy(), codes.view(torch.uint8).numpy())
    return torch.from_numpy(numbers)


_POWERS = torch.tensor([*(math.ldexp(1.0, exponent - 127) for exponent in range(255)), math.nan])


@lru_cache
def _table(dtype: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()


def powers_of_two(exponents: Tensor) -> Tensor:
    """E8M0 scales, given as bytes: 2^(e - 127), and NaN for 255; float32."""
    return _POWERS[exponents.int()]
