"""Fused loops: all that a pass does to one element, in one compiled loop over the tile.

    trace (what torch would do)  ->  source of a loop  ->  machine code, kept by source  ->  a call per tile

The loop says the same operations in the same order with the same rounding as torch, so it gives the same
bits; it only leaves out the memory between them. This is the one for a pass that needs the sum of
`base + alpha * (model - base)` and the result itself:

    def loop(start, count, floats, integers, peaks, x0, x1, y0, s0):
        a0 = float32(floats[0])
        ...
        for block in range(0, count, 65536):
            lanes0[:] = 0
            for first in range(block, min(block + 65536, count), 2048):
                ...
                for j in range(size):
                    v0 = x0_[j]
                    v1 = x1_[j]
                    v2 = float32(v1 - v0)
                    v3 = float32(a0 * v2)
                    v4 = float32(v0 + v3)
                    y0_[j] = v4
                    lanes0[j] += float64(v4)
            s0[block // 65536, 0] = folded(lanes0)

Fractions are arguments of the loop and not part of it: a sweep over alpha compiles once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mecha_exp.engine.compiling import can_compile
from mecha_exp.engine.operations import NUMBERS, OPERATIONS, ROUNDED
from mecha_exp.engine.options import EngineOptions
from mecha_exp.engine.partials import LANES, REDUCTION_BLOCK
from mecha_exp.engine.program import Extent, Pass, Program
from mecha_exp.engine.recording import (
    DRAW,
    INPUT,
    Argument,
    Computed,
    Expression,
    Given,
    Operand,
    Ref,
    Trace,
)
from mecha_exp.engine.tracing import trace_program
from mecha_exp.method import Reduction
from mecha_exp.nodes import MergeNode, Node
from mecha_exp.random import philox_key

WORTH_COMPILING = 200_000_000
"""Operations on elements that take torch about as long as it takes to get a loop compiled."""

TOO_SMALL = "too small to be worth compiling"
_MOST_OPERATIONS = 16  # of a method, to tell a tiny merge without tracing it


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

    @cached_property
    def source(self) -> str:
        """The loop as a Python function `loop`; equal sources are one piece of machine code."""
        return "\n".join(_module(self.trace, self.compute_dtype)) + "\n"

    @property
    def signature(self) -> str:
        """The types of the loop's parameters."""
        tile = f"{NUMBERS[self.compute_dtype]}[::1]"
        kinds = ["int64", "int64", "float64[::1]", "int64[::1]", "int64[::1]"]
        kinds += [tile] * (len(self.trace.inputs) + len(self.trace.outputs))
        for node, _ in self.trace.terms:
            kinds.append("float64[:, ::1]" if _sums(node) else "int64[::1]")
        return f"void({', '.join(kinds)})"

    @property
    def operations(self) -> int:
        """How many operations an element goes through."""
        return len(self.trace.expressions)

    def arguments(
        self, values: Mapping[Node, torch.Tensor], key: str
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]] | None:
        """The small values for one key, fractions and whole numbers; None if one of them is not a number."""
        known: dict[Computed, Any] = {}
        floats: list[float] = []
        integers: list[int] = []
        for small, dtype in self.trace.arguments:
            value = _evaluate(small, values, known)
            if value.ndim or value.dtype is not dtype:
                return None
            (floats if dtype.is_floating_point else integers).append(value.item())
        for node in self.trace.draws:
            given = self.program.calls[node].hyperparameters
            integers += [*philox_key(key, given["seed"]), given["stream"]]
        return np.array(floats, np.float64), np.array(integers, np.int64)


