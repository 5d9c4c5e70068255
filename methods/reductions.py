"""What other methods need to know of a whole tensor before they can go through it tile by tile."""

import torch
from torch import Tensor

from mecha_exp import Parameter, Return, merge_method, reduction
from mecha_exp.nodes import Node

DIGIT_BITS = 16


@reduction
def dot(a: Parameter(Tensor), b: Parameter(Tensor)) -> Return(Tensor, "param"):
    """The inner product <a, b> over the whole tensor, accumulated in float64."""
    return (a.double() * b.double()).sum()


@reduction
def squared_norm(a: Parameter(Tensor)) -> Return(Tensor, "param"):
    """|a|^2 over the whole tensor, accumulated in float64."""
    return a.double().square().sum()


@merge_method(elementwise=True, register=False)
def square_root(a: Parameter(Tensor)) -> Return(Tensor):
    """The entry-wise square root."""
    return a.sqrt()


@merge_method(composite=True)
def norm(a: Parameter(Tensor)) -> Return(Tensor, "param"):
    """The Euclidean norm |a| over the whole tensor."""
    root: Node = square_root(squared_norm(a))
    return root


def _narrow(total: Tensor, state: Tensor | None, count: int, dtype: torch.dtype, k: float) -> Tensor:
    """The next digit of the k-th magnitude, from the histogram of that digit."""
    rounds_left, prefix, rank = state.tolist() if state is not None else (_rounds(dtype), 0, _rank(count, k))
    cumulated = total.cumsum(0)
    digit = int(torch.searchsorted(cumulated, rank))
    prefix = (prefix << DIGIT_BITS) | digit
    if rounds_left == 1:
        return torch.tensor(prefix, dtype=_bits_dtype(dtype)).view(dtype)
    before = int(cumulated[digit - 1]) if digit else 0
    return torch.tensor([rounds_left - 1, prefix, rank - before])


@reduction(rounds=lambda dtype: _rounds(dtype), finish=_narrow)
def kth_magnitude(
    a: Parameter(Tensor), k: Parameter(float, ge=0, le=1), *, state: Tensor | None = None
) -> Return(Tensor, "param"):
    """The magnitude t that the largest `k` of the entries reach: abs(a) >= t keeps about k n of them.

    t is the order statistic of abs(a) at the ascending index max(int((1 - k) n), 1), exactly, as in
    sd-mecha. The bits of a non-negative float sort as its value does, so a radix selection finds it with a
    histogram of 16 bits a round: integers only, and the same whatever the order of the blocks.
    """
    bits = a.abs().view(_bits_dtype(a.dtype))
    if state is None:
        return torch.bincount(bits >> (8 * a.dtype.itemsize - DIGIT_BITS), minlength=1 << (DIGIT_BITS - 1))
    rounds_left, prefix, _ = state.tolist()
    shift = DIGIT_BITS * (rounds_left - 1)
    inside = bits[(bits >> (shift + DIGIT_BITS)) == prefix]
    return torch.bincount((inside >> shift) & ((1 << DIGIT_BITS) - 1), minlength=1 << DIGIT_BITS)


def _rounds(dtype: torch.dtype) -> int:
    return 8 * dtype.itemsize // DIGIT_BITS


def _bits_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.int32 if dtype.itemsize == 4 else torch.int64


def _rank(count: int, k: float) -> int:
    return max(int((1 - k) * count), 1)
