"""The computation for one key of a recipe: stages of passes over tiles.

Every value of a recipe has an extent. A TILE is as large as the key's tensor and comes tile by tile, never
whole; a SMALL value is a number or so per key; a WHOLE one must be held entire, and so must a FACTOR, of
any form. A method's kind decides the extent of its result; reductions and whole methods cut the program
into stages: what they give is known only when a pass over the data has ended. Within a stage one tile goes
through the whole chain while it sits in the cache; tiles that a later stage needs again are computed again,
which is cheaper than storing them.

Many roots share one program: the points of a sweep have most of their nodes in common, and equal nodes are
the same object.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch

from mecha_exp.engine.ir.calls import Call, Extent
from mecha_exp.engine.ir.reductions import is_by_entry, is_ranked
from mecha_exp.graph.nodes import LiteralNode, MergeNode, ModelNode, Node, models_of
from mecha_exp.method_api.method import Factor, MergeMethod, RowLength


@dataclass(frozen=True, eq=False)
class DeferredCall(Node):
    """A leaf that no pass computes: a call of a method that asks for other keys, run by `owner`."""

    call: MergeNode
    owner: DeferredRunner

    def identity(self) -> tuple[Any, ...]:
        return (self.call, id(self.owner))

    @property
    def merge_space(self) -> str:
        return self.call.space

    @property
    def method(self) -> MergeMethod:
        """The method that is called."""
        return self.call.method

    def __repr__(self) -> str:
        return repr(self.call)


class DeferredRunner(Protocol):
    """The runner of deferred calls; see `planner.keys.state_dicts`."""

    def whole(
        self,
        node: DeferredCall,
        key: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        expert: int | None = None,
    ) -> torch.Tensor:
        """The result of a deferred call for a key of a shape, or for one expert of it."""

    def bytes_read_for(self, call: MergeNode, key: str) -> int:
        """The bytes of the tensors that a call reads for a key, in the dtype of the arithmetic."""


@dataclass(frozen=True, eq=False)
class Pass:
    """One pass over a key's data.

    Attributes:
        by_rows: whether tiles hold whole rows.
        reductions: (node, round) whose partial results are taken of each block.
        kept: tiles that are assembled into whole tensors, for the whole-tensor methods of the next stage.
        outputs: (root, node) that are finished here.
        sampled: whether it is over a sample of the data only.
        targets: what is computed for one of these.
        size: how many `nodes` there are.
        models: the inputs that this pass reads.
        extents: of every node of the program.
    """

    by_rows: bool
    reductions: tuple[tuple[MergeNode, int], ...]
    kept: tuple[Node, ...]
    outputs: tuple[tuple[int, Node], ...]
    sampled: bool
    targets: tuple[Node, ...]
    size: int
    models: tuple[ModelNode, ...]
    extents: Mapping[Node, Extent] = field(repr=False)

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """What is computed of each tile, arguments before their users.

        A plan does not ask for it: each pass of a long chain goes through all links below once more.
        """
        needed: set[Node] = set()
        stack = [*self.targets]
        while stack:
            node = stack.pop()
            if node not in needed and self.extents[node] is not Extent.SMALL:
                needed.add(node)
                stack += node.children if self.extents[node] is Extent.TILE else ()
        return tuple(node for node in self.extents if node in needed)

    @cached_property
    def is_full(self) -> bool:
        """Whether all of the data is expected to go through it: it is neither a sample nor a last resort."""
        ranked = [round for node, round in self.reductions if is_ranked(node)]
        is_last_resort = min(ranked, default=0) > 1 and len(ranked) == len(self.reductions)
        return not self.sampled and (bool(self.kept or self.outputs) or not is_last_resort)

    def columns(self, shape: tuple[int, ...]) -> int:
        """How many entries no tile of a key of that shape cuts: a row, or some if rows differ in length."""
        return math.lcm(*(columns(shape) for columns in self.row_lengths))

    @cached_property
    def row_lengths(self) -> frozenset[RowLength]:
        """How long the rows are that its methods want whole."""
        used = (*self.nodes, *(node for node, _ in self.reductions))
        return frozenset(n.method.columns for n in used if isinstance(n, MergeNode) and n.method.columns)

    @cached_property
    def used_here(self) -> frozenset[Node]:
        """The tiles that are kept, or reduced block by block."""
        blocks = (node for node, _ in self.reductions if not is_by_entry(node))
        return frozenset((*self.kept, *(child for node in blocks for child in node.children)))


@dataclass(frozen=True)
class Stage:
    """Small and whole-tensor values that can be computed now, then passes over the data."""

    before: tuple[MergeNode | DeferredCall, ...]
    passes: tuple[Pass, ...]


@dataclass(frozen=True, eq=False)
class Program:
    """The computation for each key of one structure.

    Attributes:
        roots: the wanted values; those of extent SMALL are there when the last stage has ended.
        stages: in order.
        extents: of every node.
        calls: how each inner node is run.
        dtype: of the arithmetic.
    """

    roots: tuple[Node, ...]
    stages: tuple[Stage, ...]
    extents: Mapping[Node, Extent] = field(repr=False)
    calls: Mapping[Node, Call] = field(repr=False)
    dtype: torch.dtype
    _whole: dict[tuple[int, ...], int] = field(default_factory=dict, init=False, repr=False)
    _unmade: dict[tuple[int, ...], frozenset[Node]] = field(default_factory=dict, init=False, repr=False)

    @property
    def full_passes(self) -> list[Pass]:
        """The passes that all of the data is expected to go through."""
        return [p for stage in self.stages for p in stage.passes if p.is_full]

    @cached_property
    def models(self) -> list[ModelNode]:
        """The inputs, in the order of the arguments."""
        return models_of(*self.roots)

    @cached_property
    def deferred_calls(self) -> list[DeferredCall]:
        """The calls of methods that ask for other keys."""
        return [node for node in self.extents if isinstance(node, DeferredCall)]

    @cached_property
    def tile_calls(self) -> Mapping[MergeNode, Call]:
        """The calls whose results come tile by tile."""
        return {call.node: call for node, call in self.calls.items() if self.extents[node] is Extent.TILE}

    def tile_children(self, node: Node) -> list[Node]:
        """The arguments of a node that are as large as the key: tiles and whole tensors."""
        return [child for child in node.children if self.extents[child] in (Extent.TILE, Extent.WHOLE)]

    @cached_property
    def released(self) -> Mapping[tuple[int, Node | None], list[Node]]:
        """Values that die after a node of a stage, or after its passes (None)."""
        last: dict[Node, tuple[int, Node | None]] = {}
        for index, stage in enumerate(self.stages):
            for node in stage.before:
                last |= dict.fromkeys(node.children, (index, node))
        for read, index in self._last_pass.items():  # which computes its tiles anew, and reads whole tensors
            if self.extents[read] is Extent.WHOLE and index >= last.get(read, (0, None))[0]:
                last[read] = (index, None)
        released: dict[tuple[int, Node | None], list[Node]] = {}
        for child, moment in last.items():
            if self.extents[child] is not Extent.SMALL:
                released.setdefault(moment, []).append(child)
        return released

    @cached_property
    def _last_pass(self) -> Mapping[Node, int]:
        """The last stage with a pass that needs a value, of each that some pass needs."""
        last: dict[Node, int] = {}
        for index, stage in enumerate(self.stages):
            for pass_ in stage.passes:
                last |= dict.fromkeys(pass_.targets, index)
        for node in reversed([*self.extents]):  # users before their arguments
            if node in last and self.extents[node] is Extent.TILE:
                last |= {child: max(last[node], last.get(child, 0)) for child in node.children}
        return last

    def unmade(self, shape: tuple[int, ...]) -> frozenset[Node]:
        """The factors that make nothing of a shape, and the tiles that would be kept for them alone."""
        if shape not in self._unmade:
            before = [node for stage in self.stages for node in stage.before]
            factors: set[Node] = set()
            for node in before:
                is_of_nothing = self.extents[node] is Extent.FACTOR and factors.intersection(node.children)
                if is_of_nothing or self._elements(node, shape) is None:
                    factors.add(node)
            read = {child for node in before if node not in factors for child in node.children}
            kept = {node for stage in self.stages for pass_ in stage.passes for node in pass_.kept}
            self._unmade[shape] = frozenset(factors | (kept - read))
        return self._unmade[shape]

    def whole_elements(self, shape: tuple[int, ...]) -> int:
        """How many numbers are held at once, at most, for a key of a shape: whole tensors and factors."""
        if shape not in self._whole:
            self._whole[shape] = self._most_held(shape)
        return self._whole[shape]

    def _most_held(self, shape: tuple[int, ...]) -> int:
        literals = [node for node in self.extents if isinstance(node, LiteralNode)]
        held: dict[Node, int] = {node: self._elements(node, shape) or 0 for node in literals}
        total = most = sum(held.values())
        for index, stage in enumerate(self.stages):
            kept = [node for pass_ in stage.passes for node in pass_.kept]
            for moment in (*stage.before, None):
                for node in [moment] if moment else kept:
                    if node not in held and node not in self.unmade(shape):
                        held[node] = self._elements(node, shape) or 0
                        total += held[node]
                most = max(most, total)
                total -= sum(held.pop(node, 0) for node in self.released.get((index, moment), ()))
        return most

    def _elements(self, node: Node, shape: tuple[int, ...]) -> int | None:
        if self.extents[node] is Extent.SMALL:
            return 0
        if isinstance(node, MergeNode) and isinstance(node.method, Factor):
            return node.method.size(shape, self.calls[node].arguments)
        return math.prod(shape)
