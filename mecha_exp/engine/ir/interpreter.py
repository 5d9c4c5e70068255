"""Runs the nodes of a program by torch: the one definition of what a pass computes.

`evaluate` computes the values of one tile and `accumulate` adds them to reductions. A pass over a key reads
their leaves from files, the tracer gives toy leaves to a recorder, and `run_eagerly` takes whole tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch

from mecha_exp.engine.ir.calls import Call, Extent
from mecha_exp.engine.ir.program import Program
from mecha_exp.engine.ir.reductions import (
    Accumulator,
    Sums,
    add_sums,
    block_of,
    is_by_entry,
    is_known,
    open_accumulator,
    rounds_of,
)
from mecha_exp.errors import MergeError
from mecha_exp.graph.nodes import LiteralNode, MergeNode, Node
from mecha_exp.method_api.method import Kind, Reduction
from mecha_exp.method_api.state_dict import Tile

_MOST_TERMS = 1 << 18
"""Terms on a CPU that wait to be added up together, 2 MB of them."""

TileCall: TypeAlias = Callable[[Mapping[Node, Any], Tile], torch.Tensor]
"""Computes the result of an elementwise call for a tile from the values of its arguments."""


def evaluate(
    nodes: Iterable[Node],
    calls: Mapping[MergeNode, TileCall],
    tile: Tile,
    leaf: Callable[[Node], Any],
    shaped: Callable[[MergeNode, torch.Tensor], torch.Tensor],
    values: dict[Node, Any],
) -> dict[Node, Any]:
    """Compute nodes in order and add them to `values`, which is returned.

    Args:
        nodes: arguments before their users.
        calls: the elementwise calls by node, as `Program.tile_calls`.
        leaf: reads the value of a node without such a call.
        shaped: checks the result of a call and gives it the form of a value.
        values: known before, by node.
    """
    for node in nodes:
        if isinstance(node, MergeNode) and node in calls:
            values[node] = shaped(node, calls[node](values, tile))
        else:
            values[node] = leaf(node)
    return values


def accumulate(
    reductions: Iterable[MergeNode],
    program: Program,
    values: Mapping[Node, Any],
    tile: Tile,
    block: int,
    accumulators: Mapping[MergeNode, Accumulator],
) -> None:
    """Add the values of a tile to reductions: all of it by entry, or block by block, which no tile cuts."""
    sums: list[
        tuple[Sums, Sequence[torch.Tensor]]
    ] = []  # which are added up together, as far as they are few
    entries = tile.stop - tile.start
    for node in reductions:
        accumulator, call = accumulators[node], program.calls[node]
        large = program.tile_children(node)
        size = entries if is_by_entry(node) else block
        for start in range(tile.start, tile.stop, size):
            stop = min(start + size, tile.stop)
            part = {child: values[child][start - tile.start : stop - tile.start] for child in large}
            span = replace(tile, start=start, stop=stop)
            results = call.partial({**values, **part}, span, accumulator.state)
            for result in results if is_by_entry(node) else ():
                check_count(node, result, span, "a reduction by entries")
            if isinstance(accumulator, Sums):
                sums.append((accumulator, results))
            else:
                accumulator.add(start, results)
        if results[0].device.type == "cpu" and entries * sum(len(terms) for _, terms in sums) > _MOST_TERMS:
            add_sums(sums, tile.start)
            sums.clear()
    if sums:
        add_sums(sums, tile.start)


def check_count(node: MergeNode, result: torch.Tensor, tile: Tile, declared: str) -> None:
    """Raise MergeError where a result has not as many elements as its tile."""
    if result.numel() != tile.stop - tile.start:
        raise MergeError(
            f"the merge method '{node.method.identifier}' gave {result.numel()} values for a tile of "
            f"{tile.stop - tile.start} of the key '{tile.name}', so it is not {declared}. "
            "Declare it without that."
        )


def run_eagerly(
    program: Program, whole: Tile, leaves: Mapping[Node, torch.Tensor], compute_dtype: torch.dtype
) -> torch.Tensor:
    """Run a program at once on the whole tensors of a key: bit for bit what its passes give.

    Args:
        whole: all of the key, or of one expert of it.
        leaves: the tensors of its models and deferred calls.

    Returns:
        The value of its only root.
    """
    return _WholeTensors(program, whole, leaves, compute_dtype).run()


class _WholeTensors:
    def __init__(
        self,
        program: Program,
        whole: Tile,
        leaves: Mapping[Node, torch.Tensor],
        compute_dtype: torch.dtype,
    ) -> None:
        self._program = program
        self._shape = whole.shape
        self._dtype = compute_dtype
        self._tile = whole
        self._leaves = leaves
        self._values: dict[Node, Any] = {}

    def run(self) -> torch.Tensor:
        if not self._tile.stop:
            return torch.empty(self._shape, dtype=self._dtype)
        calls = {node: partial(self._elementwise, call) for node, call in self._program.tile_calls.items()}
        evaluate(self._nodes(), calls, self._tile, self._leaf, self._shaped, self._values)
        (root,) = self._program.roots
        return self._values[root]  # type: ignore[no-any-return]

    def _nodes(self) -> Iterator[Node]:
        """The nodes in order; after each one, values without further users are dropped."""
        users = Counter(child for node in self._program.extents for child in node.children)
        users.update(self._program.roots)
        for node in self._program.extents:
            yield node
            for child in node.children:
                users[child] -= 1
                if not users[child]:
                    del self._values[child]

    def _elementwise(self, call: Call, values: Mapping[Node, Any], tile: Tile) -> torch.Tensor:
        return call(self._flat(call.node), tile)

    def _shaped(self, node: MergeNode, result: torch.Tensor) -> torch.Tensor:
        return result.reshape(self._shape).to(self._dtype)

    def _leaf(self, node: Node) -> Any:
        """The value of a node that is not an elementwise call on tensors."""
        if node in self._leaves:
            return self._leaves[node]
        if isinstance(node, LiteralNode):
            return self._literal(node.value)
        assert isinstance(node, MergeNode)
        call = self._program.calls[node]
        if isinstance(node.method, Reduction):
            return self._reduced(node)
        if node.method.kind is Kind.FACTOR:
            return call.factor(self._values, self._tile)
        dtype = torch.float64 if self._program.extents[node] is Extent.SMALL else self._dtype
        return call(self._values, self._tile).to(dtype)

    def _literal(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.double().reshape(()) if value.numel() == 1 else value.to(self._dtype)

    def _flat(self, node: MergeNode) -> dict[Node, Any]:
        """The values of a node's arguments, flat as tiles are."""
        values = {child: self._values[child] for child in node.children}
        return values | {child: values[child].reshape(-1) for child in self._program.tile_children(node)}

    def _reduced(self, node: MergeNode) -> torch.Tensor:
        """A reduction by the same blocks, added up in the same order, as in a pass."""
        assert isinstance(node.method, Reduction)
        values, state = self._flat(node), None
        count, block = self._tile.stop, self._block_of(node)
        for _ in range(rounds_of(node.method, self._dtype)):
            if is_known(node, state):
                break
            accumulator = open_accumulator(node, state, count, block, self._dtype)
            for start in range(0, count, block):
                tile = replace(self._tile, start=start, stop=min(start + block, count))
                large = {
                    child: values[child][start : tile.stop] for child in self._program.tile_children(node)
                }
                accumulate([node], self._program, {**values, **large}, tile, block, {node: accumulator})
            state = accumulator.finish(self._program.calls[node].hyperparameters, self._dtype)
        assert state is not None
        return state

    def _block_of(self, node: MergeNode) -> int:
        """The block that a pass would take the reduction in: whole rows, where the pass goes by rows."""
        passes = (p for stage in self._program.stages for p in stage.passes)
        (columns,) = {p.columns(self._shape) for p in passes if any(n is node for n, _ in p.reductions)}
        return block_of(columns, True)
