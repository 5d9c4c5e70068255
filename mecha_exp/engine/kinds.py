"""What a pass is for all keys that are stored alike and go the same way: looked up once, not key by key."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from mecha_exp.checkpoint import torch_dtype
from mecha_exp.engine.compiling import LoopText, compiled
from mecha_exp.engine.fusion import FusedPass, TileDtypes
from mecha_exp.engine.objects import Loop
from mecha_exp.engine.overflow import overflows_from
from mecha_exp.engine.partials import is_by_entry
from mecha_exp.engine.planned import KeyPlan, Output, Plan
from mecha_exp.engine.program import Pass
from mecha_exp.engine.streaming import can_stream
from mecha_exp.engine.writing import loop_dtype
from mecha_exp.nodes import ModelNode, Node

_NO_LIMIT = 2**63 - 1


class Kinds:
    """The kinds of keys that the passes of a plan meet."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._known: dict[object, PassKind] = {}

    def of(self, key: KeyPlan, trip: Pass) -> PassKind:
        """What a pass is for a key."""
        sources = self._plan.sources
        dtypes = tuple(sources[model].info(key.key).dtype for model in trip.models)
        name = (trip, key.outputs, dtypes)
        if name not in self._known:
            stored = dict(zip(trip.models, map(torch_dtype, dtypes), strict=True))
            outputs = tuple(
                (node, tuple(output for output in key.outputs if output.root == root))
                for root, node in trip.outputs
            )
            self._known[name] = PassKind(self._plan, trip, stored, outputs)
        return self._known[name]


@dataclass(frozen=True, eq=False)
class PassKind:
    """A pass over keys of one kind.

    Attributes:
        plan, trip: the pass, and what it is part of.
        stored: the dtype of each input.
        outputs: (node, outputs): where what is finished here goes.
    """

    plan: Plan
    trip: Pass
    stored: Mapping[ModelNode, torch.dtype]
    outputs: Sequence[tuple[Node, Sequence[Output]]]

    @cached_property
    def item_bytes(self) -> int:
        """What is read of an element."""
        return sum(dtype.itemsize for dtype in self.stored.values()) if self.trip.is_full else 0

    @cached_property
    def way(self) -> FusedPass | None:
        """The loop that it is fused into; None where it runs eagerly."""
        way = self.plan.ways.get(self.trip)
        return way if isinstance(way, FusedPass) else None

    @cached_property
    def dtypes(self) -> TileDtypes:
        """How the loop takes inputs and gives outputs: as stored where it can, to spare a conversion."""
        assert self.way is not None
        compute = self.way.compute_dtype
        stored: dict[Node, torch.dtype] = dict(self.stored.items())
        read = (loop_dtype(stored.get(node, compute), compute) for node in self.way.trace.inputs)
        return tuple(read), tuple(self._written_as(node, compute) for node, _ in self.way.trace.outputs)

    @cached_property
    def text(self) -> LoopText | None:
        """The source of the loop."""
        return self.way.typed(self.dtypes) if self.way else None

    @cached_property
    def loop(self) -> Loop | None:
        """Its machine code; None where the pass runs eagerly."""
        return compiled(self.text) if self.text else None

    @cached_property
    def order(self) -> array[int]:
        """The whole numbers that the loop is to be given."""
        return array("q", self.text.order if self.text else ())

    @cached_property
    def is_by_loop(self) -> bool:
        """Whether the loop does all there is to do with a tile whose inputs and outputs are in files."""
        trip = self.trip
        if trip.sampled or trip.kept or not all(is_by_entry(node) for node, _ in trip.reductions):
            return False
        read, written = self.dtypes
        as_read = len(self.sources) == len(read) and all(
            self.stored[node] is dtype for node, dtype in zip(self.sources, read, strict=True)
        )
        return as_read and all(dtype is written[number] for number, dtype, _ in self._given)

    @cached_property
    def can_stream(self) -> bool:
        """Whether other machine code can call the loop."""
        return self.loop is not None and can_stream(self.loop)

    @cached_property
    def sources(self) -> Sequence[ModelNode]:
        """The inputs of the loop that are models, in its order."""
        return [node for node in self.way.trace.inputs if isinstance(node, ModelNode)] if self.way else []

    @cached_property
    def targets(self) -> Sequence[tuple[int, int]]:
        """(output of the loop, job) for what is given to somebody."""
        return [(number, job) for number, _, job in self._given]

    @cached_property
    def limits(self) -> array[int]:
        """Of the loop's inputs and outputs the magnitudes, in their bits, from which on Python is to look."""
        checked = self.plan.options.on_nonfinite == "error"
        limits = [self._bits(np.inf) if checked else _NO_LIMIT for _ in self.dtypes[0]]
        compute = self.plan.options.compute_dtype
        for outputs in self._loop_outputs:
            fits = (overflows_from(torch_dtype(output.dtype), compute) for output in outputs)
            limits.append(self._bits(min(fits, default=np.inf)))
        return array("q", limits)

    @property
    def _loop_outputs(self) -> list[list[Output]]:
        """Of every output of the loop where it goes."""
        nodes = [node for node, _ in self.way.trace.outputs] if self.way else []
        return [[o for given, outputs in self.outputs if given is node for o in outputs] for node in nodes]

    @property
    def _given(self) -> list[tuple[int, torch.dtype, int]]:
        """(output of the loop, dtype, job) for what is given to somebody."""
        return [
            (number, torch_dtype(output.dtype), output.job)
            for number, outputs in enumerate(self._loop_outputs)
            for output in outputs
            if self.plan.keeps(output)
        ]

    def _written_as(self, node: Node, compute: torch.dtype) -> torch.dtype | None:
        """How the loop gives what it computes; None where only the largest magnitude is wanted."""
        if node in self.trip.used_here:
            return compute
        wanted = {
            torch_dtype(output.dtype)
            for given, outputs in self.outputs
            for output in outputs
            if given is node and self.plan.keeps(output)
        }
        if len(wanted) > 1:
            return compute
        return loop_dtype(wanted.pop(), compute) if wanted else None

    def _bits(self, magnitude: float) -> int:
        """A magnitude as the loop gives it, in its bits."""
        single = self.plan.options.compute_dtype.itemsize == 4
        number, bits = (np.float32, np.int32) if single else (np.float64, np.int64)
        return int(number(magnitude).view(bits))
