"""Adds up the partial results of a reduction in one order, whatever the tiles and threads.

A sum is made of lanes. Entry i of a strip goes to lane i modulo `LANES`, one after the other, in float32
where the entries are of float32 and in float64 elsewhere; from there on all is float64. The strips of a
block are added up lane by lane; then the lanes are folded in halves, as are the blocks in the end. That order
is as easy for a compiled loop, which keeps many sums in the first cache, as it is for torch, and gives both
the same bits.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from mecha_exp.engine.ir.order_statistic import (
    Bracket,
    Candidates,
    Keys,
    as_state,
    bracket_from_sample,
    count_numbers,
    from_sort_key,
    from_sort_keys,
    from_state,
    is_found,
    of_rank,
    of_rank_in_rows,
    partition,
    passes_needed,
    sort_key,
    split,
)
from mecha_exp.graph.nodes import MergeNode
from mecha_exp.method_api.method import Reduction

REDUCTION_BLOCK = 1 << 16
"""Elements in a block of a reduction. Not a setting: the partial sums, so the bits, depend on it."""

SIMD_MULTIPLE = 64
"""A multiple of what any kernel computes at a time."""

WIDE_COLUMNS = 1 << 14
"""Columns from which on a block has fewer rows: it must fit into memory."""

STRIP = 1 << 11
"""Elements in a strip, of which a block is made. No setting either."""

LANES = 1 << 6
"""Running sums in a strip. No setting either."""


class Accumulator(ABC):
    """The partial results of one round of a reduction on one key; tiles come in any order, from any thread.

    Attributes:
        state: what the round before has left.
    """

    def __init__(self, node: MergeNode, state: torch.Tensor | None, count: int, block: int) -> None:
        assert isinstance(node.method, Reduction)
        self._method = node.method
        self._count = count
        self._block = block
        self._lock = threading.Lock()
        self.state = state

    @abstractmethod
    def add(self, start: int, results: Sequence[torch.Tensor]) -> None:
        """Add what the method returned for the entries from `start` on, which is the beginning of a block."""

    @abstractmethod
    def finish(self, hyperparameters: dict[str, object], dtype: torch.dtype) -> torch.Tensor:
        """The state for the next round, or the value of the reduction."""


class SumAccumulator(Accumulator):
    """Partial results that come to a total, of which the method's `finish` makes the result."""

    @abstractmethod
    def _total(self) -> torch.Tensor: ...

    def finish(self, hyperparameters: dict[str, object], dtype: torch.dtype) -> torch.Tensor:
        total = self._total()
        if self._method.finish is None:
            return total
        return self._method.finish(total, state=self.state, count=self._count, dtype=dtype, **hyperparameters)


