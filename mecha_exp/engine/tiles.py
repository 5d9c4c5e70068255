"""One pass over one key, tile by tile: read, compute - fused or eagerly -, accumulate, write."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch

from mecha_exp.checkpoint import torch_dtype
from mecha_exp.engine.compiling import Loop, compiled
from mecha_exp.engine.fusion import FusedPass
from mecha_exp.engine.partials import REDUCTION_BLOCK, Counts, Partials, Sums, is_by_entry
from mecha_exp.engine.planning import KeyPlan, Plan
from mecha_exp.engine.program import Extent, Pass
from mecha_exp.engine.sinks import Sink
from mecha_exp.errors import MergeError
from mecha_exp.method import Kind
from mecha_exp.nodes import MergeNode, ModelNode, Node
from mecha_exp.signature import Tile

Progress = Callable[[str, int], None]
"""Told the key and the number of bytes read, after each tile."""


@dataclass
class Tally:
    """What a merge has met so far; the workers share it.

    Attributes:
        nonfinite: of each job the number of values of its output that are NaN or infinite.
        disagreeing: copied keys of which the inputs hold different bytes.
        moments: of each job and input the `moments` of each key.
    """

    nonfinite: dict[int, int] = field(default_factory=dict)
    disagreeing: list[str] = field(default_factory=list)
    moments: dict[tuple[int, ModelNode], dict[str, torch.Tensor]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Scratch:
    """The buffers of one worker, which serve one tile after another."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[object, torch.dtype], torch.Tensor] = {}

    def take(self, name: object, dtype: torch.dtype, count: int) -> torch.Tensor:
        """A buffer of `count` elements, with whatever the last tile has left in it."""
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < count:
            buffer = self._buffers[name, dtype] = torch.empty(count, dtype=dtype)
        return buffer[:count] if buffer.numel() > count else buffer


@dataclass(frozen=True)
class Work:
    """What all tiles of a merge have in common."""

    plan: Plan
    sinks: Mapping[int, Sink]
    tally: Tally
    progress: Progress


