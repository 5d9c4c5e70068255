"""From where to where the tiles of a pass over a key go, where they can be streamed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from mecha_exp.checkpoint.files import Place
from mecha_exp.engine.buffers import Scratch
from mecha_exp.engine.looping import KeyLoop
from mecha_exp.engine.sinks import Sink
from mecha_exp.engine.streaming import Stream
from mecha_exp.engine.work import Work
from mecha_exp.signature import Tile


@dataclass(frozen=True)
class Route:
    """The way of the tiles of a pass over a key, from files through its loop to files.

    Attributes:
        sources: where each input lies.
        targets: (output, sink): where outputs go, if anywhere.
        limits: of every input and output the magnitude, in its bits, from which on Python is to look.
    """

    loop: KeyLoop
    sources: Sequence[Place]
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
                place, buffer = open_files.enter_context(sink.placed(tile.key)), outputs[number]
                if place is None or buffer is None:
                    return 0
                writes.append((place, buffer))
            reads = [*zip(self.sources, inputs, strict=True)]
            done = self.loop.stream(
                tile, Stream(length, reads, writes, [*inputs, *outputs], self.limits), scratch
            )
        for (_, sink), (_, buffer) in zip(self.targets, writes, strict=True):
            sink.wrote(tile.key, done * buffer.tensor.itemsize)
        return done


def find_route(work: Work, key: str, loop: KeyLoop) -> Route | None:
    """The route of a pass; None where something is left to do for Python with every tile."""
    kind = loop.kind
    if not kind.does_all:
        return None
    sources = [place for node in kind.sources if (place := work.plan.sources[node].place(key)) is not None]
    if len(sources) < len(kind.sources) or not kind.can_stream:
        return None
    return Route(loop, sources, [(number, work.sinks[job]) for number, job in kind.targets], kind.limits)
