"""The partial results of a reduction, added up in one order, whatever the tiles and threads.

A sum is made of lanes. Entry i of a block goes to lane i modulo `LANES`, one after the other, and then the
lanes are folded in halves, as are the blocks in the end. That order is as easy for a compiled loop as it is
for torch, and gives both the same bits.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from mecha_exp.errors import MergeError
from mecha_exp.method import Reduction
from mecha_exp.nodes import MergeNode

REDUCTION_BLOCK = 1 << 16
"""Elements in a block of a reduction. It is no setting: the partial sums, so the bits, depend on it."""

LANES = 1 << 11
"""Running sums in a block, and the length of the strips that a compiled loop works in. No setting either."""


class Partials(ABC):
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
        """What the method returned for the entries from `start` on, the beginning of a block."""

    @abstractmethod
    def _total(self) -> torch.Tensor: ...

    def finish(self, hyperparameters: dict[str, object], dtype: torch.dtype) -> torch.Tensor:
        """The state for the next round, or the value of the reduction."""
        total = self._total()
        if self._method.finish is None:
            return total
        return self._method.finish(total, state=self.state, count=self._count, dtype=dtype, **hyperparameters)


class Sums(Partials):
    """Terms of sums, one or several for each entry."""

    _sums: torch.Tensor | None = None

    def rows(self, start: int, stop: int, terms: int) -> torch.Tensor:
        """Where the sums of the blocks of a tile belong, [blocks, terms]."""
        with self._lock:
            if self._sums is None:
                blocks = -(-self._count // self._block)
                self._sums = torch.zeros(blocks, terms, dtype=torch.float64)
        return self._sums[start // self._block : -(-stop // self._block)]

    def add(self, start: int, results: Sequence[torch.Tensor]) -> None:
        count = results[0].numel()
        rows = self.rows(start, start + count, len(results))
        for row, first in enumerate(range(0, count, self._block)):
            for column, term in enumerate(results):
                rows[row, column] = lane_sum(term[first : first + self._block])

    def _total(self) -> torch.Tensor:
        assert self._sums is not None
        total = _folded(self._sums)
        return total[0] if len(total) == 1 else total


class Counts(Partials):
    """Bins to be counted; every thread counts for itself."""

    def __init__(self, node: MergeNode, state: torch.Tensor | None, count: int, block: int) -> None:
        super().__init__(node, state, count, block)
        self._counts: dict[int, torch.Tensor] = {}

    def mine(self) -> torch.Tensor:
        """The counts of the calling thread, to be added to."""
        assert self._method.histogram is not None
        thread = threading.get_ident()
        if thread not in self._counts:
            self._counts[thread] = torch.zeros(self._method.histogram, dtype=torch.int64)
        return self._counts[thread]

    def add(self, start: int, results: Sequence[torch.Tensor]) -> None:
        (bins,), counts = results, self.mine()
        if bins.is_floating_point():
            raise MergeError(f"'{self._method.identifier}' gives bins of {bins.dtype}, not whole numbers")
        inside = bins[(bins >= 0) & (bins < len(counts))]
        counts += torch.bincount(inside, minlength=len(counts))

    def _total(self) -> torch.Tensor:
        first, *rest = self._counts.values()
        return sum(rest, first)


class Blocks(Partials):
    """One small tensor for each block, of any shape."""

    def __init__(self, node: MergeNode, state: torch.Tensor | None, count: int, block: int) -> None:
        super().__init__(node, state, count, block)
        self._results: dict[int, torch.Tensor] = {}

    def add(self, start: int, results: Sequence[torch.Tensor]) -> None:
        with self._lock:
            (self._results[start // self._block],) = results

    def _total(self) -> torch.Tensor:
        return torch.stack([self._results[i] for i in sorted(self._results)]).sum(0)


def is_by_entry(node: MergeNode) -> bool:
    """Whether a reduction is told what each entry adds, rather than what a block does."""
    return isinstance(node.method, Reduction) and bool(node.method.sums or node.method.histogram)


def open_partials(node: MergeNode, state: torch.Tensor | None, count: int, block: int) -> Partials:
    """For the next round of a reduction on a key of `count` elements."""
    assert isinstance(node.method, Reduction)
    kind = Sums if node.method.sums else Counts if node.method.histogram else Blocks
    return kind(node, state, count, block)


def lane_sum(terms: torch.Tensor) -> torch.Tensor:
    """The sum of a block in float64."""
    lanes = torch.zeros(LANES, dtype=torch.float64, device=terms.device)
    for start in range(0, len(terms), LANES):
        strip = terms[start : start + LANES]
        lanes[: len(strip)] += strip
    return _folded(lanes)


def _folded(values: torch.Tensor) -> torch.Tensor:
    """The sum over the first axis: the second half is added to the first until one is left."""
    size = 1 << (len(values) - 1).bit_length()
    if size > len(values):
        padding = values.new_zeros(size - len(values), *values.shape[1:])
        values = torch.cat([values, padding])
    while size > 1:
        size //= 2
        values = values[:size] + values[size:]
    return values[0]
