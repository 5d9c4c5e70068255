"""Regions of a tensor, by rows or by rank."""

import math
from bisect import bisect_left

import torch
from torch import Tensor

from mecha_exp import Parameter, Return, Tile, factor, merge_method
from mecha_exp.extensions.merge_methods import whole_ranks
from mecha_exp.methods.linear import add_scaled, subtract
from mecha_exp.methods.parameters import Base, Model, Small

PART = 1 << 18
"""Elements that are moved at a time: as many stay in the second cache."""

Width = Parameter(
    float, ge=-1, le=1, help="size of the region as a fraction; a negative one lies before offset"
)
Offset = Parameter(float, help="where the region begins, as a fraction; it wraps around the end")
ByRank = Parameter(bool, help="regions of ranks (top_k_tensor_sum), not of rows (tensor_sum)")


def region(width: float, offset: float, count: int) -> tuple[int, int, bool]:
    """The region of `count` places: start, stop, and whether it is what lies outside of them."""
    if width < 0:
        offset, width = offset + width, -width
    offset = offset - math.floor(offset)
    if width + offset <= 1:
        return round(offset * count), round((width + offset) * count), False
    return round((width + offset - 1) * count), round(offset * count), True


@merge_method(elementwise=True, register=False)
def copy_rows(a: Model, b: Model, tile: Tile, width: Width, offset: Offset) -> Return(Tensor):
    """b in the rows of a region, a elsewhere."""
    if not tile.shape:
        return b.clone() if width > 0.5 else a.clone()
    start, stop, outside = region(width, offset, tile.shape[0])
    rows = torch.arange(tile.start, tile.stop, device=a.device) // max(math.prod(tile.shape[1:]), 1)
    chosen = ((rows >= start) & (rows < stop)) != outside
    return torch.where(chosen, b, a)


@factor(elements=lambda shape: 5 * math.prod(shape))  # sorting takes 4 of them meanwhile
def ranks_of_all(a: Model) -> Return(Tensor, "param"):
    """The place of each entry in ascending order, as int32; of equal ones the earlier comes first."""
    return whole_ranks(a.flatten())


@factor(elements=lambda shape: 6 * math.prod(shape))  # sorting takes 4 of them meanwhile, and the order 1
def sorted_entries(a: Model) -> Return(Tensor, "param"):
    """The entries from the smallest to the largest, in the order of `ranks_of_all`."""
    values = a.flatten()
    return put_in_order(values, whole_ranks(values))


def put_in_order(values: Tensor, order: Tensor) -> Tensor:
    """Each value at the place that `ranks_of_all` of a tensor of the same size gives it."""
    ordered = torch.empty_like(values)
    for places, part in zip(order.split(PART), values.split(PART), strict=True):
        ordered.index_copy_(0, places.long(), part)  # as int64, which it asks for, a part takes little
    return ordered


@merge_method(register=False)
def redistribute(
    a: Model, entries: Small, order: Small, width: Parameter(float), offset: Parameter(float)
) -> Return(Tensor):
    """a, and where the rank of the magnitude of its sorted entries lies in the window, those in an order."""
    regions = _regions_of_ranks(entries, *region(width, offset, len(entries)))
    moved = torch.empty_like(a, memory_format=torch.contiguous_format)
    parts = (tensor.reshape(-1).split(PART) for tensor in (a, order, moved))
    for values, places, target in zip(*parts, strict=True):
        chosen = torch.zeros_like(places, dtype=torch.bool)
        for part in regions:
            chosen |= (places >= part.start) & (places < part.stop)
        torch.where(chosen, entries.index_select(0, places), values, out=target)
    return moved


def _regions_of_ranks(entries: Tensor, start: int, stop: int, outside: bool) -> list[slice]:
    """Where entries in ascending order have magnitudes from rank `start` to `stop`, or where they have not.

    Rank 1 is the smallest. What is as large as an end of the region belongs to it; NaN is outside.
    """
    before, behind = _numbers_among(entries)
    numbers = entries[before:behind]
    least, largest = (_size_of_rank(numbers, rank) for rank in (start, stop))
    ends: list[tuple[float, bool]] = []
    if largest >= least:
        between = [(-least, True), (least, False)] if least > 0 else []
        ends = [(-largest, False), *between, (largest, True)]
    cuts = [before + int(torch.searchsorted(numbers, value, right=right)) for value, right in ends]
    if outside:
        cuts = [0, *cuts, len(entries)]
    return [slice(*cut) for cut in zip(cuts[::2], cuts[1::2], strict=True)]


def _numbers_among(entries: Tensor) -> tuple[int, int]:
    """Where the numbers of entries in order begin and end: before them are those NaN that have a sign.

    Where there is no radix sort those are last, too: a first entry that is a number says so.
    """
    places = range(len(entries))
    before = 0
    if entries[:1].isnan().any():
        before = bisect_left(places, True, key=lambda i: not (entries[i].isnan() and entries[i].signbit()))
    return before, bisect_left(places, True, lo=before, key=lambda i: bool(entries[i].isnan()))


def _size_of_rank(numbers: Tensor, rank: int) -> float:
    """The magnitude of a rank among numbers in ascending order; -1 for rank 0, NaN if there are fewer.

    So many smallest magnitudes are neighbours: they begin where none before is smaller than the one behind.
    """
    if not 0 < rank <= len(numbers):
        return math.nan if rank else -1.0
    starts = range(len(numbers) - rank)
    first = bisect_left(starts, True, key=lambda i: bool(-numbers[i] <= numbers[i + rank]))
    return max(abs(numbers[first].item()), abs(numbers[first + rank - 1].item()))


@merge_method(composite=True, title="Top k tensor sum")
def top_k_tensor_sum(a: Model, b: Model, width: Width = 1.0, offset: Offset = 0.0) -> Return(Tensor):
    """The values of a in the order of b, where the rank of their magnitude lies in [offset, offset + width).

    a where it does not; width 1 is a's distribution in b's order. Needs whole tensors.
    Source: sd-mecha.
    """
    return redistribute(a, sorted_entries(a), ranks_of_all(b), width=width, offset=offset)


@merge_method(composite=True, title="Tensor sum")
def tensor_sum(
    a: Model, b: Model, c: Base = None, width: Width = 0.5, offset: Offset = 0.0, top_k: ByRank = False
) -> Return(Tensor):
    """b in the rows [offset, offset + width) of axis 0, as fractions, wrapping around the end; a elsewhere.

    A number (a tensor without axes) is b if width > 0.5. c and top_k as in `copy_region`.
    Source: supermerger; sd-mecha.
    """
    return copy_region(a, b, c, width=width, offset=offset, top_k=top_k)


@merge_method(composite=True, base="c")
def copy_region(
    a: Model, b: Model, c: Base = None, width: Width = 1.0, offset: Offset = 0.0, top_k: ByRank = False
) -> Return(Tensor):
    """`tensor_sum(a, b)`, or `top_k_tensor_sum`; with c of the differences to it, added to c.

    Source: sd-mecha.
    """
    copied = top_k_tensor_sum if top_k else copy_rows
    if c is None:
        return copied(a, b, width=width, offset=offset)
    return add_scaled(c, copied(subtract(a, c), subtract(b, c), width=width, offset=offset), 1.0)
