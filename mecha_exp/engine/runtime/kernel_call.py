"""Calls the kernel of a pass: on one tile, or from file to file without Python in between."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch

from mecha_exp.checkpoint.positional import FileRegion
from mecha_exp.engine.compiler.object_file import Loop
from mecha_exp.engine.ir.reductions import Accumulator, Ranked, Sums, SumTable
from mecha_exp.engine.runtime.buffers import Buffer, Scratch
from mecha_exp.engine.runtime.context import MergeContext
from mecha_exp.engine.runtime.kernels import Kernel, PassSpec
from mecha_exp.engine.runtime.stream import LoopTable, Stream, run_stream
from mecha_exp.engine.sinks import Sink
from mecha_exp.graph.nodes import MergeNode, Node
from mecha_exp.method_api.state_dict import Tile

_FOUND = 5
"""Numbers that a loop finds of a rank."""


class KeyLoop:
    """The loop of a pass with the small values of a key; see `writing` for what the machine code is given.

    Attributes:
        kind, trace, read, written: what it is for all keys of a kind.
    """

    def __init__(
        self,
        kind: Kernel,
        code: Loop,
        small: tuple[array[float], array[int]],
        partials: Mapping[MergeNode, Accumulator],
    ) -> None:
        self.kind, self.trace = kind, kind.backend.trace
        self.read, self.written = kind.read, kind.written
        self._code, self._room = code, kind.text.room
        self._small = (*small, kind.order)  # whose memory the loop reads
        self._addresses = [numbers.buffer_info()[0] for numbers in self._small]
        is_single = kind.is_single
        self._bits, self._number = (np.int32, np.float32) if is_single else (np.int64, np.float64)
        self._key_dtype = torch.int32 if is_single else torch.int64
        reductions = [(partials[node], refs) for node, refs in self.trace.terms]
        self._ranked = [reduction for reduction, _ in reductions if isinstance(reduction, Ranked)]
        self._sums = SumTable([(r, len(refs)) for r, refs in reductions if isinstance(r, Sums)])

    def run(
        self, tile: Tile, inputs: Sequence[Buffer], outputs: Sequence[Buffer | None], scratch: Scratch
    ) -> list[float]:
        """Compute a tile and add to the partials; returns the largest magnitude of each input and output."""
        table = self._table(tile, [*inputs, *outputs], scratch)
        self._code(tile.start, tile.stop - tile.start, table.address)
        self._collect(table)
        largest: list[float] = (
            np.frombuffer(table.peaks.view, np.int64).astype(self._bits).view(self._number).tolist()
        )
        return largest

    def stream(self, tile: Tile, stream: Stream, scratch: Scratch) -> int:
        """Read, compute and write a tile by parts, without Python; returns how many entries are done.

        The next part is one that `run` has to do.
        """
        table = self._table(tile, stream.tiles, scratch)
        done = run_stream(stream, self._code, tile, table)
        self._collect(table)
        return done

    def _table(self, tile: Tile, tiles: Sequence[Buffer | None], scratch: Scratch) -> LoopTable:
        """What the loop is to be given for a tile."""
        count = tile.stop - tile.start
        kept = [
            scratch.take(("kept", place), self._key_dtype, count + 1) for place in range(len(self._ranked))
        ]
        found = array("q")
        for reduction in self._ranked:
            found.extend((*reduction.bracket, 0, 0, 0))
        place, size = found.buffer_info()[0], _FOUND * found.itemsize
        terms = [self._sums.address(tile.start), *(buffer.address for buffer in kept)]
        terms += range(place, place + len(kept) * size, size)
        peaks = scratch.take("peaks", torch.int64, len(tiles))
        room = scratch.take("room", torch.int8, self._room)
        places = [buffer.address if buffer else 0 for buffer in tiles]
        addresses = array("q", [*self._addresses, peaks.address, room.address, *places, *terms])
        return LoopTable(addresses, peaks, kept, found, self._sums.row_bytes)

    def _collect(self, table: LoopTable) -> None:
        """Hand on what the loop has found of ranks."""
        for place, (reduction, buffer) in enumerate(zip(self._ranked, table.kept, strict=True)):
            _, _, below, no_numbers, inside = table.found[place * _FOUND : (place + 1) * _FOUND]
            reduction.collect(below, no_numbers, buffer.tensor[:inside].numpy().copy())


def loop_for(
    kind: PassSpec, key: str, values: Mapping[Node, torch.Tensor], partials: Mapping[MergeNode, Accumulator]
) -> KeyLoop | None:
    """The loop for a pass over a key, whose small values are known; None where the pass runs eagerly.

    It adds to `partials`.
    """
    fused = kind.fused
    if fused is None or fused.loop is None:
        return None
    small = fused.backend.arguments(values, key)
    return KeyLoop(fused, fused.loop, small, partials) if small else None


@dataclass(frozen=True)
class Route:
    """The way of the tiles of a pass over a key, from files through its loop to files.

    Attributes:
        sources: where each input lies.
        targets: (output, sink): where outputs go, if anywhere.
        limits: of every input and output the magnitude, in its bits, from which on Python is to look.
    """

    loop: KeyLoop
    sources: Sequence[FileRegion]
    targets: Sequence[tuple[int, Sink]]
    limits: array[int]

    def stream(self, tile: Tile, length: int, scratch: Scratch) -> int:
        """Go through parts of a tile, of so many entries each; returns how many are done without Python."""
        inputs = [scratch.take(("input", place), dtype, length) for place, dtype in enumerate(self.loop.read)]
        outputs = [
            scratch.take(("output", place), dtype, length) if dtype else None
            for place, dtype in enumerate(self.loop.written)
        ]
        with ExitStack() as open_files:
            writes = []
            for number, sink in self.targets:
                place, buffer = open_files.enter_context(sink.writing_at(tile.key)), outputs[number]
                if place is None or buffer is None:
                    return 0
                writes.append((place, buffer))
            reads = [*zip(self.sources, inputs, strict=True)]
            done = self.loop.stream(
                tile, Stream(length, reads, writes, [*inputs, *outputs], self.limits), scratch
            )
        for (_, sink), (_, buffer) in zip(self.targets, writes, strict=True):
            sink.advance(tile.key, done * buffer.tensor.itemsize)
        return done


def find_route(work: MergeContext, key: str, loop: KeyLoop) -> Route | None:
    """The route of a pass; None where something is left to do for Python with every tile."""
    kind = loop.kind
    if not kind.does_all:
        return None
    sources = [place for node in kind.sources if (place := work.plan.sources[node].region(key)) is not None]
    if len(sources) < len(kind.sources) or not kind.can_stream:
        return None
    return Route(loop, sources, [(number, work.sinks[job]) for number, job in kind.targets], kind.limits)
