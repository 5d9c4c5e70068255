"""Order statistics: the exact element of a rank, found by sampling mostly in one pass over the data.

A sample tells a bracket that the wanted entry is almost certainly in. One pass then counts the entries below
the bracket and at its ends, and collects those inside it, a percent or so: the wanted one is an end or among
them. A value that many entries have, such as the 0 of what was dropped, is an end and costs no more than any
other. The sample never decides what is found: where the counts say that the entry lies elsewhere, or where
too many are inside to be collected, further passes go on from what is known, 16 bits of the entry in each.

Floats are compared as whole numbers that sort as they do (`sort_key`). What is not a number is not counted.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

SAMPLE = 1 << 16
"""Entries in a sample, or a 256th of them all where that is more; never more than 16 times as many."""

RUN = 1 << 10
"""Neighbours that are sampled together: reading them apart would cost more than the sample is worth."""

DIGIT_BITS = 16
"""The bits of the entry that a further pass finds, where a bracket has too many entries to collect."""

_INSIDE = 2  # what `split` finds between the ends of a bracket
_PARTS = 64  # of a sample
_SURE = 3.0  # standard deviations between the guess and the end of the bracket
_MOST = 1 << 22  # entries that are collected, at most

Span: TypeAlias = tuple[int, int]
"""A range of entries: the first one, and the one after the last."""

Keys: TypeAlias = "NDArray[Any]"
"""Sort keys: integers of the size of their floats."""


class Bracket(NamedTuple):
    """An interval that is searched for the entry; both ends belong to it."""

    low: int
    high: int

    @classmethod
    def everything(cls, dtype: torch.dtype) -> Bracket:
        """All numbers of a dtype."""
        half = 1 << (8 * dtype.itemsize - 1)
        return cls(-half, half - 2)


def sort_key(values: torch.Tensor) -> torch.Tensor:
    """Integers that sort like the floats; NaN maps to the largest."""
    whole = torch.int32 if values.dtype.itemsize == 4 else torch.int64
    most = torch.iinfo(whole).max
    if values.device.type != "cpu":
        turned: torch.Tensor = _turned(values.view(whole))
        return turned.masked_fill(values.isnan(), most)
    floats = values.numpy()  # which takes a third of the time for small tensors
    keys = _turned(floats.view(f"i{floats.itemsize}"))
    keys[np.isnan(floats)] = most
    return torch.from_numpy(keys)


def from_sort_key(key: int, dtype: torch.dtype) -> torch.Tensor:
    """The float of a sort key."""
    return from_sort_keys(np.array([key], f"i{dtype.itemsize}"), dtype)[0]


def from_sort_keys(keys: Keys, dtype: torch.dtype) -> torch.Tensor:
    """The floats of sort keys."""
    return torch.from_numpy(_turned(keys)).view(dtype)


def _turned(bits: Any) -> Any:
    """The bits of negative floats in the opposite order; done twice it undoes itself."""
    size = 8 * bits.dtype.itemsize - 1
    return bits ^ ((bits >> size) & ((1 << size) - 1))


def count_numbers(keys: torch.Tensor) -> int:
    """How many sort keys are those of numbers."""
    most = torch.iinfo(keys.dtype).max
    return int(np.count_nonzero(keys.numpy() != most) if keys.device.type == "cpu" else (keys != most).sum())


def of_rank(keys: torch.Tensor, rank: int) -> int:
    """The sort key of a rank, 1 being the smallest."""
    on_cpu = keys.device.type == "cpu"
    return _ranked(keys.numpy(), rank - 1)[0] if on_cpu else int(keys.sort().values[rank - 1])


def of_rank_in_rows(keys: Keys, rank: int) -> Keys:
    """The sort key of a rank in each row."""
    return _ordered(keys, rank - 1)[:, rank - 1]


def passes_needed(dtype: torch.dtype) -> int:
    """How many passes find any entry: the sample, the bracket, and as many as its bits take."""
    return 2 + -(-8 * dtype.itemsize // DIGIT_BITS)


def sample_spans(count: int, block: int) -> list[Span]:
    """The parts of `count` entries that are sampled: runs of whole blocks, evenly spread, or all of them."""
    wanted = min(max(SAMPLE, count // 256), 16 * SAMPLE)
    run = -(-RUN // block) * block
    if count <= 4 * wanted or count <= 4 * run:
        return [(0, count)]
    runs = max(1, wanted // run)
    starts = (number * (count - run) // max(1, runs - 1) // block * block for number in range(runs))
    return [(start, start + run) for start in starts]


def sample_of_model(counts: Sequence[int]) -> list[list[Span]]:
    """The parts of each key in a sample of the model: `sample_spans` of its keys one after the other."""
    ends = list(accumulate(counts))
    parts: list[list[Span]] = [[] for _ in counts]
    for start, stop in sample_spans(sum(counts), 1):
        for key in range(bisect_right(ends, start), bisect_left(ends, stop) + 1):
            first = ends[key] - counts[key]
            parts[key].append((max(start - first, 0), min(stop, ends[key]) - first))
    return parts


def in_whole_blocks(spans: Sequence[Span], count: int, block: int) -> list[Span]:
    """The parts of `count` entries widened to whole blocks; those that meet are joined."""
    joined: list[Span] = []
    for start, stop in spans:
        begin, end = start // block * block, min(-(-stop // block) * block, count)
        if joined and begin <= joined[-1][1]:
            begin = joined.pop()[0]
        joined.append((begin, end))
    return joined


def entries_of(spans: Sequence[Span]) -> torch.Tensor:
    """The places of all entries of some ranges, in order."""
    starts, stops = np.asarray(spans, np.int64).reshape(-1, 2).T
    lengths = stops - starts
    skipped = starts - np.cumsum(lengths) + lengths  # entries before each range that belong to none
    return torch.from_numpy(np.repeat(skipped, lengths) + np.arange(lengths.sum()))


def bracket_from_sample(sample: Keys, share: float, everything: Bracket) -> Bracket:
    """The bracket of the entry at a share of all entries, estimated from a sample.

    Neighbours resemble each other, so the error is told by how much parts of the sample differ.
    """
    if len(sample) < _PARTS:  # it was too large to be collected
        return everything
    share, last = min(share, 1.0), len(sample) - 1
    position = share * len(sample)
    middle = min(int(position), last)
    (guessed,) = _ranked(sample, middle)
    parts = sample[: len(sample) // _PARTS * _PARTS].reshape(_PARTS, -1)
    spread = float((parts <= guessed).mean(1).std()) / math.sqrt(_PARTS)
    error = max(math.sqrt(share * (1 - share) / len(sample)), spread)
    margin = _SURE * error * len(sample) + 2
    low, high = math.floor(position - margin), math.ceil(position + margin)
    lowest, highest = _ranked(sample, max(low, 0), min(high, last))
    return Bracket(
        lowest if low >= 0 else everything.low,
        highest if high <= last else everything.high,
    )


def _ranked(keys: Keys, *indices: int) -> list[int]:
    """The keys at some indices if they were sorted."""
    ordered = _ordered(keys, *indices)
    return [int(ordered[index]) for index in indices]


def _ordered(keys: Keys, *indices: int) -> Keys:
    """The keys of the last axis, of which those at some indices stand where they would stand in order.

    numpy finds a single one by vector instructions, which take twenty times as long where most keys are
    equal; several are found one by one, in a time that hardly depends on the keys.
    """
    beside = min(indices[0] + 1, keys.shape[-1] - 1)
    return np.partition(keys, [*indices, beside])


class Candidates:
    """The counts and the candidates that a pass finds for a bracket; tiles come in any order.

    Attributes:
        below: how many entries lie below it.
        at_low, at_high: how many are equal to its ends; where it has one end those are `at_low`.
        count: how many lie inside, between the ends.
        no_numbers: how many are not a number.
    """

    def __init__(self, bracket: Bracket, entries: int) -> None:
        self._bracket = bracket
        self._most = min(_MOST, max(SAMPLE * 4, entries // 8))
        self._shift = max(0, (bracket.high - bracket.low).bit_length() - DIGIT_BITS)
        self._held: list[Keys] = []
        self._bins: NDArray[np.int64] | None = None  # only where too many would have to be held
        self.below = self.at_low = self.at_high = self.count = self.no_numbers = 0

    def add(self, below: int, no_numbers: int, at_low: int, at_high: int, keys: Keys) -> None:
        """Add a tile's counts: elements below the bracket, NaNs, those at its ends, and those inside it."""
        self.below += below
        self.no_numbers += no_numbers
        self.at_low += at_low
        self.at_high += at_high
        self.count += len(keys)
        if len(keys):
            self._held.append(keys)
        if self.count > self._most:
            self._count_held()

    def collected(self) -> Keys:
        """The entries inside; none where they are too many."""
        return np.concatenate(self._held) if self._held else np.empty(0, np.int64)

    def find(self, rank: int, everything: Bracket) -> int | Bracket:
        """The entry of that rank, 1 being the smallest of all; or where to look for it next."""
        if rank <= self.below:
            return Bracket(everything.low, self._bracket.low - 1)
        index = rank - self.below - self.at_low - 1  # among those inside, from 0
        if index < 0:
            return self._bracket.low
        if index >= self.count + self.at_high:
            return Bracket(self._bracket.high + 1, everything.high)
        if index >= self.count:
            return self._bracket.high
        if self._bins is None:
            return _ranked(self.collected(), index)[0]
        self._count_held()
        bin_number = int(np.searchsorted(np.cumsum(self._bins), index, side="right"))
        low = self._bracket.low + (bin_number << self._shift)
        high = min(low + (1 << self._shift) - 1, self._bracket.high)
        return low if low == high else Bracket(low, high)

    def _count_held(self) -> None:
        size = (self._bracket.high - self._bracket.low >> self._shift) + 1
        bins = np.zeros(size, np.int64) if self._bins is None else self._bins
        for keys in self._held:
            distance = np.subtract(keys, self._bracket.low, dtype=np.int64).view(np.uint64)  # it may wrap
            bins += np.bincount((distance >> np.uint64(self._shift)).view(np.int64), minlength=size)
        self._bins, self._held = bins, []


