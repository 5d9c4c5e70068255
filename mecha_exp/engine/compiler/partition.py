"""Loop fission: splits a trace into loops of at most 14 results that share spilled values.

A loop with too many results is slow, and compiles for minutes.

The results of a trace (tiles, sums, ranks) fall into groups that share few expressions. A first part computes
what several groups need and spills it to memory that stays in the cache. Each group is a part of its own: a
loop over the same strip. So each point of a sweep becomes one loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mecha_exp.engine.compiler.trace import INPUT, RANKS, ROW_SUM, Expression, Ref, Trace

MOST = 14
"""The most results of one part."""

FEW = 3
"""A group of fewer results gets no loop of its own: such groups share one."""


@dataclass(frozen=True)
class SubLoop:
    """A loop over a strip. Expressions and results are given by their numbers.

    Attributes:
        computed: the expressions, in an order in which they can be computed.
        reloaded: the expressions that it reads from memory, since an earlier part has spilled them.
        spilled: the expressions that it writes to memory for other parts.
        outputs, sums, ranks: the results that are computed here.
        peaks: the expressions of the inputs whose largest magnitude is found here.
    """

    computed: tuple[int, ...]
    reloaded: tuple[int, ...] = ()
    spilled: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    sums: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    peaks: tuple[int, ...] = ()


def split_loops(
    trace: Trace, sums: Sequence[Ref], ranks: Sequence[Ref], read: Sequence[torch.dtype]
) -> list[SubLoop]:
    """The parts of a trace, in order.

    Args:
        sums: what is added up.
        ranks: what is ranked.
        read: the dtypes of the tiles of the inputs.
    """
    division = _Division(trace, [ref.number for ref in (*(r for _, r in trace.outputs), *sums, *ranks)], read)
    groups = division.groups()
    if len(groups) == 1 and not sums:
        everything = tuple(range(len(trace.expressions)))
        whole = SubLoop(everything, peaks=tuple(division.inputs))
        return [_with_results(whole, groups[0], len(trace.outputs), len(sums))]
    shared = division.shared(groups)
    first = [index for index, number in enumerate(division.results) if number in shared]
    groups = [[index for index in group if index not in first] for group in groups]
    others = [division.part(group, shared) for group in groups if group]
    spilled = tuple(sorted({number for part, _ in others for number in part.reloaded}))
    parts = [(SubLoop(tuple(sorted(shared)), spilled=spilled, peaks=tuple(division.inputs)), first), *others]
    return [_with_results(part, indices, len(trace.outputs), len(sums)) for part, indices in parts]


class _Division:
    """The expressions of a trace, each with the results that need it."""

    def __init__(self, trace: Trace, results: Sequence[int], read: Sequence[torch.dtype]) -> None:
        self.results = results
        self._expressions = trace.expressions
        self.inputs = [n for n, e in enumerate(self._expressions) if e.operation == INPUT]
        self._is_converted = {n: dtype.itemsize < 4 for n, dtype in zip(self.inputs, read, strict=True)}
        self._users: list[set[int]] = [set() for _ in self._expressions]
        for index, number in enumerate(results):
            pending = [number]
            while pending:
                needed = pending.pop()
                if index not in self._users[needed]:
                    self._users[needed].add(index)
                    pending += _operands(self._expressions[needed])

    def groups(self) -> list[list[int]]:
        """Groups of at most `MOST` results: those that share expressions which few others need."""
        if len(self.results) <= MOST:
            return [list(range(len(self.results)))]
        group_of = {index: [index] for index in range(len(self.results))}
        heavy = [users for number, users in enumerate(self._users) if not self._is_light(number)]
        for users in sorted(heavy, key=len):
            joined = [*{id(group_of[index]): group_of[index] for index in sorted(users)}.values()]
            if sum(map(len, joined)) <= MOST:
                group = [index for one in joined for index in one]
                group_of.update(dict.fromkeys(group, group))
        groups = [*{id(group): group for group in group_of.values()}.values()]
        single = sorted(index for group in groups if len(group) < FEW for index in group)
        groups = [sorted(group) for group in groups if len(group) >= FEW]
        return groups + [single[first : first + MOST] for first in range(0, len(single), MOST)]

    def shared(self, groups: Sequence[Sequence[int]]) -> set[int]:
        """The expressions that more than one group needs, and the inputs."""
        group_of = {index: number for number, group in enumerate(groups) for index in group}
        several = {n for n, users in enumerate(self._users) if len({group_of[p] for p in users}) > 1}
        return several | {*self.inputs}

    def part(self, indices: list[int], shared: set[int]) -> tuple[SubLoop, list[int]]:
        """A part for some results. It reloads shared expressions unless computing them again is as fast.

        The order of its expressions follows from its results, so parts that do the same have the same order.
        """
        computed: dict[int, None] = {}
        reloaded: dict[int, None] = {}
        pending = [self.results[index] for index in reversed(indices)]
        while pending:
            number = pending[-1]
            if number in shared and not self._is_light(number):
                reloaded[number] = None
            else:
                missing = [
                    o for o in _operands(self._expressions[number]) if o not in computed and o not in reloaded
                ]
                if missing:
                    pending += reversed(missing)
                    continue
                computed[number] = None
            pending.pop()
        return SubLoop(tuple(computed), tuple(reloaded)), indices

    def _is_light(self, number: int) -> bool:
        """Whether a value is as fast computed again as read again: an input that lies there, or a cast.

        A half takes longer to convert than the float32 that it becomes to load: ten points a tenth longer.
        """
        return not self._is_converted.get(number, self._expressions[number].operation != "cast")


def goes_by_rows(trace: Trace) -> bool:
    """Whether a trace adds up or ranks rows, so that its loop goes over each of them more than once."""
    return bool(_numbers(trace, ROW_SUM, RANKS))


def is_one_loop_of_rows(trace: Trace) -> bool:
    """Whether a trace by rows can be one loop: what is added up or ranked depends on no other sum or rank."""
    of_rows, late = _numbers(trace, ROW_SUM, RANKS), set[int]()
    for number, expression in enumerate(trace.expressions):
        is_late = any(operand in late for operand in _operands(expression))
        if number in of_rows and is_late:
            return False
        if is_late or number in of_rows:
            late.add(number)
    return len(trace.outputs) <= MOST


def split_rows(trace: Trace) -> tuple[SubLoop, SubLoop, SubLoop]:
    """The parts of a trace by rows: what is added up or ranked, what is done once a row, the results."""
    sums, ranks, inputs = (_numbers(trace, operation) for operation in (ROW_SUM, RANKS, INPUT))
    once = set[int]()
    for number, expression in enumerate(trace.expressions):
        operands = _operands(expression)
        if number in sums or (operands and once.issuperset(operands)):
            once.add(number)
    results, by_row = _needed(trace, {ref.number for _, ref in trace.outputs}, once | ranks)
    ranked = by_row & ranks
    of_rows, summed = _needed(trace, by_row - ranked, sums)
    terms, _ = _needed(trace, summed | ranked | inputs, set())
    return (
        SubLoop(_ordered(terms), spilled=_ordered(summed | ranked), peaks=_ordered(inputs)),
        SubLoop(_ordered(of_rows), reloaded=_ordered(summed), spilled=_ordered(by_row - ranked - summed)),
        SubLoop(_ordered(results), reloaded=_ordered(by_row), outputs=tuple(range(len(trace.outputs)))),
    )


def _numbers(trace: Trace, *operations: str) -> set[int]:
    """The expressions that are one of these operations."""
    return {number for number, e in enumerate(trace.expressions) if e.operation in operations}


def _needed(trace: Trace, results: set[int], available: set[int]) -> tuple[set[int], set[int]]:
    """The expressions to compute for some results, and the available expressions that these use."""
    computed, reloaded, pending = set[int](), set[int](), [*results]
    while pending:
        number = pending.pop()
        if number in available:
            reloaded.add(number)
        elif number not in computed:
            computed.add(number)
            pending += _operands(trace.expressions[number])
    return computed, reloaded


def _ordered(numbers: set[int]) -> tuple[int, ...]:
    return tuple(sorted(numbers))


def _operands(expression: Expression) -> list[int]:
    return [operand.number for operand in expression.operands if isinstance(operand, Ref)]


def _with_results(part: SubLoop, indices: Sequence[int], outputs: int, sums: int) -> SubLoop:
    """The part with its results by kind; their indices count the outputs, then the sums, then the ranks."""
    return replace(
        part,
        outputs=tuple(index for index in indices if index < outputs),
        sums=tuple(index - outputs for index in indices if outputs <= index < outputs + sums),
        ranks=tuple(index - outputs - sums for index in indices if outputs + sums <= index),
    )