def choose_ways(elements: Mapping[Program, int], options: EngineOptions) -> dict[Pass, FusedPass | str]:
    """How each pass of the programs is run: as a loop, or eagerly for the reason given.

    Args:
        elements: how many elements go through each program.
        options: `fuse` and `compute_dtype` count.
    """
    passes = {program: [p for stage in program.stages for p in stage.passes] for program in elements}
    reason = _reason_against(
        sum(n * sum(len(p.nodes) for p in passes[o]) for o, n in elements.items()), options
    )
    if reason:
        return {p: reason for each in passes.values() for p in each}
    ways: dict[Pass, FusedPass | str] = {}
    work: dict[str, int] = {}
    for program, count in elements.items():
        for trip, trace in trace_program(program, options.compute_dtype).items():
            way = trace if isinstance(trace, str) else FusedPass(trace, program, options.compute_dtype)
            ways[trip] = way
            if isinstance(way, FusedPass):
                work[way.source] = work.get(way.source, 0) + count * way.operations
    if options.fuse == "always":
        return ways
    return {
        trip: way if isinstance(way, str) or work[way.source] >= WORTH_COMPILING else TOO_SMALL
        for trip, way in ways.items()
    }


def _reason_against(node_elements: int, options: EngineOptions) -> str | None:
    """Why nothing at all is fused."""
    if options.fuse == "never":
        return "fuse=never"
    if options.fuse == "auto" and node_elements * _MOST_OPERATIONS < WORTH_COMPILING:
        return TOO_SMALL
    return None if can_compile() else "numba is not installed"


def how_run(program: Program, ways: Mapping[Pass, FusedPass | str]) -> list[str]:
    """How each pass and each whole-tensor method of a program is run, in words."""
    words = ["whole" for stage in program.stages for n in stage.before if program.extents[n] is Extent.WHOLE]
    for stage in program.stages:
        for trip in stage.passes:
            way = ways.get(trip, TOO_SMALL)
            words.append(f"eager: {way}" if isinstance(way, str) else "fused")
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


def _module(trace: Trace, compute_dtype: torch.dtype) -> Iterator[str]:
    """The lines of the source file of a loop."""
    parameters = ["start", "count", "floats", "integers", "peaks"]
    parameters += [f"x{n}" for n in range(len(trace.inputs))]
    parameters += [f"y{n}" for n in range(len(trace.outputs))]
    parameters += [f"s{n}" for n in range(len(trace.terms))]
    yield "import numpy as np"
    yield "from numba import boolean, float32, float64, int32, int64"
    yield "from mecha_exp.engine.intrinsics import *"
    yield ""
    yield f"def loop({', '.join(parameters)}):"
    yield from _indented(1, _prologue(trace, compute_dtype))
    yield f"    for block in range(0, count, {REDUCTION_BLOCK}):"
    yield from _indented(2, (f"{lanes}[:] = 0" for lanes, _, _ in _lanes(trace)))
    yield f"        for first in range(block, min(block + {REDUCTION_BLOCK}, count), {LANES}):"
    yield f"            size = min({LANES}, count - first)"
    yield from _indented(3, _strip(trace))
    yield "            for j in range(size):"
    yield from _indented(4, _body(trace, compute_dtype))
    for number, (node, _) in enumerate(trace.terms):
        if not _sums(node):
            yield f"            tally(bins{number}, size, s{number})"
    for lanes, number, column in _lanes(trace):
        yield f"        s{number}[block // {REDUCTION_BLOCK}, {column}] = folded({lanes})"
    for number in range(len(trace.inputs) + len(trace.outputs)):
        yield f"    peaks[{number}] = p{number}"


def _prologue(trace: Trace, compute_dtype: torch.dtype) -> Iterator[str]:
    """What is done once a tile."""
    floats = integers = 0
    for number, (_, dtype) in enumerate(trace.arguments):
        if dtype.is_floating_point:
            yield f"a{number} = {NUMBERS[dtype]}(floats[{floats}])"
            floats += 1
        else:
            yield f"a{number} = {NUMBERS[dtype]}(integers[{integers}])"
            integers += 1
    for number in range(len(trace.draws)):
        yield f"room{number} = np.empty({LANES + 8}, np.float32)"
        for name in ("key0_", "key1_", "stream"):
            yield f"{name}{number} = integers[{integers}]"
            integers += 1
    for number, (node, _) in enumerate(trace.terms):
        if not _sums(node):
            yield f"bins{number} = np.empty({LANES}, np.int32)"
    for lanes, _, _ in _lanes(trace):
        yield f"{lanes} = np.empty({LANES}, np.float64)"
    whole = "int32" if compute_dtype.itemsize == 4 else "int64"
    for number in range(len(trace.inputs) + len(trace.outputs)):
        yield f"p{number} = {whole}(0)"


