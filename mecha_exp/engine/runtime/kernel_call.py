"""Calls the kernel of a pass: on one tile in memory, or from file to file without Python in between."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch

from mecha_exp.checkpoint.positional import FileRegion
from mecha_exp.engine.compiler.abi import WORD, Rank
from mecha_exp.engine.compiler.codegen import SHORT
from mecha_exp.engine.compiler.object_file import Loop
from mecha_exp.engine.ir.reductions import Accumulator, Ranked, Sums, SumTable
from mecha_exp.engine.runtime.buffers import Buffer, Scratch
from mecha_exp.engine.runtime.context import MergeContext
from mecha_exp.engine.runtime.kernels import Kernel, PassSpec
from mecha_exp.engine.runtime.stream import LoopTable, Stream, run_stream
from mecha_exp.engine.sinks import Sink
from mecha_exp.graph.nodes import MergeNode, Node
from mecha_exp.method_api.state_dict import Tile


class KernelCall:
    """The kernel of a pass, bound to the small values of a key and to the accumulators of its reductions."""

    def __init__(
        self,
        kernel: Kernel,
        code: Loop,
        small: tuple[array[float], array[int]],
        accumulators: Mapping[MergeNode, Accumulator],
        columns: int,
    ) -> None:
        self.kernel, self.trace = kernel, kernel.backend.trace
        self.read, self.written = kernel.read, kernel.written
        self._code, self._room = code, kernel.text.room + kernel.text.row_room * max(columns, SHORT)
        self._small = (*small, kernel.order)  # whose memory the loop reads
        self._addresses = [numbers.buffer_info()[0] for numbers in self._small]
        is_single = kernel.is_single
        self._bits, self._number = (np.int32, np.float32) if is_single else (np.int64, np.float64)
        self._key_dtype = torch.int32 if is_single else torch.int64
        reductions = [(accumulators[node], refs) for node, refs in self.trace.terms]
        self._ranked = [reduction for reduction, _ in reductions if isinstance(reduction, Ranked)]
        self._sums = SumTable([(r, len(refs)) for r, refs in reductions if isinstance(r, Sums)])

    def buffers(self, count: int, scratch: Scratch) -> tuple[list[Buffer], list[Buffer | None]]:
        """Memory for the inputs and outputs of a tile; None for an output of which only the peak counts."""
        inputs = [scratch.take(("input", index), dtype, count) for index, dtype in enumerate(self.read)]
        return inputs, self.output_buffers(count, scratch)

    def output_buffers(self, count: int, scratch: Scratch) -> list[Buffer | None]:
        """Memory for the outputs of a tile."""
        return [
            scratch.take(("output", index), dtype, count) if dtype else None
            for index, dtype in enumerate(self.written)
        ]

    def run(
        self, tile: Tile, inputs: Sequence[Buffer], outputs: Sequence[Buffer | None], scratch: Scratch
    ) -> list[float]:
        """Compute a tile and add to the accumulators; returns the peak of each input and output.

        A peak is the largest magnitude, or NaN where a value is NaN.
        """
        table = self._table(tile, [*inputs, *outputs], scratch)
        self._code(tile.offset + tile.start, tile.stop - tile.start, table.address)
        self._collect(table)
        peaks: list[float] = (
            np.frombuffer(table.peaks.view, np.int64).astype(self._bits).view(self._number).tolist()
        )
        return peaks

    def stream(self, tile: Tile, stream: Stream, scratch: Scratch) -> int:
        """Read, compute and write a tile in parts, without Python; returns how many elements are done.

        Where that is not all of the tile, `run` must do the next part.
        """
        table = self._table(tile, stream.tiles, scratch)
        done = run_stream(stream, self._code, tile, table)
        self._collect(table)
        return done

    def _table(self, tile: Tile, tiles: Sequence[Buffer | None], scratch: Scratch) -> LoopTable:
        """The table that the loop receives for a tile: its words are in the order of `abi.Table`."""
        count = tile.stop - tile.start
        candidates = [
            scratch.take(("candidates", index), self._key_dtype, count + 1)
            for index in range(len(self._ranked))
        ]
        found = array("q")
        for reduction in self._ranked:
            found.extend((*reduction.bracket, *[0] * (len(Rank) - len(reduction.bracket))))
        first, row_bytes = found.buffer_info()[0], len(Rank) * WORD
        terms = [self._sums.address(tile.start), *(buffer.address for buffer in candidates)]
        terms += range(first, first + len(candidates) * row_bytes, row_bytes)
        peaks = scratch.take("peaks", torch.int64, len(tiles))
        room = scratch.take("room", torch.int8, self._room)
        memory = [buffer.address if buffer else 0 for buffer in tiles]
        addresses = array("q", [*self._addresses, peaks.address, room.address, *memory, *terms])
        return LoopTable(addresses, peaks, candidates, found, self._sums.row_bytes)

    def _collect(self, table: LoopTable) -> None:
        """Hand the counts and candidates of a tile to the accumulators of ranks."""
        for index, (reduction, buffer) in enumerate(zip(self._ranked, table.candidates, strict=True)):
            row = table.found[index * len(Rank) : (index + 1) * len(Rank)]
            inside = buffer.tensor[: row[Rank.INSIDE]].numpy().copy()
            below, no_numbers, at_low, at_high = row[Rank.BELOW : Rank.INSIDE]
            reduction.collect(below, no_numbers, at_low, at_high, inside)


def kernel_call(
    spec: PassSpec,
    key: str,
    columns: int,
    values: Mapping[Node, torch.Tensor],
    accumulators: Mapping[MergeNode, Accumulator],
) -> KernelCall | None:
    """Bind the kernel of a pass to a key whose small values are known; None where the pass runs eagerly.

    Args:
        columns: the length of a row.
    """
    kernel = spec.kernel
    if kernel is None or kernel.loop is None:
        return None
    small = kernel.backend.arguments(values, key, columns)
    return KernelCall(kernel, kernel.loop, small, accumulators, columns) if small else None


@dataclass(frozen=True)
class StreamLaunch:
    """Streams the tiles of a pass over a key from files through its kernel to files.

    Attributes:
        call: the kernel with its arguments.
        sources: where each input lies.
        targets: (output, sink) for every output that is written.
        limits: for every input and output the magnitude, as bits, from which on Python does the tile.
    """

    call: KernelCall
    sources: Sequence[FileRegion]
    targets: Sequence[tuple[int, Sink]]
    limits: array[int]

    def run(self, tile: Tile, length: int, scratch: Scratch) -> int:
        """Stream a tile in parts of `length` elements; returns how many elements are done."""
        inputs, outputs = self.call.buffers(length, scratch)
        with ExitStack() as open_files:
            writes = []
            for output, sink in self.targets:
                region, buffer = open_files.enter_context(sink.writing_at(tile.key)), outputs[output]
                if region is None or buffer is None:
                    return 0
                writes.append((region, buffer))
            reads = [*zip(self.sources, inputs, strict=True)]
            stream = Stream(length, reads, writes, [*inputs, *outputs], self.limits)
            done = self.call.stream(tile, stream, scratch)
        for (_, sink), (_, buffer) in zip(self.targets, writes, strict=True):
            sink.advance(tile.key, done * buffer.tensor.itemsize)
        return done


def stream_launch(context: MergeContext, key: str, call: KernelCall) -> StreamLaunch | None:
    """The launch that streams a key; None where every tile needs Python."""
    kernel = call.kernel
    if not kernel.does_all:
        return None
    sources = [
        region for node in kernel.sources if (region := context.plan.sources[node].region(key)) is not None
    ]
    if len(sources) < len(kernel.sources) or not kernel.can_stream:
        return None
    targets = [(output, context.sinks[job]) for output, job in kernel.targets]
    return StreamLaunch(call, sources, targets, kernel.limits)