class KeyPass:
    """A pass over a key: `tiles` gives its tiles, `run` does one of them, in any order and from any thread.

    Attributes:
        values: of the program so far, by node; those that the pass keeps whole are filled in.
        partials: of the reductions of the pass, which it adds to.
    """

    def __init__(
        self,
        work: Work,
        key: KeyPlan,
        trip: Pass,
        values: dict[Node, torch.Tensor],
        partials: Mapping[MergeNode, Partials],
    ) -> None:
        assert key.program is not None
        self._work, self._plan, self._key, self._trip = work, work.plan, key, trip
        self._program = key.program
        self._dtype = work.plan.options.compute_dtype
        self._values, self._partials = values, partials
        self._checked = work.plan.options.on_nonfinite == "error"
        self._columns = (key.shape[-1] if key.shape else 1) if trip.by_rows else None
        self._infos = {model: work.plan.sources[model].info(key.key) for model in trip.models}
        self._item_bytes = sum(torch_dtype(info.dtype).itemsize for info in self._infos.values())

    @property
    def block(self) -> int:
        """What the boundaries of tiles are multiples of."""
        return block_of(self._key, self._trip)

    def tiles(self) -> list[Tile]:
        """The tiles, in order."""
        block, count = self.block, self._key.numel
        size = -(-max(self._plan.options.tile_size, block) // block) * block
        return [Tile(self._key.key, start, min(start + size, count)) for start in range(0, count, size)]

    def run(self, tile: Tile, scratch: Scratch) -> None:
        """Everything that is done with one tile."""
        if self._loop is not None:
            values, peaks = self._run_loop(tile, scratch)
        else:
            values, peaks = self._run_methods(tile, scratch), {}
        for node in self._trip.kept:
            self._values[node].view(-1)[tile.start : tile.stop] = values[node]
        for number, node in self._trip.outputs:
            self._write(number, values[node], peaks.get(node), tile, scratch)
        self._work.progress(tile.key, (tile.stop - tile.start) * self._item_bytes)

    # fused

    @cached_property
    def _loop(self) -> Callable[..., None] | None:
        """The compiled loop with the small values of this key; None where the pass runs eagerly."""
        fused = self._plan.ways.get(self._trip)
        if not isinstance(fused, FusedPass):
            return None
        loop = compiled(fused.source, fused.signature)
        arguments = fused.arguments(self._values, self._key.key)
        if loop is None or arguments is None:
            return None
        return _bound(loop, *arguments)

    def _run_loop(self, tile: Tile, scratch: Scratch) -> tuple[dict[Node, torch.Tensor], dict[Node, float]]:
        assert self._loop is not None
        trace = self._plan.ways[self._trip].trace  # type: ignore[union-attr]
        count = tile.stop - tile.start
        inputs = [self._read(node, place, tile, scratch) for place, node in enumerate(trace.inputs)]
        values = {
            node: scratch.take(("output", place), self._dtype, count)
            for place, (node, _) in enumerate(trace.outputs)
        }
        whole = torch.int32 if self._dtype.itemsize == 4 else torch.int64
        peaks = torch.zeros(len(inputs) + len(values), dtype=torch.int64)
        totals = [self._total(node, len(refs), tile) for node, refs in trace.terms]
        arrays = [t.numpy() for t in (peaks, *inputs, *values.values(), *totals)]
        self._loop(tile.start, count, *arrays)
        found = peaks.to(whole).view(self._dtype).tolist()
        for node, tensor, peak in zip(trace.inputs, inputs, found, strict=False):
            self._check(node, tensor, peak, tile)
        rest = {**dict(zip(trace.inputs, inputs, strict=True)), **values}
        self._reduce(tile, rest, [n for n, _ in self._trip.reductions if not is_by_entry(n)])
        return values, dict(zip(values, found[len(inputs) :], strict=True))

    def _total(self, node: MergeNode, terms: int, tile: Tile) -> torch.Tensor:
        """Where the loop adds up the terms of a reduction."""
        partials = self._partials[node]
        if isinstance(partials, Sums):
            return partials.rows(tile.start, tile.stop, terms)
        assert isinstance(partials, Counts)
        return partials.mine()

    # eager

    def _run_methods(self, tile: Tile, scratch: Scratch) -> dict[Node, torch.Tensor]:
        """Every value of the pass for one tile, flat; small values as they are."""
        values = dict(self._values)
        for place, node in enumerate(self._trip.nodes):
            if isinstance(node, MergeNode) and self._program.extents[node] is Extent.TILE:
                columns = self._columns if node.method.kind is Kind.ROWWISE else None
                result = self._program.calls[node](values, tile, columns)
                values[node] = self._flat(node, result, tile)
            elif self._program.extents[node] is not Extent.SMALL:
                values[node] = self._read(node, place, tile, scratch)
                if self._checked and isinstance(node, ModelNode):
                    self._check(node, values[node], peak_of(values[node]), tile)
        self._reduce(tile, values, [node for node, _ in self._trip.reductions])
        return values

    def _flat(self, node: MergeNode, result: torch.Tensor, tile: Tile) -> torch.Tensor:
        if result.numel() != tile.stop - tile.start:
            raise MergeError(
                f"the merge method '{node.method.identifier}' gave {result.numel()} values for a tile of "
                f"{tile.stop - tile.start} of the key '{tile.key}', so it is not {node.method.kind.value}. "
                "Declare it without that."
            )
        return result.reshape(-1).to(self._dtype)

    def _reduce(
        self, tile: Tile, values: Mapping[Node, torch.Tensor], reductions: Sequence[MergeNode]
    ) -> None:
        """Add what the tile gives to reductions: entry by entry, or by blocks, which no tile cuts."""
        for node in reductions:
            partials = self._partials[node]
            large = [c for c in node.children if self._program.extents[c] is not Extent.SMALL]
            size = tile.stop - tile.start if is_by_entry(node) else self.block
            for start in range(tile.start, tile.stop, size):
                stop = min(start + size, tile.stop)
                part = {c: values[c][start - tile.start : stop - tile.start] for c in large}
                part = {**self._values, **part}
                place = Tile(tile.key, start, stop)
                partials.add(start, self._program.calls[node].partial(part, place, partials.state))

    # both

    def _read(self, node: Node, place: int, tile: Tile, scratch: Scratch) -> torch.Tensor:
        """A tile of a model or of a whole tensor, in the dtype of the arithmetic."""
        if not isinstance(node, ModelNode):
            return self._values[node].view(-1)[tile.start : tile.stop]
        count, stored = tile.stop - tile.start, torch_dtype(self._infos[node].dtype)
        values = scratch.take(("input", place), self._dtype, count)
        raw = values if stored is self._dtype else scratch.take("raw", stored, count)
        self._plan.sources[node].read_into(tile.key, tile.start, raw)
        return values if raw is values else values.copy_(raw)

    def _check(self, node: Node, values: torch.Tensor, peak: float, tile: Tile) -> None:
        if self._checked and isinstance(node, ModelNode) and not np.isfinite(peak):
            count = int((~values.isfinite()).sum())
            raise MergeError(
                f"{self._plan.sources[node].name}: the key '{tile.key}' has values that are not finite "
                f"({count} NaN or infinite among its elements {tile.start} to {tile.stop}). "
                "on_nonfinite=keep merges them as they are."
            )

    def _write(
        self, number: int, values: torch.Tensor, peak: float | None, tile: Tile, scratch: Scratch
    ) -> None:
        peak = peak_of(values) if peak is None else peak
        for output in self._key.outputs:
            if output.root == number:
                dtype = torch_dtype(output.dtype)
                stored = values
                if dtype is not self._dtype:
                    stored = scratch.take("stored", dtype, values.numel()).copy_(values)
                if not peak < _overflows_from(dtype, self._dtype):
                    self._count_nonfinite(output.job, stored, tile)
                self._work.sinks[output.job].write(tile.key, tile.start, stored)

    def _count_nonfinite(self, job: int, stored: torch.Tensor, tile: Tile) -> None:
        count = int((~stored.to(self._dtype).isfinite()).sum())
        if not count:
            return
        if self._plan.options.strict:
            raise MergeError(
                f"the key '{tile.key}' of the output has {count} values that are not finite in "
                f"{stored.dtype} (elements {tile.start} to {tile.stop}). Write a wider dtype, lower the "
                "strength, or drop strict."
            )
        with self._work.tally.lock:
            nonfinite = self._work.tally.nonfinite
            nonfinite[job] = nonfinite.get(job, 0) + count


def block_of(key: KeyPlan, trip: Pass) -> int:
    """The elements in a block of a pass: whole rows, of about `REDUCTION_BLOCK` elements for reductions."""
    columns = (key.shape[-1] if key.shape else 1) if trip.by_rows else 1
    return max(1, REDUCTION_BLOCK // columns) * columns if trip.reductions else columns


def peak_of(values: torch.Tensor) -> float:
    """The largest magnitude, or NaN if there is one."""
    low, high = (float(v) for v in torch.aminmax(values))
    return max(-low, high) if low == low else low


@lru_cache
def _overflows_from(dtype: torch.dtype, compute_dtype: torch.dtype) -> float:
    """A magnitude below which a number stays finite in `dtype`: what its largest one is, or infinity."""
    return torch.finfo(dtype).max if dtype.itemsize < compute_dtype.itemsize else torch.inf


def _bound(loop: Loop, floats: Any, integers: Any) -> Callable[..., None]:
    def call(start: int, count: int, peaks: Any, *arrays: Any) -> None:
        loop(start, count, floats, integers, peaks, *arrays)

    return call
