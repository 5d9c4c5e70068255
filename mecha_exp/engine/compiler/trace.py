"""The parts of a trace of a pass: expressions, references, arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from mecha_exp.errors import MechaError
from mecha_exp.graph.nodes import MergeNode, Node

INPUT, DRAW = "input", "draw"  # what is an expression without being an operation
ROW_SUM, RANKS = "row_sum", "ranks"  # what is known when a whole row has been gone through


class Untraceable(MechaError):
    """The reason why a pass cannot be written as a list of operations."""


@dataclass(frozen=True)
class Ref:
    """An earlier expression, by its number."""

    number: int


@dataclass(frozen=True)
class Argument:
    """A small value that is known when the loop runs, by its number."""

    number: int


Operand: TypeAlias = "Ref | Argument | int | bool"


@dataclass(frozen=True)
class Expression:
    """One value for each element.

    Attributes:
        operation: what is done, by the name of the aten operation.
        operands: to what. Whole numbers in a method are part of its structure, fractions are arguments.
        dtype: of the value.
        common: the dtype that torch's promotion gives the operands.
    """

    operation: str
    operands: tuple[Operand, ...]
    dtype: torch.dtype
    common: torch.dtype


@dataclass(frozen=True)
class Given:
    """A small value of the program: a node's, or the state of a reduction."""

    node: Node


@dataclass(frozen=True, eq=False)
class Computed:
    """A small value that torch computes from others: a result of an operation, one of several by `index`."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    index: int | None = None


ROW_LENGTH = Computed(len, (), {})
"""The length of a row, which a loop learns with its key: float64."""

Small: TypeAlias = "Given | Computed | torch.Tensor"
"""The origin of a small value; a tensor stands for itself."""


@dataclass(frozen=True)
class Trace:
    """The computation of a pass as a list of expressions.

    Attributes:
        expressions: in an order in which they can be computed.
        inputs: the nodes whose tiles are read, for the expressions `INPUT` by number.
        draws: the nodes of random draws, for the expressions `DRAW` by number.
        arguments: where the small values come from, and their dtypes.
        outputs: the nodes whose values are returned as tiles.
        terms: of each sum of the pass what an entry adds to it, of each ranking what an entry is ranked by.
    """

    expressions: tuple[Expression, ...]
    inputs: tuple[Node, ...]
    draws: tuple[MergeNode, ...]
    arguments: tuple[tuple[Small, torch.dtype], ...]
    outputs: tuple[tuple[Node, Ref], ...]
    terms: tuple[tuple[MergeNode, tuple[Ref, ...]], ...]


def _pruned(trace: Trace) -> Trace:
    """The trace without what nothing needs, numbered anew."""
    needed = {ref.number for _, ref in trace.outputs}
    needed |= {ref.number for _, refs in trace.terms for ref in refs}
    for number, expression in reversed([*enumerate(trace.expressions)]):
        if number in needed or expression.operation == INPUT:
            needed.add(number)
            needed |= {o.number for o in expression.operands if isinstance(o, Ref)}
    new = {number: Ref(place) for place, number in enumerate(sorted(needed))}
    arguments: dict[int, Argument] = {}

    def moved(operand: Operand) -> Operand:
        if isinstance(operand, Ref):
            return new[operand.number]
        if isinstance(operand, Argument):
            return arguments.setdefault(operand.number, Argument(len(arguments)))
        return operand

    draws = [n for n, e in enumerate(trace.expressions) if e.operation == DRAW and n in needed]
    expressions = []
    for number in sorted(needed):
        old = trace.expressions[number]
        operands = tuple(moved(o) for o in old.operands)
        if old.operation == DRAW:
            operands = (draws.index(number),)
        expressions.append(replace(old, operands=operands))
    return Trace(
        tuple(expressions),
        trace.inputs,
        tuple(trace.draws[_draw_number(trace.expressions[n])] for n in draws),
        tuple(trace.arguments[number] for number in arguments),
        tuple((node, new[ref.number]) for node, ref in trace.outputs),
        tuple((node, tuple(new[ref.number] for ref in refs)) for node, refs in trace.terms),
    )


def _draw_number(expression: Expression) -> int:
    (number,) = expression.operands
    assert isinstance(number, int)
    return number
