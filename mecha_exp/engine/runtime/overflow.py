"""Values too large or too small for a dtype: how many there are, and how they are stored."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

import torch


@lru_cache
def overflows_from(dtype: torch.dtype, compute_dtype: torch.dtype) -> float:
    """A magnitude below which every number fits in `dtype`: that of its largest one, or infinity."""
    return torch.finfo(dtype).max if dtype.itemsize < compute_dtype.itemsize else torch.inf


def loses_digits_below(dtype: torch.dtype, stored: Iterable[torch.dtype]) -> float:
    """The magnitude below which `dtype` has fewer digits; 0 where no input's dtype goes lower."""
    least = torch.finfo(dtype).tiny
    return least if any(torch.finfo(each).tiny < least for each in stored) else 0.0


@lru_cache
def saturates(dtype: torch.dtype) -> bool:
    """Whether what is too large becomes the largest number: so it is with e4m3fn, since torch 2.13."""
    return math.isfinite(torch.tensor(torch.inf).to(dtype).float())


def count_lost(exact: torch.Tensor, stored: torch.Tensor) -> int:
    """How many values are stored as NaN or infinity, or as the largest number since they are too large.

    Args:
        exact: as they were before they were rounded.
    """
    lost = ~stored.to(exact.dtype).isfinite()  # a float8 cannot be asked
    if saturates(stored.dtype):
        lost |= ~(exact.abs() <= _rounds_to_largest(stored.dtype))
    return int(lost.sum())


def unify_nan(values: torch.Tensor) -> None:
    """Give all NaN the same bits: kernels leave them with bits of their own."""
    if values.element_size() > 1:
        values.masked_fill_(values.isnan(), torch.nan)
    else:  # which float8 does not have
        values.copy_(values.float().nan_to_num_(torch.nan, torch.inf, -torch.inf))


@lru_cache
def _rounds_to_largest(dtype: torch.dtype) -> float:
    """The greatest number that is nearer to the largest one of a dtype than to what would follow it."""
    info = torch.finfo(dtype)
    _, exponent = math.frexp(info.max)
    return info.max + math.ldexp(info.eps, exponent - 1) / 2
