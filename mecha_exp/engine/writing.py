"""The source of a fused loop: how a trace is written down for the compiler.

This is the loop for a pass that needs the sum of `base + alpha * (model - base)` and the result itself:

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

A block has its own sums, and what is drawn, summed or ranked is done in strips that stay in the first cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from mecha_exp.engine.compiling import converts_half
from mecha_exp.engine.operations import NUMBERS, OPERATIONS, ROUNDED, STORED
from mecha_exp.engine.partials import LANES, REDUCTION_BLOCK
from mecha_exp.engine.recording import DRAW, INPUT, Argument, Expression, Operand, Ref, Trace
from mecha_exp.method import Reduction
from mecha_exp.nodes import MergeNode


def loop_dtype(stored: torch.dtype, compute_dtype: torch.dtype) -> torch.dtype:
    """How a loop takes a tile of that dtype: as it is stored, or converted by torch."""
    direct = stored in STORED and compute_dtype is torch.float32
    return stored if direct and (stored is not torch.float16 or converts_half()) else compute_dtype


class LoopWriter:
    """Writes the source of a loop."""

    def __init__(
        self,
        trace: Trace,
        compute_dtype: torch.dtype,
        read: Sequence[torch.dtype],
        written: Sequence[torch.dtype],
    ) -> None:
        self._trace = trace
        self._dtype = compute_dtype
        self._read = read or [compute_dtype] * len(trace.inputs)
        self._written = written or [compute_dtype] * len(trace.outputs)
        self._key_type = "int32" if compute_dtype.itemsize == 4 else "int64"
        self._lanes = {
            (number, column): f"lanes{number}_{column}"
            for number, (node, refs) in enumerate(trace.terms)
            if _sums(node)
            for column in range(len(refs))
        }

    def signature(self) -> str:
        """The types of the loop's parameters."""
        kinds = ["int64", "int64", "float64[::1]", "int64[::1]", "int64[::1]"]
        kinds += [
            "int16[::1]" if d in STORED else f"{NUMBERS[d]}[::1]" for d in (*self._read, *self._written)
        ]
        kept = f"{self._key_type}[::1]"
        kinds += ["float64[:, ::1]" if _sums(node) else kept for node, _ in self._trace.terms]
        kinds += ["int64[::1]" for node, _ in self._trace.terms if not _sums(node)]
        return f"void({', '.join(kinds)})"

    def module(self) -> Iterator[str]:
        """The lines of the source file."""
        trace = self._trace
        parameters = ["start", "count", "floats", "integers", "peaks"]
        for name, each in (("x", trace.inputs), ("y", trace.outputs), ("s", trace.terms)):
            parameters += [f"{name}{number}" for number in range(len(each))]
        parameters += [f"found{number}" for number, (node, _) in enumerate(trace.terms) if not _sums(node)]
        yield "import numpy as np"
        yield "from numba import boolean, float32, float64, int32, int64"
        yield "from mecha_exp.engine.intrinsics import *"
        yield ""
        yield f"def loop({', '.join(parameters)}):"
        yield from _indented(1, self._prologue())
        yield f"    for block in range(0, count, {REDUCTION_BLOCK}):"
        yield from _indented(2, (f"{lanes}[:] = 0" for lanes in self._lanes.values()))
        yield f"        for first in range(block, min(block + {REDUCTION_BLOCK}, count), {LANES}):"
        yield f"            size = min({LANES}, count - first)"
        yield from _indented(3, self._strip())
        yield "            for j in range(size):"
        yield from _indented(4, self._body())
        for number, (node, _) in enumerate(trace.terms):
            if not _sums(node):
                bracket = f"low{number}, high{number}, last, words{number}, found{number}"
                yield f"            gathered(keys{number}, size, {bracket}, s{number})"
        for (number, column), lanes in self._lanes.items():
            yield f"        s{number}[block // {REDUCTION_BLOCK}, {column}] = folded({lanes})"
        for number in range(len(trace.inputs) + len(trace.outputs)):
            yield f"    peaks[{number}] = p{number}"

    def _prologue(self) -> Iterator[str]:
        """What is done once a tile."""
        trace = self._trace
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
                yield f"keys{number} = np.zeros({LANES}, np.{self._key_type})"
                yield f"words{number} = np.empty({LANES} // 8, np.uint64)"
                yield f"low{number} = {self._key_type}(found{number}[0])"
                yield f"high{number} = {self._key_type}(found{number}[1])"
        for lanes in self._lanes.values():
            yield f"{lanes} = np.empty({LANES}, np.float64)"
        yield f"last = {self._key_type}({2 ** (31 if self._dtype.itemsize == 4 else 63) - 1})"
        for number in range(len(trace.inputs) + len(trace.outputs)):
            yield f"p{number} = {self._key_type}(0)"

    def _strip(self) -> Iterator[str]:
        """What is done once a strip."""
        for name, nodes in (("x", self._trace.inputs), ("y", self._trace.outputs)):
            for number in range(len(nodes)):
                yield f"{name}{number}_ = {name}{number}[first:first + size]"
        for number in range(len(self._trace.draws)):
            arguments = f"room{number}, start + first, size, key0_{number}, key1_{number}, stream{number}"
            yield f"d{number} = drawn({arguments})"

    def _body(self) -> Iterator[str]:
        """What is done to one element."""
        trace = self._trace
        for number, expression in enumerate(trace.expressions):
            yield f"v{number} = {self._value(expression)}"
            if expression.operation == INPUT:
                yield from _peak(expression.operands[0], f"v{number}")
        for place, (_, ref) in enumerate(trace.outputs):
            value, stored = self._converted(ref, self._dtype), STORED.get(self._written[place])
            yield f"y{place}_[j] = {f'to_{stored}({value})' if stored else value}"
            yield from _peak(len(trace.inputs) + place, value)
        for number, (node, refs) in enumerate(trace.terms):
            for column, ref in enumerate(refs):
                if _sums(node):
                    yield f"{self._lanes[number, column]}[j] += {self._converted(ref, torch.float64)}"
                else:
                    yield f"keys{number}[j] = ordered({self._converted(ref, self._dtype)})"

    def _value(self, expression: Expression) -> str:
        if expression.operation == INPUT:
            (place,) = expression.operands
            assert isinstance(place, int)
            stored = STORED.get(self._read[place])
            return f"from_{stored}(x{place}_[j])" if stored else f"x{place}_[j]"
        if expression.operation == DRAW:
            return f"{NUMBERS[expression.dtype]}(d{expression.operands[0]}[j])"
        operation = OPERATIONS[expression.operation]
        dtype = expression.dtype if operation.converted == "result" else expression.common
        operands = [self._converted(operand, dtype) for operand in expression.operands]
        if expression.operation == "where":
            operands[0] = self._converted(expression.operands[0], torch.bool)
        kind = NUMBERS[expression.dtype]
        text = f"{kind}({operation.text.format(*operands, t=kind)})"
        return f"{ROUNDED[expression.dtype]}({text})" if expression.dtype in ROUNDED else text

    def _converted(self, operand: Operand, dtype: torch.dtype) -> str:
        """An operand in the dtype that it is needed in."""
        if isinstance(operand, Ref):
            name, own = f"v{operand.number}", self._trace.expressions[operand.number].dtype
        elif isinstance(operand, Argument):
            name, own = f"a{operand.number}", self._trace.arguments[operand.number][1]
        else:
            return f"{NUMBERS[dtype]}({operand})"
        if own is dtype or NUMBERS[own] == NUMBERS[dtype]:
            return name
        return f"({name} != 0)" if dtype is torch.bool else f"{NUMBERS[dtype]}({name})"


def _peak(place: Operand, value: str) -> Iterator[str]:
    """Keep the largest magnitude: one number per tile tells whether all of it is finite."""
    yield f"m = magnitude({value})"
    yield f"p{place} = m if m > p{place} else p{place}"


def _sums(node: MergeNode) -> bool:
    return isinstance(node.method, Reduction) and node.method.sums


def _indented(level: int, lines: Iterator[str]) -> Iterator[str]:
    return ("    " * level + line for line in lines)
