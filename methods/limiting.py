"""Holding values between those of others."""

from functools import reduce

import torch
from torch import Tensor

from mecha_exp import Parameter, Return, merge_method
from mecha_exp.methods.parameters import Model


def lower(a: Tensor, b: Tensor) -> Tensor:
    """The entry-wise minimum; of two equal entries the first."""
    return torch.where(b < a, b, a)


def higher(a: Tensor, b: Tensor) -> Tensor:
    """The entry-wise maximum; of two equal entries the first."""
    return torch.where(b > a, b, a)


def _clamped(a: Tensor, bounds: tuple[Tensor, ...], stiffness: float) -> Tensor:
    lowest, highest = reduce(lower, bounds), reduce(higher, bounds)
    if stiffness:
        mean = sum(bounds) / len(bounds)
        above, below = highest, lowest  # of the bounds around their mean the nearest ones
        for bound in bounds:
            above = torch.where((bound >= mean) & (bound < above), bound, above)
            below = torch.where((bound <= mean) & (bound > below), bound, below)
        highest = highest + stiffness * (above - highest)
        lowest = lowest + stiffness * (below - lowest)
    return lower(higher(a, lowest), highest)


Stiffness = Parameter(
    float,
    ge=0,
    le=1,
    help="0 holds values between the outermost bounds, 1 between those nearest to their mean",
)


@merge_method(elementwise=True)
def clamp(a: Model, *bounds: Model, stiffness: Stiffness = 0.0) -> Return(Tensor):
    """a, not below the smallest and not above the largest of the bounds, entry by entry.

    `stiffness` draws the limits in, towards the bounds that lie next to the mean of all bounds.
    Source: sd-mecha.
    """
    return _clamped(a, bounds, stiffness)


@merge_method(elementwise=True)
def clip(a: Model, *bounds: Model, stiffness: Stiffness = 0.0) -> Return(Tensor):
    """The other name of `clamp`.

    Source: sd-mecha.
    """
    return _clamped(a, bounds, stiffness)
