"""Loop fission: splits a trace into loops of at most 14 results that share spilled values.

A loop with too many results is slow, and compiles for minutes.

What is wanted of a trace - tiles, sums, ranks - falls into groups that have little in common but what all of
them need. That is computed by a first part, which leaves it where it stays in the cache; every group
is a part of its own, a loop over the same strip. So the points of a sweep become one loop each.
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
    """A loop over a strip. Expressions and what is wanted go by their numbers.

    Attributes:
        computed: the expressions, in an order in which they can be computed.
        taken: expressions that an earlier part has left.
        left: those that it leaves for the others.
        outputs, sums, ranks: what is had here.
        peaks: the expressions of the inputs whose largest magnitude is found here.
    """

    computed: tuple[int, ...]
    taken: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
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
        return [_wanting(whole, groups[0], len(trace.outputs), len(sums))]
    shared = division.shared(groups)
    first = [place for place, number in enumerate(division.wanted) if number in shared]
    groups = [[place for place in group if place not in first] for group in groups]
    rest = [division.part(group, shared) for group in groups if group]
    left = tuple(sorted({number for part, _ in rest for number in part.taken}))
    parts = [(SubLoop(tuple(sorted(shared)), left=left, peaks=tuple(division.inputs)), first), *rest]
    return [_wanting(part, places, len(trace.outputs), len(sums)) for part, places in parts]


class _Division:
    """Which of the wanted values need which expressions."""

    def __init__(self, trace: Trace, wanted: Sequence[int], read: Sequence[torch.dtype]) -> None:
        self.wanted = wanted
        self._expressions = trace.expressions
        self.inputs = [n for n, e in enumerate(self._expressions) if e.operation == INPUT]
        self._is_converted = {n: dtype.itemsize < 4 for n, dtype in zip(self.inputs, read, strict=True)}
        self._users: list[set[int]] = [set() for _ in self._expressions]
        for place, number in enumerate(wanted):
            ahead = [number]
            while ahead:
                needed = ahead.pop()
                if place not in self._users[needed]:
                    self._users[needed].add(place)
                    ahead += _operands(self._expressions[needed])

    def groups(self) -> list[list[int]]:
        """The wanted values, those together that share what few others need, as far as it is not too many."""
        if len(self.wanted) <= MOST:
            return [list(range(len(self.wanted)))]
        group_of = {place: [place] for place in range(len(self.wanted))}
        heavy = [users for number, users in enumerate(self._users) if not self._is_light(number)]
        for users in sorted(heavy, key=len):
            joined = [*{id(group_of[place]): group_of[place] for place in sorted(users)}.values()]
            if sum(map(len, joined)) <= MOST:
                group = [place for one in joined for place in one]
                group_of.update(dict.fromkeys(group, group))
        groups = [*{id(group): group for group in group_of.values()}.values()]
        single = sorted(place for group in groups if len(group) < FEW for place in group)
        groups = [sorted(group) for group in groups if len(group) >= FEW]
        return groups + [single[first : first + MOST] for first in range(0, len(single), MOST)]

    def shared(self, groups: Sequence[Sequence[int]]) -> set[int]:
        """The expressions that more than one group needs, and the inputs."""
        group_of = {place: number for number, group in enumerate(groups) for place in group}
        several = {n for n, users in enumerate(self._users) if len({group_of[p] for p in users}) > 1}
        return several | {*self.inputs}

    def part(self, places: list[int], shared: set[int]) -> tuple[SubLoop, list[int]]:
        """A part for these wanted values, which takes from the first part what is not had as fast again.

        The order follows from what is wanted, so that parts that do the same do it in the same order.
        """
        computed: dict[int, None] = {}
        taken: dict[int, None] = {}
        ahead = [self.wanted[place] for place in reversed(places)]
        while ahead:
            number = ahead[-1]
            if number in shared and not self._is_light(number):
                taken[number] = None
            else:
                missing = [
                    o for o in _operands(self._expressions[number]) if o not in computed and o not in taken
                ]
                if missing:
                    ahead += reversed(missing)
                    continue
                computed[number] = None
            ahead.pop()
        return SubLoop(tuple(computed), tuple(taken)), places

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
        SubLoop(_ordered(terms), left=_ordered(summed | ranked), peaks=_ordered(inputs)),
        SubLoop(_ordered(of_rows), taken=_ordered(summed), left=_ordered(by_row - ranked - summed)),
        SubLoop(_ordered(results), taken=_ordered(by_row), outputs=tuple(range(len(trace.outputs)))),
    )


def _numbers(trace: Trace, *operations: str) -> set[int]:
    """The expressions that are one of these operations."""
    return {number for number, e in enumerate(trace.expressions) if e.operation in operations}


def _needed(trace: Trace, wanted: set[int], given: set[int]) -> tuple[set[int], set[int]]:
    """The expressions to be computed for what is wanted, and those of the given ones that they take."""
    computed, taken, ahead = set[int](), set[int](), [*wanted]
    while ahead:
        number = ahead.pop()
        if number in given:
            taken.add(number)
        elif number not in computed:
            computed.add(number)
            ahead += _operands(trace.expressions[number])
    return computed, taken


def _ordered(numbers: set[int]) -> tuple[int, ...]:
    return tuple(sorted(numbers))


def _operands(expression: Expression) -> list[int]:
    return [operand.number for operand in expression.operands if isinstance(operand, Ref)]


def _wanting(part: SubLoop, places: Sequence[int], outputs: int, sums: int) -> SubLoop:
    """The part with what is wanted of it, which is numbered through: outputs, then sums, then ranks."""
    return replace(
        part,
        outputs=tuple(place for place in places if place < outputs),
        sums=tuple(place - outputs for place in places if outputs <= place < outputs + sums),
        ranks=tuple(place - outputs - sums for place in places if outputs + sums <= place),
    )
