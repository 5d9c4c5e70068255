"""The source of a fused loop: how a trace is written down for the compiler.

This is the loop for a pass that needs the sum of `base + alpha * (model - base)` and the result itself:

    def loop(start, count, table):
        places = array_at(table, 8, int64)
        floats = array_at(places[0], 1, float64)
        ...
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
            total0 = folded(lanes0)
            s0[block // 65536 * 1 + 0] = total0

The table holds the addresses of what the loop reads and writes, so that every loop is called alike. All
memory is the caller's, and nothing can fail: the machine code needs nothing of numba's.
A block has its own sums, and what is drawn, summed or ranked is done in strips that stay in the first cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from mecha_exp.engine.compiling import converts_half
from mecha_exp.engine.operations import NUMBERS, OPERATIONS, STORED, bits_dtype
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
        summed = dict.fromkeys(ref for node, refs in trace.terms if _sums(node) for ref in refs)
        self._summed = {ref: place for place, ref in enumerate(summed)}  # equal terms are added up once
        self._ranks = [number for number, (node, _) in enumerate(trace.terms) if not _sums(node)]

    def module(self) -> Iterator[str]:
        """The lines of the source file."""
        yield "import numpy as np"
        yield "from numba import boolean, float32, float64, int16, int32, int64, uint8, uint64"
        yield "from mecha_exp.engine.intrinsics import *"
        yield ""
        yield "def loop(start, count, table):"
        yield from _indented(1, self._arrays())
        yield from _indented(1, self._prologue())
        yield f"    for block in range(0, count, {REDUCTION_BLOCK}):"
        yield from _indented(2, (f"lanes{place}[:] = 0" for place in range(len(self._summed))))
        yield f"        for first in range(block, min(block + {REDUCTION_BLOCK}, count), {LANES}):"
        yield f"            size = min({LANES}, count - first)"
        yield from _indented(3, self._strip())
        yield "            for j in range(size):"
        yield from _indented(4, self._body())
        for number in self._ranks:
            bracket = f"low{number}, high{number}, last, words{number}, found{number}"
            yield f"            gathered(keys{number}, size, {bracket}, s{number})"
        for place in range(len(self._summed)):
            yield f"        total{place} = folded(lanes{place})"
        for number, (node, refs) in enumerate(self._trace.terms):
            for column, ref in enumerate(refs if _sums(node) else ()):
                at = f"block // {REDUCTION_BLOCK} * {len(refs)} + {column}"
                yield f"        s{number}[{at}] = total{self._summed[ref]}"
        for number in range(len(self._trace.inputs) + len(self._trace.outputs)):
            yield f"    peaks[{number}] = p{number}"

    def _arrays(self) -> Iterator[str]:
        """The arrays that the table has the addresses of."""
        trace = self._trace
        stored = [_element(dtype) for dtype in (*self._read, *self._written)]
        names = [f"x{n}" for n in range(len(trace.inputs))] + [f"y{n}" for n in range(len(trace.outputs))]
        arrays = [
            ("floats", len(trace.arguments), "float64"),
            ("integers", len(trace.arguments) + 3 * len(trace.draws), "int64"),
            ("peaks", len(names), "int64"),
            ("room", self.room, "int8"),
            *((name, "count", kind) for name, kind in zip(names, stored, strict=True)),
        ]
        for number, (node, refs) in enumerate(trace.terms):
            blocks = f"(count + {REDUCTION_BLOCK - 1}) // {REDUCTION_BLOCK}"
            sums = (f"s{number}", f"{blocks} * {len(refs)}", "float64")
            arrays.append(sums if _sums(node) else (f"s{number}", "count + 1", self._key_type))
        arrays += [(f"found{number}", 5, "int64") for number in self._ranks]
        yield f"places = array_at(table, {len(arrays)}, int64)"
        for place, (name, size, kind) in enumerate(arrays):
            address = f"places[{place}]"
            array = f"array_at({address}, {size}, {kind})"
            yield f"{name} = {address if name == 'room' else array}"
        offset = 0
        for name, size, kind in self._rooms():
            yield f"{name} = array_at(room + {offset}, {size}, {kind})"
            offset += size * np.dtype(kind).itemsize

    @property
    def room(self) -> int:
        """The bytes that the loop needs for itself."""
        return sum(size * np.dtype(kind).itemsize for _, size, kind in self._rooms())

    def _rooms(self) -> list[tuple[str, int, str]]:
        """Name, length and type of the arrays that serve one strip or block after another."""
        rooms = [(f"room{number}", LANES + 8, "float32") for number in range(len(self._trace.draws))]
        rooms += [(f"keys{number}", LANES, self._key_type) for number in self._ranks]
        rooms += [(f"words{number}", LANES // 8, "uint64") for number in self._ranks]
        return rooms + [(f"lanes{place}", LANES, "float64") for place in range(len(self._summed))]

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
            for name in ("key0_", "key1_", "stream"):
                yield f"{name}{number} = integers[{integers}]"
                integers += 1
        for number in self._ranks:
            yield f"keys{number}[:] = 0"
            yield f"low{number} = {self._key_type}(found{number}[0])"
            yield f"high{number} = {self._key_type}(found{number}[1])"
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
            yield f"before = drawn({arguments})"
            yield f"d{number} = room{number}[before:before + size]"

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
        for ref, place in self._summed.items():
            yield f"lanes{place}[j] += {self._converted(ref, torch.float64)}"
        for number in self._ranks:
            (ref,) = trace.terms[number][1]
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
        return f"as_{STORED[expression.dtype]}({text})" if expression.dtype in STORED else text

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


def _element(dtype: torch.dtype) -> str:
    """The type of what a tile holds."""
    return str(bits_dtype(dtype)).removeprefix("torch.") if dtype in STORED else NUMBERS[dtype]


def _sums(node: MergeNode) -> bool:
    return isinstance(node.method, Reduction) and node.method.sums


def _indented(level: int, lines: Iterator[str]) -> Iterator[str]:
    return ("    " * level + line for line in lines)
