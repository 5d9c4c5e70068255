"""The body of a fused loop: one line of numba code per traced operation.

The arguments, outputs and sums of a part are numbered within the part. So parts that compute the same, such
as the points of a sweep, have the same lines, and the loop has them once for all of these parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from mecha_exp.engine.compiler.jit import converts_half
from mecha_exp.engine.compiler.ops import NUMBERS, STORED, bits_dtype, operation_of
from mecha_exp.engine.compiler.partition import SubLoop
from mecha_exp.engine.compiler.trace import DRAW, INPUT, RANKS, Argument, Expression, Operand, Ref, Trace
from mecha_exp.engine.ir.reductions import lane_dtype


@dataclass(frozen=True)
class LoopSpec:
    """The results of a loop, the dtypes of its tiles, and its parts.

    Attributes:
        trace: what it computes.
        dtype: of the arithmetic.
        read, written: the dtypes of the tiles that go in and out; None for a tile that is not written.
        summed: the expressions that are added up.
        ranked: the expressions that are ranked.
        parts: the loops over a strip that it is divided into.
    """

    trace: Trace
    dtype: torch.dtype
    read: Sequence[torch.dtype]
    written: Sequence[torch.dtype | None]
    summed: Sequence[Ref]
    ranked: Sequence[Ref]
    parts: Sequence[SubLoop]

    @property
    def key_type(self) -> str:
        """The integer type of sort keys."""
        return "int32" if self.dtype.itemsize == 4 else "int64"

    @property
    def spilled(self) -> tuple[int, ...]:
        """The expressions that a part spills for others."""
        return tuple(number for part in self.parts for number in part.spilled)

    @property
    def held_rows(self) -> list[int]:
        """Which of these are whole rows that are ranked, rather than strips."""
        operations = [self.trace.expressions[number].operation for number in self.spilled]
        return [place for place, operation in enumerate(operations) if operation == RANKS]

    def kind_spilled(self, number: int) -> str:
        """The type of a spilled expression."""
        kind = NUMBERS[self.trace.expressions[number].dtype]
        return "uint8" if kind == "boolean" else kind

    def lane_dtype(self, index: int) -> torch.dtype:
        """The dtype of the lanes of a sum."""
        return lane_dtype(self.trace.expressions[self.summed[index].number].dtype)

    def stretch(self, name: str, index: int) -> str:
        """The number of a stretch of memory, and how many there are; no two stretches overlap.

        The outputs and sums of all parts share their stretches, since each part is a loop of its own.
        """
        counts = {
            "x": len(self.read),
            "d": len(self.trace.draws),
            "keys": len(self.ranked),
            "left": len(self.spilled),
            "y": max(len(part.outputs) for part in self.parts),
            "sum": max(len(part.sums) for part in self.parts),
        }
        before = [*counts.values()][: [*counts].index(name)]
        return f"{sum(before) + index}, {sum(counts.values())}"


class LoopBody:
    """The lines of a part of a loop.

    Attributes:
        part: the part.
        arguments: which of the trace's arguments are a0, a1, ... here.
        lines: the statements for the element `j` of a strip, which belongs to the lane `lane`.
    """

    def __init__(self, part: SubLoop, spec: LoopSpec) -> None:
        self.part = part
        self.arguments: list[int] = []
        self._spec, self._trace = spec, spec.trace
        self._names = {number: f"v{index}" for index, number in enumerate((*part.reloaded, *part.computed))}
        self.lines = [*self._statements()]

    @property
    def structure(self) -> tuple[object, ...]:
        """A key that is equal for parts which one loop can compute."""
        kinds = [self._trace.arguments[number][1] for number in self.arguments]
        return tuple(self.lines), tuple(kinds), len(self.part.outputs), len(self.part.sums)

    def _statements(self) -> Iterator[str]:
        part, trace, spec = self.part, self._trace, self._spec
        for number in part.reloaded:
            value = self._entry("left", spec.spilled.index(number), spec.kind_spilled(number))
            is_truth = trace.expressions[number].dtype is torch.bool
            yield f"{self._names[number]} = {value}" + (" != 0" if is_truth else "")
        for number in part.computed:
            name, expression = self._names[number], trace.expressions[number]
            yield f"{name} = {self._value(expression)}"
            if number in part.peaks:
                yield from _peak(f"p{expression.operands[0]}", name)
            if number in part.spilled:
                kind = spec.kind_spilled(number)
                yield self._put("left", spec.spilled.index(number), f"{kind}({name})")
        for slot, index in enumerate(part.outputs):
            value, dtype = self._converted(trace.outputs[index][1], spec.dtype), spec.written[index]
            if dtype is not None:
                stored = f"to_{STORED[dtype]}({value})" if dtype in STORED else value
                yield self._put("y", slot, stored)
            yield from _peak(f"q{slot}", value)
        for slot, index in enumerate(part.sums):
            dtype, stretch = spec.lane_dtype(index), spec.stretch("sum", slot)
            added = self._converted(spec.summed[index], dtype)
            before = f"entry(sum{slot}_, lane, {NUMBERS[dtype]}, {stretch})"
            yield f"put(sum{slot}_, lane, {before} + {added}, {stretch})"
        for index in part.ranks:
            yield self._put("keys", index, f"ordered({self._converted(spec.ranked[index], spec.dtype)})")

    def _entry(self, name: str, number: int, kind: str) -> str:
        return f"entry({name}{number}_, j, {kind}, {self._spec.stretch(name, number)})"

    def _put(self, name: str, number: int, value: str) -> str:
        return f"put({name}{number}_, j, {value}, {self._spec.stretch(name, number)})"

    def _value(self, expression: Expression) -> str:
        if expression.operation == INPUT:
            (index,) = expression.operands
            assert isinstance(index, int)
            dtype = self._spec.read[index]
            value, stored = self._entry("x", index, element_type(dtype)), STORED.get(dtype)
            return f"from_{stored}({value})" if stored else value
        if expression.operation == DRAW:
            (index,) = expression.operands
            assert isinstance(index, int)
            return f"{NUMBERS[expression.dtype]}({self._entry('d', index, 'float32')})"
        operation = operation_of(expression.operation)
        dtype = expression.dtype if operation.converted == "result" else expression.common
        operands = [self._converted(operand, dtype) for operand in expression.operands]
        if expression.operation == "where":
            operands[0] = self._converted(expression.operands[0], torch.bool)
        kind = NUMBERS[expression.dtype]
        text = f"{kind}({operation.text.format(*operands, t=kind)})"
        if expression.dtype is torch.float16 and converts_half():
            return f"from_half(to_half({text}))"
        return f"as_{STORED[expression.dtype]}({text})" if expression.dtype in STORED else text

    def _converted(self, operand: Operand, dtype: torch.dtype) -> str:
        """An operand, converted to a dtype."""
        if isinstance(operand, Ref):
            name, source = self._names[operand.number], self._trace.expressions[operand.number].dtype
        elif isinstance(operand, Argument):
            if operand.number not in self.arguments:
                self.arguments.append(operand.number)
            name, source = (
                f"a{self.arguments.index(operand.number)}",
                self._trace.arguments[operand.number][1],
            )
        else:
            return f"{NUMBERS[dtype]}({operand})"
        if source is dtype or NUMBERS[source] == NUMBERS[dtype]:
            return name
        return f"({name} != 0)" if dtype is torch.bool else f"{NUMBERS[dtype]}({name})"


def element_type(dtype: torch.dtype) -> str:
    """The numba type of the elements of a tile of a dtype."""
    return str(bits_dtype(dtype)).removeprefix("torch.") if dtype in STORED else NUMBERS[dtype]


def _peak(name: str, value: str) -> Iterator[str]:
    """Keep the largest magnitude: one number of a tile tells whether all of its values are finite."""
    yield f"m = magnitude({value})"
    yield f"{name} = m if m > {name} else {name}"
