"""What other methods need to know of a whole tensor before they can go through it tile by tile."""

import torch
from torch import Tensor

from mecha_exp import Parameter, Return, merge_method, reduction
from mecha_exp.nodes import Node

DIGIT_BITS = 16


@reduction(sums=True)
def dot(a: Parameter(Tensor), b: Parameter(Tensor)) -> Return(Tensor, "param"):
    """The inner product <a, b> over the whole tensor, accumulated in float64."""
    return a.double() * b.double()


@reduction(sums=True)
def squared_norm(a: Parameter(Tensor)) -> Return(Tensor, "param"):
    """|a|^2 over the whole tensor, accumulated in float64."""
    return a.double().square()


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
    digit, before = _find(total, rank)
    prefix = (prefix << DIGIT_BITS) | digit
    if rounds_left == 1:
        return torch.tensor(prefix, dtype=_bits_dtype(dtype)).view(dtype)
    return torch.tensor([rounds_left - 1, prefix, rank - before])


def _find(counts: Tensor, rank: int) -> tuple[int, int]:
    """The bin of the `rank`-th entry, and how many entries lie in the bins before it."""
    chunks = counts.view(
        1 << (DIGIT_BITS // 2), -1
    )  # the sums of chunks first: most bins are never summed up
    chunk, before = _search(chunks.sum(1), rank)
    digit, inside = _search(chunks[chunk], rank - before)
    return chunk * chunks.shape[1] + digit, before + inside


def _search(counts: Tensor, rank: int) -> tuple[int, int]:
    cumulated = counts.cumsum(0)
    found = int(torch.searchsorted(cumulated, rank))
    return found, int(cumulated[found - 1]) if found else 0


@reduction(histogram=1 << DIGIT_BITS, rounds=lambda dtype: _rounds(dtype), finish=_narrow)
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
        return bits >> (8 * a.dtype.itemsize - DIGIT_BITS)
    rounds_left, prefix, _ = state.unbind()
    shift = DIGIT_BITS * (rounds_left - 1)
    digit = (bits >> shift) & ((1 << DIGIT_BITS) - 1)
    return torch.where((bits >> (shift + DIGIT_BITS)) == prefix, digit, -1)


def _rounds(dtype: torch.dtype) -> int:
    return 8 * dtype.itemsize // DIGIT_BITS


def _bits_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.int32 if dtype.itemsize == 4 else torch.int64


def _rank(count: int, k: float) -> int:
    return max(int((1 - k) * count), 1)
