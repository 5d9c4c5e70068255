"""From where to where the tiles of a pass over a key go, where they can be streamed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from mecha_exp.checkpoint import torch_dtype
from mecha_exp.checkpoint.files import Place
from mecha_exp.engine.looping import KeyLoop, stored_dtype
from mecha_exp.engine.overflow import overflows_from
from mecha_exp.engine.partials import is_by_entry
from mecha_exp.engine.planned import KeyPlan, Plan
from mecha_exp.engine.program import Pass
from mecha_exp.engine.sinks import Sink
from mecha_exp.engine.streaming import Stream
from mecha_exp.engine.work import Scratch, Work
from mecha_exp.nodes import ModelNode, Node
from mecha_exp.signature import Tile

_NO_LIMIT = 2**63 - 1


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


def find_route(work: Work, key: KeyPlan, trip: Pass, loop: KeyLoop) -> Route | None:
    """The route of a pass; None where something is left to do for Python with every tile."""
    plan, dtype = work.plan, work.plan.options.compute_dtype
    reduces_blocks = not all(is_by_entry(node) for node, _ in trip.reductions)
    if trip.sampled or trip.kept or reduces_blocks:
        return None
    sources = [
        _source(plan, key, node, read) for node, read in zip(loop.trace.inputs, loop.read, strict=True)
    ]
    checked = plan.options.on_nonfinite == "error"
    limits = array("q", [loop.limit(torch.inf) if checked else _NO_LIMIT] * len(sources))
    targets = []
    for number, (node, _) in enumerate(loop.trace.outputs):
        outputs = [output for output in key.outputs if (output.root, node) in trip.outputs]
        dtypes = [torch_dtype(output.dtype) for output in outputs]
        limits.append(
            loop.limit(min((overflows_from(stored, dtype) for stored in dtypes), default=torch.inf))
        )
        for output, stored in zip(outputs, dtypes, strict=True):
            if plan.keeps(output):
                if stored is not loop.written[number]:
                    return None
                targets.append((number, work.sinks[output.job]))
    found = [place for place in sources if place is not None]
    is_possible = len(found) == len(sources) and loop.streams
    return Route(loop, found, targets, limits) if is_possible else None


def _source(plan: Plan, key: KeyPlan, node: Node, read: torch.dtype) -> Place | None:
    """Where an input lies; None where it is not stored as the loop takes it."""
    if not isinstance(node, ModelNode) or stored_dtype(plan, key, node) is not read:
        return None
    return plan.sources[node].place(key.key)
