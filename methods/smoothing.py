"""Filters over neighbouring entries: the median of 3 along each axis, then a Gaussian.

A tensor is taken as planes of rows of columns, which are its two longest axes. A neighbour in another row or
plane, or in the next column, is the same run of entries begun elsewhere: so a filter is arithmetic on runs.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import count, product, zip_longest

import torch
from torch import Tensor

from mecha_exp import Return, merge_method
from mecha_exp.extensions.merge_methods import RunLoop
from mecha_exp.methods.parameters import Delta

PART = 1 << 16
"""Entries that are filtered at a time: some dozens of runs of that length stay in the cache."""

TAIL = 4
"""The width of the Gaussian's tail, in sigmas."""

MOST_STEPS = 1_000
"""Steps of a network that are worth compiling: what five axes need takes minutes."""


@merge_method(register=False)
def smoothed(d: Delta) -> Return(Tensor, "delta"):
    """The Gaussian (sigma 1) of the median of 3 entries along each axis, mirrored at the edges."""
    if not d.numel() or not d.ndim:
        return d.clone()
    order = sorted(range(d.ndim), key=lambda axis: d.shape[axis])
    sorted_axes = d.permute(order)
    planes = sorted_axes.reshape(-1, *sorted_axes.shape) if d.ndim == 1 else sorted_axes.contiguous()
    smooth = median_of_neighbours(planes)
    for axis in range(d.ndim):
        smooth = gaussian(smooth, order.index(axis) - d.ndim)
    back = [order.index(axis) for axis in range(d.ndim)]
    return smooth.reshape(sorted_axes.shape).permute(back).contiguous()


def _mirrored(d: Tensor, axis: int, width: int) -> Tensor:
    """d with `width` more entries at both ends of an axis: d c b a | a b c d | d c b a."""
    return d.index_select(axis, torch.tensor(_places(d.shape[axis], width)).to(d.device))


def _places(size: int, width: int) -> list[int]:
    """Which of `size` entries lies where, from `width` before the first one to as many after the last."""
    turned = (place % (2 * size) for place in range(-width, size + width))
    return [min(place, 2 * size - 1 - place) for place in turned]


# the median


def median_of_neighbours(d: Tensor) -> Tensor:
    """The median of the 3^n entries around each entry of a contiguous tensor of n axes, at least two."""
    *leading, rows, columns = d.shape
    extended = _mirrored(_mirrored(d, -2, 1), -1, 1)
    result = torch.empty_like(extended)
    # an axis of one entry makes no difference: each of its neighbours is that entry
    near = [_places(size, 1) if size > 1 else [0] for size in leading]
    compares = not d.isnan().any()
    for plane in product(*map(range, leading)):
        beside = product(*(of[place : place + 3] for place, of in zip(plane, near, strict=True)))
        _median_of_planes([extended[other].flatten() for other in beside], result[plane], compares)
    return result[..., :rows, :columns].contiguous()