def partition(keys: Keys, bracket: Bracket) -> tuple[int, int, int, int, Keys]:
    """Count the sort keys below a bracket, of NaN and at both ends, and select those inside it."""
    inside = keys[(keys > bracket.low) & (keys < bracket.high)]
    no_numbers, at_low, at_high = (
        int(np.count_nonzero(keys == key)) for key in (np.iinfo(keys.dtype).max, *bracket)
    )
    below = int(np.count_nonzero(keys < bracket.low))
    return below, no_numbers, at_low, at_high if bracket.high > bracket.low else 0, inside


def split(keys: torch.Tensor, bracket: Bracket) -> tuple[int, int, int, int, Keys]:
    """`partition` by torch, on the device where the keys are; few of them leave it."""
    low, high = bracket
    after_low, after_high = low + 1, high + 1 if high > low else low + 1
    ends = [low, after_low, max(high, after_low), after_high, torch.iinfo(keys.dtype).max]
    place = torch.bucketize(keys, torch.tensor(ends, dtype=keys.dtype).to(keys.device), right=True)
    counts = (place == torch.arange(len(ends) + 1, device=keys.device)[:, None]).sum(1)
    below, at_low, _, at_high, _, no_numbers = counts.cpu().tolist()
    return below, no_numbers, at_low, at_high, keys[place == _INSIDE].cpu().numpy()


def as_state(result: int | Bracket, dtype: torch.dtype) -> torch.Tensor:
    """The state after a pass: the entry, or the ends of the next bracket."""
    if isinstance(result, Bracket):
        return torch.tensor(result, dtype=torch.int64)
    return from_sort_key(result, dtype)


def is_found(state: torch.Tensor) -> bool:
    """Whether a state is the entry itself, and not a bracket."""
    return state.ndim == 0


def from_state(state: torch.Tensor) -> Bracket | None:
    """The bracket that a pass has left; None where the entry is found."""
    return None if is_found(state) else Bracket(*state.tolist())
