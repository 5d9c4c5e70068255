"""Fused loops: all that a pass does to one element, in one compiled loop over the tile.

    trace (what torch would do)  ->  source of a loop  ->  machine code, kept by source  ->  a call per tile

The loop says the same operations in the same order with the same rounding as torch, so it gives the same
bits; it only leaves out the memory between them. `codegen` shows what it looks like.
Fractions are arguments of the loop and not part of it: a sweep over alpha compiles once.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch

from mecha_exp.engine.compiler.codegen import LoopWriter
from mecha_exp.engine.compiler.jit import LoopText, can_compile
from mecha_exp.engine.compiler.trace import ROW_LENGTH, Computed, Given, Trace
from mecha_exp.engine.compiler.tracer import trace_program
from mecha_exp.engine.devices import CPU
from mecha_exp.engine.ir.calls import Extent
from mecha_exp.engine.ir.program import Pass, Program
from mecha_exp.engine.options import EngineOptions
from mecha_exp.graph.nodes import Node
from mecha_exp.random import philox_key

WORTH_COMPILING = 250_000_000
"""Operations on elements that take torch on two cores a quarter of the time that compiling takes, or a half.

The loop is kept for the next merges: SLERP of two models of 0.1 GB took 2.1 s by torch, as long as with a
loop that was compiled for it, and 0.3 s with one that was there.
"""

TOO_SMALL = "too small to be worth compiling"
_MOST_OPERATIONS = 16  # of a method, to tell a tiny merge without tracing it


TileDtypes: TypeAlias = tuple[tuple[torch.dtype, ...], tuple[torch.dtype | None, ...]]
"""The dtypes of the inputs and outputs of a loop; None for an output that is not written."""


@dataclass(frozen=True, eq=False)
class FusedPass:
    """A pass as a loop: its source, and what to call it with.

    Attributes:
        trace: what the pass computes.
        program: that the pass belongs to.
        compute_dtype: the dtype of the tiles that go in and out.
    """

    trace: Trace
    program: Program
    compute_dtype: torch.dtype
    _texts: dict[TileDtypes, LoopText] = field(default_factory=dict, repr=False)

    @cached_property
    def structure(self) -> str:
        """The source of the loop: equal for passes that compute the same."""
        return self.typed(((), ())).source

    def typed(self, dtypes: TileDtypes) -> LoopText:
        """The loop for tiles of these dtypes, by input and by output; see `loop_dtype`."""
        if dtypes not in self._texts:
            self._texts[dtypes] = LoopWriter(self.trace, self.compute_dtype, *dtypes).text()
        return self._texts[dtypes]

    @cached_property
    def by_torch(self) -> frozenset[Node]:
        """The inputs that torch computes of each tile before the loop: what is done by rows."""
        return frozenset(node for node in self.trace.inputs if node in self.program.tile_calls)

    @property
    def operations(self) -> int:
        """How many operations an element goes through."""
        return len(self.trace.expressions)

    def arguments(
        self, values: Mapping[Node, torch.Tensor], key: str, columns: int
    ) -> tuple[array[float], array[int]] | None:
        """The small values for one key, as floats and ints; None if one of them is not a single number.

        The last integer is the length of a row.
        """
        known: dict[Computed, Any] = {ROW_LENGTH: torch.tensor(columns, dtype=torch.float64)}
        floats, integers = array("d"), array("q")
        for small, dtype in self.trace.arguments:
            value = _evaluate(small, values, known)
            if value.ndim or value.dtype is not dtype:
                return None
            if dtype.is_floating_point:
                floats.append(value.item())
            else:
                integers.append(int(value.item()))
        for node in self.trace.draws:
            hyperparameters = self.program.calls[node].hyperparameters
            integers.extend((*philox_key(key, hyperparameters["seed"]), hyperparameters["stream"]))
        integers.append(columns)
        return floats, integers


def choose_backends(elements: Mapping[Program, int], options: EngineOptions) -> dict[Pass, FusedPass | str]:
    """How each pass of the programs is run: as a loop, or eagerly for the reason given.

    Args:
        elements: how many elements go through each program.
        options: `fuse` counts.
    """
    node_elements = sum(n * sum(p.size for p in o.full_passes) for o, n in elements.items())
    reason = _reason_against(node_elements, options)
    if reason:
        return {p: reason for program in elements for stage in program.stages for p in stage.passes}
    backends: dict[Pass, FusedPass | str] = {}
    work: dict[str, int] = {}
    for program, count in elements.items():
        for pass_, trace in trace_program(program).items():
            backend = trace if isinstance(trace, str) else FusedPass(trace, program, program.dtype)
            backends[pass_] = backend
            if isinstance(backend, FusedPass):
                work.setdefault(backend.structure, 0)
                work[backend.structure] += count * backend.operations if pass_.is_full else 0
    if options.fuse == "always":
        return backends
    return {
        pass_: backend
        if isinstance(backend, str) or work[backend.structure] >= WORTH_COMPILING
        else TOO_SMALL
        for pass_, backend in backends.items()
    }


def _reason_against(node_elements: int, options: EngineOptions) -> str | None:
    """The reason why no pass is fused, if there is one."""
    if options.device != CPU:
        return f"torch computes on {options.device}"
    if options.fuse == "never":
        return "fuse=never"
    if options.fuse == "auto" and node_elements * _MOST_OPERATIONS < WORTH_COMPILING:
        return TOO_SMALL
    return None if can_compile() else "numba is not installed"


def describe_backends(program: Program, backends: Mapping[Pass, FusedPass | str]) -> list[str]:
    """How each pass and each whole-tensor method of a program is run, in words."""
    words = ["whole" for stage in program.stages for n in stage.before if program.extents[n] is Extent.WHOLE]
    for pass_ in program.full_passes:
        backend = backends.get(pass_, TOO_SMALL)
        if isinstance(backend, str):
            words.append(f"eager: {backend}")
        else:
            words.append("fused but for rows" if backend.by_torch else "fused")
    return words


def _evaluate(small: Any, values: Mapping[Node, torch.Tensor], known: dict[Computed, Any]) -> Any:
    """A small value, run by torch where it is computed."""
    if isinstance(small, Given):
        return values[small.node]
    if isinstance(small, list):
        return [_evaluate(s, values, known) for s in small]
    if not isinstance(small, Computed):
        return small
    if small not in known:
        args = [_evaluate(a, values, known) for a in small.args]
        kwargs = {name: _evaluate(a, values, known) for name, a in small.kwargs.items()}
        result = small.function(*args, **kwargs)
        known[small] = result if small.index is None else result[small.index]
    return known[small]
