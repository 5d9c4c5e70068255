"""Runs a program on many small keys at once: bit for bit what it gives for each of them.

Their tensors lie one after another, and torch computes all of them in one call. That is right only where an
entry is computed from the entries at its place and from small values, by operations that round alike at every
place of a tensor (see `compiler/ops.py`). A reduction takes keys of one size as the rows of a matrix, each in
the order in which it is taken of a key alone. Small values are computed from others for one key after
another, and each key has the draws that belong to its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mecha_exp.engine.ir.calls import Extent
from mecha_exp.engine.ir.interpreter import check_count
from mecha_exp.engine.ir.program import Program
from mecha_exp.engine.ir.reductions import (
    REDUCTION_BLOCK,
    STRIP,
    Ranked,
    is_by_entry,
    is_ranked,
    lane_sums,
    rounds_of,
)
from mecha_exp.graph.nodes import LiteralNode, MergeNode, Node
from mecha_exp.method_api.method import Reduction
from mecha_exp.method_api.state_dict import Tile
from mecha_exp.random import uniform, uniforms_of_keys


def can_be_stacked(program: Program) -> bool:
    """Whether a program has only values that can be taken row by row."""
    if not set(program.extents.values()) <= {Extent.SMALL, Extent.TILE}:
        return False
    methods = [(call.node, call.method) for call in program.calls.values()]
    return all(
        is_by_entry(node) and (method.rank or rounds_of(method, program.dtype) == 1)
        for node, method in methods
        if isinstance(method, Reduction)
    )


def run_stacked(
    program: Program,
    counts: Mapping[str, int],
    leaves: Mapping[Node, torch.Tensor],
    known: Mapping[Node, torch.Tensor],
) -> list[Any]:
    """The values of the roots of a program, of one key after another.

    A root that is a reduction of the whole model has its terms instead, [keys, elements] each.

    Args:
        program: of which `can_be_stacked`, and whose passes can be traced.
        counts: the elements of each key; as many of each if there are reductions or draws.
        leaves: of each model the tensors, one after another, flat.
        known: the numbers of the whole model.

    Raises:
        MergeError: a method failed, or cannot be run so.
    """
    return _StackedKeys(program, counts, {**leaves, **known}).run()


class _StackedKeys:
    def __init__(
        self, program: Program, counts: Mapping[str, int], leaves: Mapping[Node, torch.Tensor]
    ) -> None:
        self._program, self._names = program, list(counts)
        self._rows = len(counts), counts[self._names[0]]  # of reductions and draws
        self._tile = _all_of(f"{self._names[0]} to {self._names[-1]}", sum(counts.values()))
        self._values: dict[Node, Any] = dict(leaves)  # tiles, and small values that all keys have in common
        self._of_each: dict[Node, torch.Tensor] = {}  # small values, [keys, ...]

    def run(self) -> list[Any]:
        for node in self._program.extents:
            if node not in self._values:
                self._compute(node)
        return [self._values[root] for root in self._program.roots]

    def _compute(self, node: Node) -> None:
        if isinstance(node, LiteralNode):
            if isinstance(node.value, torch.Tensor):
                self._values[node] = node.value.double().reshape(())
            return
        assert isinstance(node, MergeNode)
        if isinstance(node.method, Reduction):
            terms = self._terms(node)
            if node.method.of_model:
                self._values[node] = terms
            else:
                known = self._program.calls[node].hyperparameters
                self._of_each[node] = of_rows(node, terms, known, self._program.dtype)
        elif node.method is uniform:
            known = self._program.calls[node].hyperparameters
            drawn = uniforms_of_keys(self._names, self._rows[1], **known)
            self._values[node] = torch.from_numpy(drawn.reshape(-1)).to(self._program.dtype)
        elif self._program.extents[node] is Extent.TILE:
            result = self._program.calls[node](self._beside_tiles(node), self._tile)
            check_count(node, result, self._tile, node.method.kind.value)
            self._values[node] = result.reshape(-1).to(self._program.dtype)
        elif self._of_each.keys().isdisjoint(node.children):
            self._values[node] = self._small(node, self._tile, self._values)
        else:
            self._of_each[node] = torch.stack([*self._small_of_each(node)])

    def _terms(self, node: MergeNode) -> list[torch.Tensor]:
        """What the elements add to a reduction, the elements of a key in a row."""
        terms = self._program.calls[node].partial(self._beside_tiles(node), self._tile, None)
        for term in terms:
            check_count(node, term, self._tile, "a reduction by entries")
        return [term.reshape(self._rows) for term in terms]

    def _beside_tiles(self, node: MergeNode) -> Mapping[Node, torch.Tensor]:
        """The arguments of a call on tiles: the small value of a key stands beside each of its elements."""
        of_each = {child: self._of_each[child] for child in node.children if child in self._of_each}
        count = self._rows[1]
        return self._values | {n: v.movedim(0, -1).repeat_interleave(count, -1) for n, v in of_each.items()}

    def _small_of_each(self, node: MergeNode) -> Iterator[torch.Tensor]:
        of_each = {child: self._of_each[child].unbind() for child in node.children if child in self._of_each}
        for number, name in enumerate(self._names):
            own = {child: values[number] for child, values in of_each.items()}
            yield self._small(node, _all_of(name, self._rows[1]), {**self._values, **own})

    def _small(self, node: MergeNode, key: Tile, values: Mapping[Node, torch.Tensor]) -> torch.Tensor:
        return self._program.calls[node](values, key).to(torch.float64)


def _all_of(name: str, count: int) -> Tile:
    return Tile(name, 0, count, (count,))


def of_rows(
    node: MergeNode, terms: Sequence[torch.Tensor], hyperparameters: dict[str, object], dtype: torch.dtype
) -> torch.Tensor:
    """The values of a reduction in one round, [rows, ...]: of each row what the terms of a whole key give.

    Args:
        terms: what the method returned, [rows, elements] each. A row has no more elements than a block.
    """
    count = terms[0].shape[1]
    if is_ranked(node):
        return Ranked(node, None, count, count, dtype).of_rows(terms[0], hyperparameters)
    assert isinstance(node.method, Reduction)
    totals = sums_of_rows(terms)
    if node.method.finish is None:
        return totals
    known = {"state": None, "count": count, "dtype": dtype, **hyperparameters}
    return torch.stack([node.method.finish(total, **known) for total in totals])


def sums_of_rows(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sums of each row, [rows] of one term and [rows, terms] of several; a row fits into a block."""
    count = terms[0].shape[1]
    assert count <= REDUCTION_BLOCK
    together = max(1, REDUCTION_BLOCK // max(count, STRIP))  # rows, which are filled up to whole strips
    parts = [[lane_sums(part) for part in torch.split(term, together)] for term in terms]
    sums = torch.from_numpy(np.stack([np.concatenate(part) for part in parts], axis=1))
    return sums.squeeze(1) if len(terms) == 1 else sums
