"""Filters over neighbouring entries: the median of 3 along each axis, then a Gaussian."""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import zip_longest

import torch
from torch import Tensor

from mecha_exp import Return, merge_method
from mecha_exp.methods.parameters import Delta

PART = 1 << 15
"""Entries that are filtered at a time: some dozens of tensors of that size stay in the cache."""

TAIL = 4
"""The width of the Gaussian's tail, in sigmas."""


@merge_method(register=False)
def smoothed(d: Delta) -> Return(Tensor, "delta"):
    """The Gaussian (sigma 1) of the median of 3 entries along each axis, mirrored at the edges."""
    if not d.numel() or not d.ndim:
        return d.clone()
    longest = max(range(d.ndim), key=lambda axis: d.shape[axis])
    moved = d.movedim(longest, -1).contiguous()  # neighbours along the other axes are whole runs apart
    smooth = median_of_neighbours(moved)
    axes = [axis for axis in range(d.ndim) if axis != longest] + [longest]
    for axis in range(d.ndim):
        smooth = gaussian(smooth, axes.index(axis))
    return smooth.movedim(-1, longest).contiguous()


def median_of_neighbours(d: Tensor) -> Tensor:
    """The median of the 3^n entries around each entry of a tensor of n axes."""
    for axis in range(d.ndim):
        d = _mirrored(d, axis, 1)
    rows = d.shape[0] - 2
    size = max(1, PART * rows // d.numel())
    parts = (d[row : min(row + size, rows) + 2] for row in range(0, rows, size))
    return torch.cat([_median_of_extended(part) for part in parts])


def _median_of_extended(d: Tensor) -> Tensor:
    """The median around each entry but the outermost ones: axis by axis three sorted lists become one."""
    ordered = [d]
    for axis in range(d.ndim):
        lists = [part.narrow(axis, start, d.shape[axis] - 2) for start in range(3) for part in ordered]
        is_last = axis == d.ndim - 1
        ordered = _run(_network(len(ordered), len(lists) // 2 if is_last else None), lists)
    return ordered[0]


Step = tuple[Callable[[Tensor, Tensor], Tensor], int, int, int]
"""A function, the numbers of its two arguments, and that of its result."""


@cache
def _network(length: int, place: int | None) -> tuple[list[Step], list[int]]:
    """The steps that merge three sorted lists of a length, and the numbers of the entries that are wanted.

    Those are all of them in order, or the one at a place: steps that it does not need are left out. Lists are
    merged by Batcher's odd-even merge (Knuth, The Art of Computer Programming, volume 3, 5.3.4).
    """
    steps: list[Step] = []
    first, second, third = ([*range(start, start + length)] for start in range(0, 3 * length, length))
    last = iter(range(3 * length, 1 << 30))
    ordered = _merged(_merged(first, second, steps, last), third, steps, last)
    wanted = ordered if place is None else [ordered[place]]
    needed, kept = {*wanted}, []
    for step in reversed(steps):
        if step[3] in needed:
            needed.update(step[1:3])
            kept.append(step)
    return kept[::-1], wanted


def _merged(first: list[int], second: list[int], steps: list[Step], numbers: Iterator[int]) -> list[int]:
    """The entries of two sorted lists in order; the steps for it are added to `steps`."""
    if not first or not second:
        return first + second

    def compared(one: int, other: int) -> list[int]:
        results = [next(numbers), next(numbers)]
        functions = (torch.minimum, torch.maximum)
        steps.extend((f, one, other, number) for f, number in zip(functions, results, strict=True))
        return results

    if len(first) == len(second) == 1:
        return compared(*first, *second)
    even = _merged(first[::2], second[::2], steps, numbers)
    odd = _merged(first[1::2], second[1::2], steps, numbers)
    ordered = even[:1]
    for one, other in zip_longest(odd, even[1:]):
        ordered += [other] if one is None else [one] if other is None else compared(one, other)
    return ordered


def _run(network: tuple[list[Step], list[int]], given: list[Tensor]) -> list[Tensor]:
    """Run the steps on tensors; a result that no later step needs is dropped."""
    steps, wanted = network
    last_use = {argument: place for place, step in enumerate(steps) for argument in step[1:3]}
    values = dict(enumerate(given))
    for place, (function, one, other, result) in enumerate(steps):
        values[result] = function(values[one], values[other])
        for argument in (one, other):
            if last_use[argument] == place and argument not in wanted:
                del values[argument]
    return [values[number] for number in wanted]


def gaussian(d: Tensor, axis: int) -> Tensor:
    """The sum of the neighbours along an axis, weighted by a Gaussian of sigma 1; a part at a time."""
    places = torch.arange(-TAIL, TAIL + 1, dtype=d.dtype)
    kernel = torch.exp(-places.square() / 2)
    kernel = kernel / kernel.sum()
    smooth = torch.zeros_like(d)
    across = 0 if axis or d.ndim == 1 else 1
    size = d.shape[0] if d.ndim == 1 else max(1, PART * d.shape[across] // d.numel())
    for part, sums in zip(d.split(size, across), smooth.split(size, across), strict=True):
        extended = _mirrored(part, axis, TAIL)
        for place, weight in enumerate(kernel):
            sums.add_(weight * extended.narrow(axis, place, d.shape[axis]))
    return smooth


def _mirrored(d: Tensor, axis: int, width: int) -> Tensor:
    """d with `width` more entries at both ends of an axis: d c b a | a b c d | d c b a."""
    places = torch.arange(-width, d.shape[axis] + width, device=d.device) % (2 * d.shape[axis])
    return d.index_select(axis, torch.minimum(places, 2 * d.shape[axis] - 1 - places))
