"""What other methods need to know of a whole tensor before they can go through it tile by tile."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mecha_exp import MergeMethod, Parameter, Return, merge_method, reduction
from mecha_exp.methods.parameters import Kept, Model
from mecha_exp.nodes import Node

DIGIT_BITS = 16


@reduction(sums=True)
def dot(a: Model, b: Model) -> Return(Tensor, "param"):
    """The inner product <a, b> over the whole tensor, accumulated in float64."""
    return a.double() * b.double()


@reduction(sums=True)
def squared_norm(a: Model) -> Return(Tensor, "param"):
    """|a|^2 over the whole tensor, accumulated in float64."""
    return a.double().square()


@reduction(sums=True, register=False)
def sum_of_magnitudes(a: Model) -> Return(Tensor, "param"):
    """The L1 norm, accumulated in float64."""
    return a.double().abs()


@reduction(sums=True)
def gram(*models: Model) -> Return(Tensor, "param"):
    """All inner products <model_i, model_j> with i <= j, row by row, in one pass; see `gram_matrix`."""
    wide = [model.double() for model in models]
    return tuple(a * b for i, a in enumerate(wide) for b in wide[i:])


def gram_matrix(products: Tensor, count: int) -> Tensor:
    """The symmetric matrix of inner products, [count, count], from what `gram` gives."""
    full = products.new_zeros(count, count)
    row, column = torch.triu_indices(count, count)
    full[row, column] = products.reshape(-1)
    full[column, row] = products.reshape(-1)
    return full


@merge_method(elementwise=True, register=False)
def square_root(a: Model) -> Return(Tensor):
    """The entry-wise square root."""
    return a.sqrt()


@merge_method(composite=True)
def norm(a: Model) -> Return(Tensor, "param"):
    """The Euclidean norm |a| over the whole tensor."""
    root: Node = square_root(squared_norm(a))
    return root


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


def _rounds(dtype: torch.dtype) -> int:
    return 8 * dtype.itemsize // DIGIT_BITS


def _bits_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.int32 if dtype.itemsize == 4 else torch.int64


def order_statistic(
    rank: Callable[..., int], register: bool = False
) -> Callable[[Callable[..., Any]], MergeMethod]:
    """A `reduction` that finds the magnitude of some rank, exactly.

    The bits of a non-negative float sort as its value does, so a radix selection finds it with a histogram of
    16 bits a round: integers only, and the same whatever the order of the blocks. The function of the
    reduction is `digit_of`.

    Args:
        rank: (count, **hyperparameters) -> which magnitude, 1 being the smallest; the result is infinity for
            one above `count`, the number of entries that are counted.
    """

    def finish(total: Tensor, state: Tensor | None, count: int, dtype: torch.dtype, **given: Any) -> Tensor:
        if state is None:
            counted = int(total.sum())
            wanted = rank(counted, **given)
            state = torch.tensor([_rounds(dtype), 0, wanted if wanted <= counted else 0])
        rounds_left, prefix, place = state.tolist()
        digit, before = _find(total, place) if place else (0, 0)
        prefix = (prefix << DIGIT_BITS) | digit
        if rounds_left > 1:
            return torch.tensor([rounds_left - 1, prefix, place - before])
        found = torch.tensor(prefix, dtype=_bits_dtype(dtype)).view(dtype)
        return found if place else torch.full_like(found, torch.inf)

    return reduction(histogram=1 << DIGIT_BITS, rounds=_rounds, finish=finish, register=register)


def digit_of(a: Tensor, state: Tensor | None) -> Tensor:
    """The next digit of each magnitude whose digits so far are those looked for; -1 for the others."""
    bits = a.abs().view(_bits_dtype(a.dtype))
    if state is None:
        return bits >> (8 * a.dtype.itemsize - DIGIT_BITS)
    rounds_left, prefix, _ = state.unbind()
    shift = DIGIT_BITS * (rounds_left - 1)
    digit = (bits >> shift) & ((1 << DIGIT_BITS) - 1)
    return torch.where((bits >> (shift + DIGIT_BITS)) == prefix, digit, -1)


@order_statistic(lambda count, k: max(int((1 - k) * count), 1), register=True)
def kth_magnitude(a: Model, k: Kept, *, state: Tensor | None = None) -> Return(Tensor, "param"):
    """The magnitude t that the largest `k` of the entries reach: abs(a) >= t keeps about k n of them.

    t is the order statistic of abs(a) at the ascending index max(int((1 - k) n), 1), exactly, as in
    sd-mecha.
    """
    return digit_of(a, state)


@order_statistic(lambda count, density: count + 1 - max(int(density * count), 1))
def least_kept(a: Model, density: Parameter(float), *, state: Tensor | None = None) -> Return(
    Tensor, "param"
):
    """The smallest of the int(density n) largest magnitudes, at least of one."""
    return digit_of(a, state)


@order_statistic(lambda count, density: count + 1 - int(density * count))
def least_chosen(a: Model, density: Parameter(float), *, state: Tensor | None = None) -> Return(
    Tensor, "param"
):
    """The smallest of the int(density n) largest magnitudes among the n that are not 0."""
    digit = digit_of(a, state)
    return torch.where(a == 0, -1, digit)


@order_statistic(lambda count, part: int(part * (count - 1)) + 1)
def quantile(a: Model, part: Parameter(float), *, state: Tensor | None = None) -> Return(Tensor, "param"):
    """The magnitude at the ascending index int(part (n - 1)), counted from 0."""
    return digit_of(a, state)
