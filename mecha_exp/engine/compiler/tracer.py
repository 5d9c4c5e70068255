"""Traces what a pass does to one element: a run of the program on a toy tile, with a recorder.

So a method is plain torch and is never parsed. What one run cannot show - writing into a tensor, reading a
value in order to decide - is refused with a reason, and such a pass runs eagerly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch

from mecha_exp.engine.compiler.partition import is_one_loop_of_rows
from mecha_exp.engine.compiler.recorder import Guard, Recorder
from mecha_exp.engine.compiler.trace import DRAW, INPUT, Trace, Untraceable
from mecha_exp.engine.ir.calls import Call, Extent
from mecha_exp.engine.ir.interpreter import TileCall, accumulate, evaluate
from mecha_exp.engine.ir.layout import compile_program
from mecha_exp.engine.ir.model_values import ModelValue
from mecha_exp.engine.ir.program import Pass, Program, Stage
from mecha_exp.engine.ir.reductions import is_by_entry, is_ranked, open_accumulator
from mecha_exp.errors import MechaError
from mecha_exp.graph.nodes import MergeNode, Node
from mecha_exp.method_api.state_dict import Tile
from mecha_exp.random import uniform

_TOY_KEY, _TOY_SHAPE, _TOY_SIZE = "a toy tile", (3, 7), 21


def trace_program(program: Program) -> dict[Pass, Trace | str]:
    """Trace every pass of a program; the reason where one cannot be traced."""
    toy = _ToyRun(program)
    traces: dict[Pass, Trace | str] = {}
    reason = ""
    with torch.no_grad():
        for stage in program.stages:
            try:
                traces.update(toy.run(stage))
            except Exception as error:  # of a user's function, on numbers that mean nothing
                reason = reason or f"it cannot be tried on a few numbers: {error}"
    return {p: traces.get(p, reason) for stage in program.stages for p in stage.passes}


def _toy_value(value: ModelValue, compute_dtype: torch.dtype) -> torch.Tensor:
    """A number of the whole model, of a model of one toy tile: it has the shape of the real one."""
    program = compile_program([value.call], compute_dtype, sampled=False)
    return _ToyRun(program).result(value.call)


def _has_work_beside_rows(pass_: Pass) -> bool:
    """Whether a loop is of use after what torch does by rows, and adds up nothing.

    Sums of a pass by rows are those of whole rows, while a loop adds up blocks of a fixed size.
    """
    if any(is_by_entry(node) and not is_ranked(node) for node, _ in pass_.reductions):
        return False
    nodes = {*pass_.used_here, *(node for _, node in pass_.outputs)}
    is_ranking = any(is_ranked(node) for node, _ in pass_.reductions)
    return is_ranking or any(not (isinstance(n, MergeNode) and n.method.columns) for n in nodes)


def _can_be_loop_of_rows(pass_: Pass) -> bool:
    """Whether a pass by rows may be a loop over rows: all of one kind, and nothing is added up or ranked."""
    return (
        pass_.by_rows and len(pass_.row_lengths) == 1 and not any(is_by_entry(n) for n, _ in pass_.reductions)
    )


class _ToyRun:
    """Runs a program on a few numbers: small values get their shapes and dtypes, passes are recorded."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._dtype = program.dtype
        self._tile = Tile(_TOY_KEY, 0, _TOY_SIZE, _TOY_SHAPE)
        self._values: dict[Node, torch.Tensor] = {}  # small ones

    def result(self, root: Node) -> torch.Tensor:
        """The value of a small root."""
        for stage in self._program.stages:
            list(self.run(stage))
        return self._values[root].to(torch.float64)

    def run(self, stage: Stage) -> Iterator[tuple[Pass, Trace | str]]:
        for value in (node for node in self._program.extents if isinstance(node, ModelValue)):
            if value not in self._values:
                self._values[value] = _toy_value(value, self._dtype)
        for node in stage.before:
            if self._program.extents[node] is Extent.SMALL:
                self._values[node] = self._program.calls[node](self._values, self._tile).to(torch.float64)
        for pass_ in stage.passes:
            yield pass_, self._trace(pass_)
        totals = [self._reduce(pass_) for pass_ in stage.passes if pass_.reductions]
        for of_pass in totals:
            self._values.update(of_pass)

    def _trace(self, pass_: Pass) -> Trace | str:
        if _can_be_loop_of_rows(pass_):
            with suppress(Exception):  # of a user's length of rows, for the toy shape
                trace = self._record(pass_, with_rows=True)
                if isinstance(trace, Trace) and is_one_loop_of_rows(trace):
                    return trace
        if pass_.by_rows and not _has_work_beside_rows(pass_):
            return "it works on rows"
        return self._record(pass_, with_rows=False)

    def _record(self, pass_: Pass, with_rows: bool) -> Trace | str:
        """The trace of a pass; without rows, what methods of rows give is an input of it."""
        recorder = Recorder(self._values, _TOY_SHAPE)
        try:
            with Guard(recorder, with_rows), recorder:
                values = self._tiles(pass_, recorder, with_rows)
                terms = [
                    (node, self._terms(node, values)) for node, _ in pass_.reductions if is_by_entry(node)
                ]
            outputs = [*pass_.kept, *(node for _, node in pass_.outputs)]
            for node, _ in pass_.reductions:
                if not is_by_entry(node):
                    outputs += self._program.tile_children(node)
            return recorder.trace({node: values[node] for node in outputs}, terms)
        except MechaError as error:
            return str(error)

    def _reduce(self, pass_: Pass) -> dict[Node, torch.Tensor]:
        """The results of the reductions of a pass, whose tiles are computed once for all of them."""
        values = self._tiles(pass_, None)
        totals: dict[Node, torch.Tensor] = {}
        for node, _ in pass_.reductions:
            state = self._values.get(node)
            accumulator = open_accumulator(node, state, _TOY_SIZE, _TOY_SIZE, self._dtype)
            accumulate([node], self._program, values, self._tile, _TOY_SIZE, {node: accumulator})
            totals[node] = accumulator.finish(self._program.calls[node].hyperparameters, self._dtype)
        return totals

    def _tiles(
        self, pass_: Pass, recorder: Recorder | None, with_rows: bool = False
    ) -> dict[Node, torch.Tensor]:
        """The values of a pass on the toy tile."""

        def leaf(node: Node) -> torch.Tensor:
            tile = torch.linspace(0.5, 1, _TOY_SIZE, dtype=self._dtype)
            if recorder:
                recorder.begins(INPUT, node, tile)
            return tile

        calls = {
            node: self._call(node, call, recorder, with_rows)
            for node, call in self._program.tile_calls.items()
        }
        return evaluate(pass_.nodes, calls, self._tile, leaf, self._flat, dict(self._values))

    def _call(self, node: MergeNode, call: Call, recorder: Recorder | None, with_rows: bool) -> TileCall:
        """A call as it is traced: draws and results by rows are inputs, and no method learns its place."""

        def draw(values: Mapping[Node, Any], tile: Tile) -> torch.Tensor:
            drawn = torch.linspace(0, 0.5, _TOY_SIZE, dtype=self._dtype)
            if recorder:
                recorder.begins(DRAW, node, drawn)
            return drawn

        def given(values: Mapping[Node, Any], tile: Tile) -> torch.Tensor:
            assert recorder is not None
            result = torch.linspace(0.5, 1, _TOY_SIZE, dtype=self._dtype)
            recorder.begins(INPUT, node, result)
            return result

        def refuse(values: Mapping[Node, Any], tile: Tile) -> torch.Tensor:
            raise Untraceable(f"{node.method.identifier}: it asks where its tile lies")

        if node.method is uniform:
            return draw
        if recorder and node.method.columns and not with_rows:
            return given
        return refuse if recorder and node.method.signature.wants_tile else call

    def _flat(self, node: MergeNode, result: torch.Tensor) -> torch.Tensor:
        return result.reshape(-1).to(self._dtype)

    def _terms(self, node: MergeNode, values: Mapping[Node, torch.Tensor]) -> list[torch.Tensor]:
        return self._program.calls[node].partial(values, self._tile, self._values.get(node))