def _median_of_planes(planes: Sequence[Tensor], result: Tensor, compares: bool) -> None:
    """The median of the entries of some planes with an edge, and their neighbours in rows and columns.

    The entries of all planes and three rows are sorted, then those of three columns merged.

    Args:
        result: of the shape of the planes; the median of an entry is written one row and one column before.
        compares: whether all are numbers, so that comparing two tells which is smaller.
    """
    rows, columns = result.shape
    size = max(1, PART // columns)
    for row in range(0, rows - 2, size):
        length = min(size, rows - 2 - row) * columns
        runs = [plane.narrow(0, (row + step) * columns, length) for step in range(3) for plane in planes]
        lists = _run(_sorting(len(runs)), runs, compares)
        shifted = [entries.narrow(0, step, length - 2) for step in range(3) for entries in lists]
        (median,) = _run(_median(len(lists)), shifted, compares)
        result.flatten()[row * columns :][: length - 2] = median


Step = tuple[Callable[[Tensor, Tensor], Tensor], int, int, int]
"""A function, the numbers of its two arguments, and that of its result."""

Network = tuple[tuple[Step, ...], tuple[int, ...]]
"""Steps, and the numbers of the entries that are wanted; those that go in have the first numbers."""


@cache
def _sorting(length: int) -> Network:
    """The steps that sort so many entries, a power of 3."""
    steps: list[Step] = []
    numbers = count(length)

    def ordered(entries: list[int]) -> list[int]:
        third = len(entries) // 3
        if not third:
            return entries
        thirds = [ordered(entries[start : start + third]) for start in range(0, len(entries), third)]
        return _merged_three(thirds, steps, numbers)

    wanted = ordered([*range(length)])
    return tuple(steps), tuple(wanted)


@cache
def _median(length: int) -> Network:
    """The steps that find the median of three sorted lists of a length; others than it needs are left out."""
    steps: list[Step] = []
    lists = [[*range(start, start + length)] for start in range(0, 3 * length, length)]
    median = _merged_three(lists, steps, count(3 * length))[3 * length // 2]
    needed, kept = {median}, []
    for step in reversed(steps):
        if step[3] in needed:
            needed.update(step[1:3])
            kept.append(step)
    return tuple(kept[::-1]), (median,)


def _merged_three(lists: Sequence[list[int]], steps: list[Step], numbers: Iterator[int]) -> list[int]:
    """The entries of three sorted lists in order; the steps for it are added to `steps`."""
    first, second, third = lists
    return _merged(_merged(first, second, steps, numbers), third, steps, numbers)


def _merged(first: list[int], second: list[int], steps: list[Step], numbers: Iterator[int]) -> list[int]:
    """The entries of two sorted lists in order, by Batcher's odd-even merge.

    Source: Knuth, The Art of Computer Programming, volume 3, 5.3.4.
    """
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


def _run(network: Network, runs: Sequence[Tensor], compares: bool) -> Sequence[Tensor]:
    """Run the steps on runs, by a compiled loop where there is one."""
    steps, wanted = network
    if compares and len(steps) <= MOST_STEPS:
        results = runs[0].new_empty(len(wanted), len(runs[0])).unbind()
        if _network_loop(network, len(runs), runs[0].dtype)(runs, results):
            return results
    last_use = {argument: place for place, step in enumerate(steps) for argument in step[1:3]}
    values = dict(enumerate(runs))
    for place, (function, one, other, result) in enumerate(steps):
        values[result] = function(values[one], values[other])
        for argument in (one, other):
            if last_use[argument] == place and argument not in wanted:
                del values[argument]  # of some hundreds few are needed at a time
    return [values[number] for number in wanted]


@cache
def _network_loop(network: Network, inputs: int, dtype: torch.dtype) -> RunLoop:
    """The loop of a network, for runs without NaN: a comparison with it is false."""
    steps, wanted = network
    names = {torch.minimum: "smaller", torch.maximum: "larger"}
    lines = (f"x{result} = {names[function]}(x{one}, x{other})" for function, one, other, result in steps)
    return RunLoop(lines, inputs, [f"x{number}" for number in wanted], dtype)


# the Gaussian


def gaussian(d: Tensor, axis: int) -> Tensor:
    """The sum of the neighbours along an axis, weighted by a Gaussian of sigma 1.

    Args:
        d: a contiguous tensor of at least two axes.
        axis: counted from the end: -1 is the last one.
    """
    if axis < -2:
        result = torch.empty_like(d)
        near = _places(d.shape[axis], TAIL)
        for plane in product(*map(range, d.shape[:-2])):
            place = d.ndim + axis
            others = (
                (*plane[:place], other, *plane[place + 1 :]) for other in near[plane[place] :][: 2 * TAIL + 1]
            )
            _weigh([d[other].flatten() for other in others], result[plane].flatten())
        return result
    extended = _mirrored(d, axis, TAIL)
    result = torch.empty_like(extended)
    distance = d.shape[-1] if axis == -2 else 1
    for plane in product(*map(range, d.shape[:-2])):
        entries = extended[plane].flatten()
        length = len(entries) - 2 * TAIL * distance
        runs = [entries.narrow(0, step * distance, length) for step in range(2 * TAIL + 1)]
        _weigh(runs, result[plane].flatten()[:length])
    return result.narrow(axis, 0, d.shape[axis]).contiguous()


def _weigh(runs: Sequence[Tensor], result: Tensor) -> None:
    """Write the sum of the runs, each times its weight, one after the other."""
    if _weighing(result.dtype)(runs, [result]):
        return
    result.zero_()
    for run, weight in zip(runs, weights(result.dtype), strict=True):
        result.add_(weight * run)


def weights(dtype: torch.dtype) -> Tensor:
    """The weights of the Gaussian."""
    places = torch.arange(-TAIL, TAIL + 1, dtype=dtype)
    kernel = torch.exp(-places.square() / 2)
    return kernel / kernel.sum()


@cache
def _weighing(dtype: torch.dtype) -> RunLoop:
    """The loop of `_weigh`."""
    lines = ["y = {t}(0)", *(f"y = y + {{t}}({w}) * x{n}" for n, w in enumerate(weights(dtype).tolist()))]
    return RunLoop(lines, 2 * TAIL + 1, ["y"], dtype)