def _strip(trace: Trace) -> Iterator[str]:
    """What is done once a strip."""
    for name, nodes in (("x", trace.inputs), ("y", trace.outputs)):
        for number in range(len(nodes)):
            yield f"{name}{number}_ = {name}{number}[first:first + size]"
    for number in range(len(trace.draws)):
        arguments = f"room{number}, start + first, size, key0_{number}, key1_{number}, stream{number}"
        yield f"d{number} = drawn({arguments})"


def _body(trace: Trace, compute_dtype: torch.dtype) -> Iterator[str]:
    """What is done to one element."""
    for number, expression in enumerate(trace.expressions):
        yield f"v{number} = {_written(expression, trace)}"
        if expression.operation == INPUT:
            yield from _peak(expression.operands[0], f"v{number}")
    for place, (_, ref) in enumerate(trace.outputs):
        value = _converted(ref, compute_dtype, trace)
        yield f"y{place}_[j] = {value}"
        yield from _peak(len(trace.inputs) + place, value)
    columns = {(number, column): lanes for lanes, number, column in _lanes(trace)}
    for number, (node, refs) in enumerate(trace.terms):
        for column, ref in enumerate(refs):
            if _sums(node):
                yield f"{columns[number, column]}[j] += {_converted(ref, torch.float64, trace)}"
            else:
                yield f"bins{number}[j] = {_converted(ref, torch.int32, trace)}"


def _peak(place: Any, value: str) -> Iterator[str]:
    """Keep the largest magnitude: one number per tile tells whether all of it is finite."""
    yield f"m = magnitude({value})"
    yield f"p{place} = m if m > p{place} else p{place}"


def _written(expression: Expression, trace: Trace) -> str:
    if expression.operation == INPUT:
        return f"x{expression.operands[0]}_[j]"
    if expression.operation == DRAW:
        return f"{NUMBERS[expression.dtype]}(d{expression.operands[0]}[j])"
    operation = OPERATIONS[expression.operation]
    dtype = expression.dtype if operation.converted == "result" else expression.common
    operands = [_converted(operand, dtype, trace) for operand in expression.operands]
    if expression.operation == "where":
        operands[0] = _converted(expression.operands[0], torch.bool, trace)
    kind = NUMBERS[expression.dtype]
    text = f"{kind}({operation.text.format(*operands, t=kind)})"
    return f"{ROUNDED[expression.dtype]}({text})" if expression.dtype in ROUNDED else text


def _converted(operand: Operand, dtype: torch.dtype, trace: Trace) -> str:
    """An operand in the dtype that it is needed in."""
    if isinstance(operand, Ref):
        name, own = f"v{operand.number}", trace.expressions[operand.number].dtype
    elif isinstance(operand, Argument):
        name, own = f"a{operand.number}", trace.arguments[operand.number][1]
    else:
        return f"{NUMBERS[dtype]}({operand})"
    if own is dtype or NUMBERS[own] == NUMBERS[dtype]:
        return name
    return f"({name} != 0)" if dtype is torch.bool else f"{NUMBERS[dtype]}({name})"


def _lanes(trace: Trace) -> list[tuple[str, int, int]]:
    """The running sums: name, number of the reduction, number of its term."""
    pairs = [(n, c) for n, (node, refs) in enumerate(trace.terms) if _sums(node) for c in range(len(refs))]
    return [(f"lanes{n}_{c}", n, c) for n, c in pairs]


def _sums(node: MergeNode) -> bool:
    return isinstance(node.method, Reduction) and node.method.sums


def _indented(level: int, lines: Iterator[str]) -> Iterator[str]:
    return ("    " * level + line for line in lines)
