"""What a pass is for all keys that are stored alike and go the same way: looked up once, not key by key."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from mecha_exp.checkpoint import torch_dtype
from mecha_exp.engine.compiler.codegen import loop_dtype
from mecha_exp.engine.compiler.fusion import FusedPass
from mecha_exp.engine.compiler.jit import compiled
from mecha_exp.engine.compiler.object_file import Loop
from mecha_exp.engine.ir.program import Pass
from mecha_exp.engine.ir.reductions import is_by_entry
from mecha_exp.engine.planner.plan import KeyPlan, Output, Plan
from mecha_exp.engine.runtime.overflow import overflows_from
from mecha_exp.engine.runtime.stream import can_stream
from mecha_exp.graph.nodes import ModelNode, Node

_NO_LIMIT = 2**63 - 1


class Kernels:
    """The kinds of keys that the passes of a plan meet."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._known: dict[object, PassSpec] = {}

    def of(self, key: KeyPlan, pass_: Pass) -> PassSpec:
        """What a pass is for a key."""
        sources = self._plan.sources
        dtypes = tuple(sources[model].info(key.key).dtype for model in pass_.models)
        name = (pass_, key.outputs, dtypes)
        if name not in self._known:
            stored = dict(zip(pass_.models, map(torch_dtype, dtypes), strict=True))
            outputs = tuple(
                (node, tuple(output for output in key.outputs if output.root == root))
                for root, node in pass_.outputs
            )
            self._known[name] = PassSpec(self._plan, pass_, stored, outputs)
        return self._known[name]


@dataclass(frozen=True, eq=False)
class PassSpec:
    """A pass over keys of one kind.

    Attributes:
        plan, pass: the pass, and what it is part of.
        stored: the dtype of each input.
        outputs: (node, outputs): where what is finished here goes.
    """

    plan: Plan
    pass_: Pass
    stored: Mapping[ModelNode, torch.dtype]
    outputs: Sequence[tuple[Node, Sequence[Output]]]

    @cached_property
    def item_bytes(self) -> int:
        """What is read of an element."""
        return sum(dtype.itemsize for dtype in self.stored.values()) if self.pass_.is_full else 0

    @cached_property
    def fused(self) -> Kernel | None:
        """Its loop; None where it runs eagerly."""
        backend = self.plan.backends.get(self.pass_)
        return Kernel(self, backend) if isinstance(backend, FusedPass) else None


class Kernel:
    """The loop of a pass for keys of one kind.

    Attributes:
        way: what the loop computes.
        is_single: whether it computes in float32, rather than in float64.
        read, written: the dtypes of the tiles that go in and out: as stored where it can, to spare a
            conversion; None where only the largest magnitude is wanted.
        text: its source.
        order: the whole numbers that it is to be given.
        sources: its inputs that are models, in its order.
        targets: (output of the loop, job) for what is given to somebody.
        limits: of its inputs and outputs the magnitudes, in their bits, from which on Python is to look.
    """

    def __init__(self, kind: PassSpec, backend: FusedPass) -> None:
        self.backend, self._kind = backend, kind
        compute = backend.compute_dtype
        self.is_single = compute.itemsize == 4
        stored: dict[Node, torch.dtype] = dict(kind.stored.items())
        going = [self._going(node) for node, _ in backend.trace.outputs]
        given = [[output for output in outputs if kind.plan.keeps(output)] for outputs in going]
        self.read = tuple(loop_dtype(stored.get(node, compute), compute) for node in backend.trace.inputs)
        self.written = tuple(
            compute if node in kind.pass_.used_here else self._written_as(outputs)
            for (node, _), outputs in zip(backend.trace.outputs, given, strict=True)
        )
        self.text = backend.typed((self.read, self.written))
        self.order = array("q", self.text.order)
        self.sources = [node for node in backend.trace.inputs if isinstance(node, ModelNode)]
        self.targets = [(number, o.job) for number, outputs in enumerate(given) for o in outputs]
        self.limits = array("q", [self._input_limit] * len(self.read) + [*map(self._limit, going)])
        self._given = given

    @cached_property
    def loop(self) -> Loop | None:
        """Its machine code; None where it cannot be compiled."""
        return compiled(self.text)

    @cached_property
    def can_stream(self) -> bool:
        """Whether other machine code can call it."""
        return self.loop is not None and can_stream(self.loop)

    @cached_property
    def does_all(self) -> bool:
        """Whether it does all there is to do with a tile whose inputs and outputs are in files."""
        pass_, stored = self._kind.pass_, self._kind.stored
        if pass_.sampled or pass_.kept or not all(is_by_entry(node) for node, _ in pass_.reductions):
            return False
        as_read = tuple(stored[node] for node in self.sources) == self.read
        as_written = all(
            torch_dtype(output.dtype) is dtype
            for outputs, dtype in zip(self._given, self.written, strict=True)
            for output in outputs
        )
        return as_read and as_written

    def _going(self, node: Node) -> list[Output]:
        """Where a node goes that is finished here."""
        return [output for given, outputs in self._kind.outputs if given is node for output in outputs]

    def _written_as(self, given: Sequence[Output]) -> torch.dtype | None:
        wanted = {torch_dtype(output.dtype) for output in given}
        if len(wanted) > 1:
            return self.backend.compute_dtype
        return loop_dtype(wanted.pop(), self.backend.compute_dtype) if wanted else None

    @property
    def _input_limit(self) -> int:
        return self._bits(np.inf) if self._kind.plan.options.on_nonfinite == "error" else _NO_LIMIT

    def _limit(self, outputs: Sequence[Output]) -> int:
        fits = (overflows_from(torch_dtype(output.dtype), self.backend.compute_dtype) for output in outputs)
        return self._bits(min(fits, default=np.inf))

    def _bits(self, magnitude: float) -> int:
        """A magnitude as the loop gives it, in its bits."""
        if self.is_single:
            return int(np.float32(magnitude).view(np.int32))
        return int(np.float64(magnitude).view(np.int64))
