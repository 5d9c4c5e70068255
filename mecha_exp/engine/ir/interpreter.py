"""A program run at once on whole tensors of one key, by torch: what passes would give, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mecha_exp.engine.ir.calls import Extent
from mecha_exp.engine.ir.program import Program
from mecha_exp.engine.ir.reductions import block_of, is_known, open_partials, rounds_of
from mecha_exp.graph.nodes import LiteralNode, MergeNode, Node
from mecha_exp.method_api.method import Kind, Reduction
from mecha_exp.method_api.state_dict import Tile


def run_eagerly(
    program: Program,
    key: str,
    shape: tuple[int, ...],
    leaves: Mapping[Node, torch.Tensor],
    compute_dtype: torch.dtype,
) -> torch.Tensor:
    """The value of a program's only root.

    Args:
        shape: that of the key.
        leaves: the tensors of its models and lazy methods.
    """
    return _Run(program, key, shape, leaves, compute_dtype).run()


class _Run:
    def __init__(
        self,
        program: Program,
        key: str,
        shape: tuple[int, ...],
        leaves: Mapping[Node, torch.Tensor],
        compute_dtype: torch.dtype,
    ) -> None:
        self._program = program
        self._shape = shape
        self._dtype = compute_dtype
        self._tile = Tile(key, 0, int(torch.Size(shape).numel()), shape)
        self._values: dict[Node, Any] = dict(leaves)

    def run(self) -> torch.Tensor:
        if not self._tile.stop:
            return torch.empty(self._shape, dtype=self._dtype)
        left = dict.fromkeys(self._program.extents, 0)
        for node in self._program.extents:
            for child in node.children:
                left[child] += 1
        (root,) = self._program.roots
        left[root] += 1
        for node in self._program.extents:
            if node not in self._values:
                self._values[node] = self._value(node)
            for child in node.children:  # what nobody needs any more makes room
                left[child] -= 1
                if not left[child]:
                    del self._values[child]
        return self._values[root]  # type: ignore[no-any-return]

    def _value(self, node: Node) -> Any:
        if isinstance(node, LiteralNode):
            return self._literal(node.value)
        assert isinstance(node, MergeNode)
        call = self._program.calls[node]
        if isinstance(node.method, Reduction):
            return self._reduced(node)
        if node.method.kind is Kind.FACTOR:
            return call.factor(self._values, self._tile)
        if self._program.extents[node] is Extent.SMALL:
            return call(self._values, self._tile).to(torch.float64)
        if node.method.kind is Kind.WHOLE:
            return call(self._values, self._tile).to(self._dtype)
        return call(self._flat(node), self._tile).reshape(self._shape).to(self._dtype)

    def _literal(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.double().reshape(()) if value.numel() == 1 else value.to(self._dtype)

    def _flat(self, node: Node) -> dict[Node, Any]:
        """The values of a node's arguments as tiles are: flat."""
        return {
            child: self._values[child].reshape(-1) if self._is_large(child) else self._values[child]
            for child in node.children
        }

    def _is_large(self, node: Node) -> bool:
        return self._program.extents[node] in (Extent.TILE, Extent.WHOLE)

    def _reduced(self, node: MergeNode) -> torch.Tensor:
        """A reduction by the same blocks, added up in the same order, as in a pass."""
        assert isinstance(node.method, Reduction)
        call, values, state = self._program.calls[node], self._flat(node), None
        large = [child for child in node.children if self._is_large(child)]
        count, block = self._tile.stop, self._block_of(node)
        for _ in range(rounds_of(node.method, self._dtype)):
            if is_known(node, state):
                break
            partials = open_partials(node, state, count, block, self._dtype)
            for start in range(0, count, block):
                stop = min(start + block, count)
                part = {**values, **{child: values[child][start:stop] for child in large}}
                tile = Tile(self._tile.key, start, stop, self._shape)
                partials.add(start, call.partial(part, tile, partials.state))
            state = partials.finish(call.hyperparameters, self._dtype)
        assert state is not None
        return state

    def _block_of(self, node: MergeNode) -> int:
        """The block that a pass would take the reduction in: whole rows, where the pass goes by rows."""
        passes = (p for stage in self._program.stages for p in stage.passes)
        (columns,) = {p.columns(self._shape) for p in passes if any(n is node for n, _ in p.reductions)}
        return block_of(columns, True)