class Sums(SumAccumulator):
    """Terms of sums, one or several for each entry.

    Attributes:
        table, columns: where they are added up.
    """

    table: SumTable | None = None
    columns = slice(0)

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return -(-self._count // self._block)

    def add(self, start: int, results: Sequence[torch.Tensor]) -> None:
        add_sums([(self, results)], start)

    def rows(self, start: int, terms: int) -> np.ndarray:
        """The rows of the table for the sums of the blocks from an element on; each term has a column."""
        with self._lock:
            table = self.table or SumTable([(self, terms)])
        return table.sums[start // self._block :, self.columns]

    def block_starts(self, entries: int) -> range:
        """The first entry of each block among so many."""
        return range(0, entries, self._block)

    def _total(self) -> torch.Tensor:
        assert self.table is not None
        total = self.table.totals[self.columns]
        return torch.from_numpy(total if total.size > 1 else total.reshape(()))


class SumTable:
    """The sums of several reductions side by side.

    Attributes:
        sums: of each block and column.
        row_bytes: of a block.
    """

    def __init__(self, reductions: Sequence[tuple[Sums, int]]) -> None:
        columns = 0
        for reduction, terms in reductions:
            reduction.table = self
            reduction.columns = slice(columns, columns + terms)
            columns += terms
        self.sums = np.zeros((reductions[0][0].blocks if reductions else 0, columns))
        self._place = self.sums.ctypes.data
        self.row_bytes = 8 * columns

    def address(self, start: int) -> int:
        """The address where a loop puts the sums of the blocks from an element on."""
        return self._place + start // REDUCTION_BLOCK * self.row_bytes

    @cached_property
    def totals(self) -> np.ndarray:
        """The total of each column, once all blocks are added."""
        total: np.ndarray = folded(self.sums)
        return total


class SumsOfKey(Sums):
    """The sums of one key of a model, which is what the key adds to a number of the whole model."""

    def finish(self, hyperparameters: dict[str, object], dtype: torch.dtype) -> torch.Tensor:
        """The totals as they are: the method's own `finish` is for those of the model."""
        return self._total()


class Ranked(Accumulator):
    """Finds the element of a rank; see `order_statistic`.

    Attributes:
        bracket: where it is looked for in this round; empty when it is found already.
    """

    def __init__(
        self, node: MergeNode, state: torch.Tensor | None, count: int, block: int, dtype: torch.dtype
    ) -> None:
        super().__init__(node, state, count, block)
        self._dtype = dtype
        self._everything = Bracket.everything(dtype)
        self.bracket = self._everything if state is None else from_state(state) or Bracket(0, -1)
        self._candidates = Candidates(self.bracket, count)
        self._all: torch.Tensor | None = None  # the sort keys, where all are there at once

    def add(self, start: int, results: Sequence[torch.Tensor]) -> None:
        (values,) = results
        keys = sort_key(values.to(self._dtype))
        if len(keys) == self._count and self.state is None:
            self._all = keys
        elif keys.device.type == "cpu":
            self.collect(*partition(keys.numpy(), self.bracket))
        else:
            self.collect(*split(keys, self.bracket))

    def collect(self, below: int, no_numbers: int, at_low: int, at_high: int, keys: Keys) -> None:
        """Add a tile's counts and the elements inside the bracket; see `Candidates.add`."""
        with self._lock:
            self._candidates.add(below, no_numbers, at_low, at_high, keys)

    def finish(self, hyperparameters: dict[str, object], dtype: torch.dtype) -> torch.Tensor:
        if self.state is not None and is_found(self.state):
            return self.state
        if self._all is not None:
            return self._element_of(self._all, hyperparameters, dtype)
        candidates = self._candidates
        seen = self._count if self.state is not None else candidates.count + candidates.no_numbers
        numbers = self._count - round(candidates.no_numbers * (self._count / seen))
        rank = self._rank(numbers, hyperparameters)
        if seen < self._count:
            return as_state(
                bracket_from_sample(candidates.collected(), rank / max(numbers, 1), self._everything), dtype
            )
        if rank > numbers:
            return torch.tensor(torch.inf, dtype=dtype)
        return as_state(candidates.find(rank, self._everything), dtype)

    def _rank(self, numbers: int, hyperparameters: dict[str, object]) -> int:
        assert self._method.rank is not None
        return max(self._method.rank(numbers, **hyperparameters), 1)

    def _element_of(
        self, keys: torch.Tensor, hyperparameters: dict[str, object], dtype: torch.dtype
    ) -> torch.Tensor:
        """The element of the rank among all sort keys."""
        numbers = count_numbers(keys)
        rank = self._rank(numbers, hyperparameters)
        if rank > numbers:
            return torch.tensor(torch.inf, dtype=dtype)
        return from_sort_key(of_rank(keys, rank), dtype)

    def of_rows(self, rows: torch.Tensor, hyperparameters: dict[str, object]) -> torch.Tensor:
        """The element of each row, as one accumulator for each would find it."""
        keys = sort_key(rows.to(self._dtype))
        if count_numbers(keys) < rows.numel():
            elements = [self._element_of(row, hyperparameters, self._dtype) for row in keys]
            return torch.stack(elements)
        rank = self._rank(self._count, hyperparameters)
        if rank > self._count:
            return torch.full(rows.shape[:1], torch.inf, dtype=self._dtype)
        return from_sort_keys(of_rank_in_rows(keys.numpy(), rank), self._dtype)


class RankedOverKeys(Ranked):
    """Finds the element of a rank among the elements of all keys, which add to it from any thread."""

    def finish(self, hyperparameters: dict[str, object], dtype: torch.dtype) -> torch.Tensor:
        """A placeholder: what has been found is known when all keys are through; see `conclude`."""
        return torch.zeros(())

    def conclude(self, hyperparameters: dict[str, object]) -> torch.Tensor:
        """The state for the next round, or the value."""
        return super().finish(hyperparameters, self._dtype)


class BlockAccumulator(SumAccumulator):
    """One small tensor for each block, of any shape; those that come too early wait for their turn."""

    def __init__(self, node: MergeNode, state: torch.Tensor | None, count: int, block: int) -> None:
        super().__init__(node, state, count, block)
        self._waiting: dict[int, torch.Tensor] = {}
        self._added: list[torch.Tensor] = []
        self._next = 0

    def add(self, start: int, results: Sequence[torch.Tensor]) -> None:
        with self._lock:
            (self._waiting[start // self._block],) = (result.cpu() for result in results)
            while (result := self._waiting.pop(self._next, None)) is not None:
                self._added = [self._added[0] + result if self._added else result]
                self._next += 1

    def _total(self) -> torch.Tensor:
        return self._added[0]


def block_of(columns: int, reduces: bool) -> int:
    """The elements in a block of a pass: whole rows, and for reductions about `REDUCTION_BLOCK` of them.

    Kernels compute the last few entries of a tensor one by one, where exp, say, may round differently, so
    a block has `SIMD_MULTIPLE` entries or rows: which ones are the last does not depend on the tile size.
    """
    rows = SIMD_MULTIPLE if columns <= WIDE_COLUMNS else max(1, SIMD_MULTIPLE * WIDE_COLUMNS // columns)
    if reduces and columns <= WIDE_COLUMNS:
        rows = max(rows, REDUCTION_BLOCK // columns // rows * rows)
    return rows * columns


def is_by_entry(node: MergeNode) -> bool:
    """Whether a reduction receives a term for each element, rather than one for a block."""
    return isinstance(node.method, Reduction) and bool(node.method.sums or node.method.rank)


def open_accumulator(
    node: MergeNode, state: torch.Tensor | None, count: int, block: int, dtype: torch.dtype
) -> Accumulator:
    """The accumulator for the next round of a reduction on a key of `count` elements, computed in `dtype`."""
    assert isinstance(node.method, Reduction)
    if node.method.rank:
        return Ranked(node, state, count, block, dtype)
    return (Sums if node.method.sums else BlockAccumulator)(node, state, count, block)


def is_ranked(node: MergeNode) -> bool:
    """Whether a reduction gives the element of a rank."""
    return isinstance(node.method, Reduction) and node.method.rank is not None


def is_known(node: MergeNode, state: torch.Tensor | None) -> bool:
    """Whether a reduction needs no further round: the entry of a rank is mostly found after two."""
    return is_ranked(node) and state is not None and is_found(state)


def rounds_of(method: Reduction, dtype: torch.dtype) -> int:
    """How many passes over a key a reduction takes at most."""
    if method.of_model:
        return 1  # for each trip over the keys
    return passes_needed(dtype) if method.rank else method.rounds(dtype)


def lane_dtype(terms: torch.dtype) -> torch.dtype:
    """The dtype in which elements of a dtype are added up within a strip."""
    return terms if terms is torch.float32 else torch.float64


def add_sums(added: Sequence[tuple[Sums, Sequence[torch.Tensor]]], start: int) -> None:
    """Add terms of equal size to several reductions, in as many calls as one takes.

    Args:
        added: each reduction with its terms, the entries from `start` on.
        start: the beginning of a block.
    """
    columns: dict[torch.dtype, list[tuple[torch.Tensor, np.ndarray]]] = {}
    for reduction, terms in added:
        rows = reduction.rows(start, len(terms))
        for number, term in enumerate(terms):
            columns.setdefault(term.dtype, []).append((term, rows[:, number]))
    for alike in columns.values():
        starts = added[0][0].block_starts(len(alike[0][0]))
        together = _blocks_together(alike[0][0], starts)
        for row in range(0, len(starts), together):
            first = starts[row]
            blocks = slice(first, first + starts.step * together)
            stacked = torch.stack([term[blocks] for term, _ in alike])
            count = -(-stacked.shape[1] // starts.step)
            sums = lane_sums(stacked.reshape(len(alike) * count, -1)).reshape(len(alike), count)
            for (_, column), totals in zip(alike, sums, strict=True):
                column[row : row + count] = totals


def _blocks_together(terms: torch.Tensor, starts: range) -> int:
    """How many blocks are added up at a time: on a GPU all that are whole, so that calls are few."""
    on_cpu = terms.device.type == "cpu"  # where the terms of one block stay in the cache
    return 1 if on_cpu else max(1, len(terms) // starts.step)


def lane_sums(terms: torch.Tensor) -> np.ndarray:
    """The sums in float64 of the rows, each the terms of a block."""
    padded = torch.nn.functional.pad(terms, (0, -terms.shape[1] % STRIP))
    entries = padded.view(len(terms), -1, STRIP // LANES, LANES)
    lanes = torch.zeros(*entries.shape[:2], LANES, dtype=lane_dtype(terms.dtype), device=terms.device)
    for entry in entries.unbind(2):
        lanes += entry
    total = torch.zeros(len(terms), LANES, dtype=torch.float64, device=terms.device)
    for strip in lanes.unbind(1):
        total += strip
    sums: np.ndarray = folded(total.T.cpu().numpy())
    return sums


def folded(values: np.ndarray) -> Any:
    """The sum over the first axis: the second half is added to the first until one is left."""
    if len(values) == 1:
        return values[0]
    size = 1 << (len(values) - 1).bit_length()
    if size > len(values):
        padding = np.zeros((size - len(values), *values.shape[1:]))
        values = np.concatenate([values, padding])
    while size > 1:
        size //= 2
        values = values[:size] + values[size:]
    return values[0]
