"""Kernels by pass, stored dtypes and outputs: chosen once, not per key."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
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
from mecha_exp.engine.planner.keys.key_plan import Output, Structure
from mecha_exp.engine.planner.plan import Plan
from mecha_exp.engine.runtime.overflow import loses_digits_below, overflows_from
from mecha_exp.engine.runtime.stream import can_stream
from mecha_exp.graph.nodes import ModelNode, Node

_NO_LIMIT = 2**63 - 1


class Kernels:
    """The passes of a plan, specialised by the stored dtypes and outputs of keys; built on first use."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._specs: dict[object, PassSpec] = {}

    def of(self, structure: Structure, pass_: Pass) -> PassSpec:
        """The pass, specialised for the keys of a structure."""
        dtypes = tuple(structure.stored[model].dtype for model in pass_.models)
        variant = (pass_, structure.outputs, dtypes)
        if variant not in self._specs:
            stored = dict(zip(pass_.models, map(torch_dtype, dtypes), strict=True))
            outputs = tuple(
                (node, tuple(output for output in structure.outputs if output.root == root))
                for root, node in pass_.outputs
            )
            self._specs[variant] = PassSpec(self._plan, pass_, stored, outputs)
        return self._specs[variant]


@dataclass(frozen=True, eq=False)
class PassSpec:
    """A pass over keys whose inputs have equal dtypes and whose results go to the same outputs.

    Attributes:
        plan, pass_: the pass and its plan.
        stored: the dtype of each input.
        outputs: (node, outputs) for each value that the pass completes.
    """

    plan: Plan
    pass_: Pass
    stored: Mapping[ModelNode, torch.dtype]
    outputs: Sequence[tuple[Node, Sequence[Output]]]

    @cached_property
    def item_bytes(self) -> int:
        """Bytes read per element."""
        return sum(dtype.itemsize for dtype in self.stored.values()) if self.pass_.is_full else 0

    @cached_property
    def least(self) -> Mapping[Output, float]:
        """The least magnitude with all digits, of outputs whose dtype does not go as low as the inputs."""
        outputs = (output for _, outputs in self.outputs for output in outputs)
        each = {o: loses_digits_below(torch_dtype(o.dtype), self.stored.values()) for o in outputs}
        return {output: least for output, least in each.items() if least}

    @cached_property
    def kernel(self) -> Kernel | None:
        """The compiled loop of the pass; None where it runs eagerly."""
        backend = self.plan.backends.get(self.pass_)
        return Kernel(self, backend) if isinstance(backend, FusedPass) else None


class Kernel:
    """The compiled loop of a pass for keys of one `PassSpec`.

    Attributes:
        backend: what the loop computes.
        is_single: whether it computes in float32, rather than in float64.
        read, written: the dtypes of the tiles that go in and out: as stored where it can, to spare a
            conversion; None where only the largest magnitude is wanted.
        text: its source.
        order: the integers that it receives.
        sources: its inputs that are models, in the order of its inputs.
        targets: (output of the loop, job) for every output that is written.
        limits: for every input and output the magnitude, as bits, from which on Python does the tile.
        early: what torch computes of each tile before the loop, and what that needs, in order.
    """

    def __init__(self, spec: PassSpec, backend: FusedPass) -> None:
        self.backend, self._spec = backend, spec
        compute = backend.compute_dtype
        self.is_single = compute.itemsize == 4
        stored: dict[Node, torch.dtype] = dict(spec.stored.items())
        completed = [self._outputs_of(node) for node, _ in backend.trace.outputs]
        written = [[output for output in outputs if spec.plan.keeps(output)] for outputs in completed]
        self.read = tuple(loop_dtype(stored.get(node, compute), compute) for node in backend.trace.inputs)
        self.written = tuple(
            compute if node in spec.pass_.used_here else self._written_as(outputs)
            for (node, _), outputs in zip(backend.trace.outputs, written, strict=True)
        )
        self.text = backend.typed((self.read, self.written))
        self.order = array("q", self.text.order)
        self.sources = [node for node in backend.trace.inputs if isinstance(node, ModelNode)]
        self.targets = [(number, o.job) for number, outputs in enumerate(written) for o in outputs]
        self.limits = array("q", [self._input_limit] * len(self.read) + [*map(self._limit, completed)])
        self._written = written
        self.early = _needed_for(backend.by_torch, spec.pass_)

    @cached_property
    def loop(self) -> Loop | None:
        """The machine code; None where it cannot be compiled."""
        return compiled(self.text)

    @cached_property
    def can_stream(self) -> bool:
        """Whether the stream kernel can call it."""
        return self.loop is not None and can_stream(self.loop)

    @cached_property
    def does_all(self) -> bool:
        """Whether it does all there is to do with a tile whose inputs and outputs are in files."""
        pass_, stored = self._spec.pass_, self._spec.stored
        if pass_.sampled or pass_.kept or not all(is_by_entry(node) for node, _ in pass_.reductions):
            return False
        as_read = tuple(stored[node] for node in self.sources) == self.read
        as_written = all(
            torch_dtype(output.dtype) is dtype
            for outputs, dtype in zip(self._written, self.written, strict=True)
            for output in outputs
        )
        return as_read and as_written

    def _outputs_of(self, node: Node) -> list[Output]:
        """The outputs that a value which the pass completes goes to."""
        return [output for root, outputs in self._spec.outputs if root is node for output in outputs]

    def _written_as(self, outputs: Sequence[Output]) -> torch.dtype | None:
        dtypes = {torch_dtype(output.dtype) for output in outputs}
        if len(dtypes) > 1:
            return self.backend.compute_dtype
        return loop_dtype(dtypes.pop(), self.backend.compute_dtype) if dtypes else None

    @property
    def _input_limit(self) -> int:
        return self._bits(np.inf) if self._spec.plan.options.on_nonfinite == "error" else _NO_LIMIT

    def _limit(self, outputs: Sequence[Output]) -> int:
        fits = (overflows_from(torch_dtype(output.dtype), self.backend.compute_dtype) for output in outputs)
        return self._bits(min(fits, default=np.inf))

    def _bits(self, magnitude: float) -> int:
        """The bits of a magnitude, as the loop compares it."""
        if self.is_single:
            return int(np.float32(magnitude).view(np.int32))
        return int(np.float64(magnitude).view(np.int64))


def _needed_for(wanted: Iterable[Node], pass_: Pass) -> tuple[Node, ...]:
    """The nodes of a pass that these need, and they themselves, arguments before their users."""
    needed = set(wanted)
    for node in reversed(pass_.nodes):
        if node in needed:
            needed.update(node.children)
    return tuple(node for node in pass_.nodes if node in needed)
