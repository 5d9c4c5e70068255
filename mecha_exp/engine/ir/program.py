"""From a recipe to what is done with one key: stages of passes over tiles.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, Protocol

import torch

from mecha_exp.engine.ir.calls import Call, Extent
from mecha_exp.engine.ir.reductions import is_by_entry, is_ranked, rounds_of
from mecha_exp.errors import MergeError
from mecha_exp.graph.nodes import LiteralNode, MergeNode, ModelNode, Node, walk
from mecha_exp.method_api.method import Factor, Kind, MergeMethod, Reduction, RowLength


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
        """What is called."""
        return self.call.method

    def __repr__(self) -> str:
        return repr(self.call)


class DeferredRunner(Protocol):
    """What runs lazy nodes; see `lazy`."""

    def whole(
        self, node: DeferredCall, key: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The result of a lazy node for a key of a shape."""


@dataclass(frozen=True, eq=False)
class Pass:
    """One pass over a key's data.

    Attributes:
        by_rows: whether tiles hold whole rows.
        nodes: what is computed of each tile, arguments before their users.
        reductions: (node, round) whose partial results are taken of each block.
        kept: tiles that are assembled into whole tensors, for the whole-tensor methods of the next stage.
        outputs: (root, node) that are finished here.
        sampled: whether it is over a sample of the data only.
    """

    by_rows: bool
    nodes: tuple[Node, ...]
    reductions: tuple[tuple[MergeNode, int], ...]
    kept: tuple[Node, ...]
    outputs: tuple[tuple[int, Node], ...]
    sampled: bool = False

    @cached_property
    def is_full(self) -> bool:
        """Whether all of the data is expected to go through it: it is neither a sample nor a last resort."""
        ranked = [round for node, round in self.reductions if is_ranked(node)]
        is_last_resort = min(ranked, default=0) > 1 and len(ranked) == len(self.reductions)
        return not self.sampled and (bool(self.kept or self.outputs) or not is_last_resort)

    def columns(self, shape: tuple[int, ...]) -> int:
        """How many entries no tile of a key of that shape cuts: a row, or some if rows differ in length."""
        return math.lcm(*(columns(shape) for columns in self._row_lengths))

    @cached_property
    def _row_lengths(self) -> list[RowLength]:
        used = (*self.nodes, *(node for node, _ in self.reductions))
        return [n.method.columns for n in used if isinstance(n, MergeNode) and n.method.columns]

    @cached_property
    def used_here(self) -> frozenset[Node]:
        """The tiles that are kept, or reduced block by block."""
        blocks = (node for node, _ in self.reductions if not is_by_entry(node))
        return frozenset((*self.kept, *(child for node in blocks for child in node.children)))

    @cached_property
    def models(self) -> list[ModelNode]:
        """The inputs that this pass reads."""
        return [node for node in self.nodes if isinstance(node, ModelNode)]


@dataclass(frozen=True)
class Stage:
    """Small and whole-tensor values that can be computed now, then passes over the data."""

    before: tuple[MergeNode | DeferredCall, ...]
    passes: tuple[Pass, ...]


@dataclass(frozen=True, eq=False)
class Program:
    """What is done for each key of one structure.

    Attributes:
        roots: the wanted values; those of extent SMALL are there when the last stage has ended.
        stages: in order.
        extents: of every node.
        calls: how each inner node is run.
    """

    roots: tuple[Node, ...]
    stages: tuple[Stage, ...]
    extents: Mapping[Node, Extent] = field(repr=False)
    calls: Mapping[Node, Call] = field(repr=False)
    _whole: dict[tuple[int, ...], int] = field(default_factory=dict, init=False, repr=False)

    @property
    def full_passes(self) -> list[Pass]:
        """The passes that all of the data is expected to go through."""
        return [p for stage in self.stages for p in stage.passes if p.is_full]

    @cached_property
    def released(self) -> Mapping[tuple[int, Node | None], list[Node]]:
        """What nobody needs any more after a node `before` the passes of a stage, or (None) after them."""
        last: dict[Node, tuple[int, Node | None]] = {}
        for index, stage in enumerate(self.stages):
            for node in stage.before:
                last |= dict.fromkeys(node.children, (index, node))
            for pass_ in stage.passes:  # which computes its tiles anew, and reads whole tensors
                read = (node for node in pass_.nodes if self.extents[node] is Extent.WHOLE)
                last |= dict.fromkeys(read, (index, None))
        released: dict[tuple[int, Node | None], list[Node]] = {}
        for child, moment in last.items():
            if self.extents[child] is not Extent.SMALL:
                released.setdefault(moment, []).append(child)
        return released

    def whole_elements(self, shape: tuple[int, ...]) -> int:
        """How many numbers are held at once, at most, for a key of a shape: whole tensors and factors."""
        if shape not in self._whole:
            self._whole[shape] = self._most_held(shape)
        return self._whole[shape]

    def _most_held(self, shape: tuple[int, ...]) -> int:
        held: set[Node] = {node for node in self.extents if isinstance(node, LiteralNode)}
        most = 0
        for index, stage in enumerate(self.stages):
            for moment in (*stage.before, None):
                held.update([moment] if moment else (node for pass_ in stage.passes for node in pass_.kept))
                most = max(most, sum(self._elements(node, shape) for node in held))
                held.difference_update(self.released.get((index, moment), ()))
        return most

    def _elements(self, node: Node, shape: tuple[int, ...]) -> int:
        if self.extents[node] is Extent.SMALL:
            return 0
        if isinstance(node, MergeNode) and isinstance(node.method, Factor):
            return node.method.size(shape, self.calls[node].arguments)
        return math.prod(shape)


def compile_program(
    roots: Sequence[Node], compute_dtype: torch.dtype, caches: Mapping[Node, Any] | None = None
) -> Program:
    """Lay out the stages for expanded graphs without per-key values; `caches` are for their methods."""
    nodes = list(walk(*roots))
    layout = _Layout({}, {}, compute_dtype)
    for node in nodes:
        layout.place(node)
    count = max(layout.ready.values(), default=0) + 1
    stages = tuple(_stage(index, roots, nodes, layout) for index in range(count))
    calls: dict[Node, Call] = {
        node: Call(node, layout.extents, compute_dtype, (caches or {}).get(node))
        for node in nodes
        if isinstance(node, MergeNode)
    }
    return Program(tuple(roots), stages, layout.extents, calls)


@dataclass(frozen=True)
class _Layout:
    """Of each node its extent, and the stage from which on it can be used."""

    extents: dict[Node, Extent]
    ready: dict[Node, int]
    compute_dtype: torch.dtype

    def place(self, node: Node) -> None:
        stage = max((self.ready[child] for child in node.children), default=0)
        large = any(self.extents[child] is not Extent.SMALL for child in node.children)
        extent = Extent.TILE if large else Extent.SMALL
        if isinstance(node, ModelNode):
            extent = Extent.TILE
        elif isinstance(node, DeferredCall):
            extent = Extent.WHOLE
        elif isinstance(node, LiteralNode):
            is_large = isinstance(node.value, torch.Tensor) and node.value.numel() != 1
            extent = Extent.WHOLE if is_large else Extent.SMALL
        elif isinstance(node, MergeNode) and isinstance(node.method, Reduction):
            if not large:
                raise MergeError(f"'{node.method.identifier}' reduces a tensor, but is given only numbers")
            extent, stage = Extent.SMALL, stage + rounds_of(node.method, self.compute_dtype)
        elif isinstance(node, MergeNode) and node.method.kind is Kind.FACTOR:
            extent, stage = Extent.FACTOR, stage + 1
        elif isinstance(node, MergeNode) and node.method.kind is Kind.WHOLE and large:
            extent, stage = Extent.WHOLE, stage + 1
        if extent in (Extent.TILE, Extent.SMALL):
            self._refuse_factors(node)
        self.extents[node], self.ready[node] = extent, stage

    def _refuse_factors(self, node: Node) -> None:
        for child in node.children:
            if self.extents[child] is Extent.FACTOR:
                raise MergeError(f"{node!r} works on tiles, but is given the factor {child!r}")

    def first_stage(self, node: MergeNode) -> int:
        """The stage of a reduction's first round."""
        assert isinstance(node.method, Reduction)
        return self.ready[node] - rounds_of(node.method, self.compute_dtype)

    def tiles_of(self, targets: Sequence[Node]) -> list[Node]:
        """What must be computed of each tile for the targets, arguments before their users."""
        needed: set[Node] = set()
        stack = [t for t in targets if self.extents[t] is not Extent.SMALL]
        while stack:
            node = stack.pop()
            if node in needed:
                continue
            needed.add(node)
            if self.extents[node] is Extent.TILE:
                stack.extend(c for c in node.children if self.extents[c] is not Extent.SMALL)
        return [node for node in self.extents if node in needed]


def _stage(index: int, roots: Sequence[Node], nodes: Sequence[Node], layout: _Layout) -> Stage:
    calls = [node for node in nodes if isinstance(node, MergeNode)]
    reductions = [
        (node, index - layout.first_stage(node))
        for node in calls
        if isinstance(node.method, Reduction) and layout.first_stage(node) <= index < layout.ready[node]
    ]
    before = [
        node
        for node in nodes
        if isinstance(node, MergeNode | DeferredCall)
        and not isinstance(node.method, Reduction)
        and layout.ready[node] == index
        and layout.extents[node] is not Extent.TILE
    ]
    kept = {
        child: None
        for node in calls
        if layout.extents[node] in (Extent.WHOLE, Extent.FACTOR) and layout.ready[node] == index + 1
        for child in node.children
        if layout.extents[child] is Extent.TILE
    }
    outputs = [
        (number, root)
        for number, root in enumerate(roots)
        if layout.extents[root] is not Extent.SMALL and layout.ready[root] == index
    ]
    passes = []
    for backend in product((True, False), (False, True)):
        sampled, by_rows = backend

        def here(*targets: Node, in_sample: bool = False, backend: tuple[bool, bool] = backend) -> bool:
            return backend == (in_sample, any(map(has_rows, (*targets, *layout.tiles_of(targets)))))

        chosen = Pass(
            by_rows,
            (),
            tuple((n, r) for n, r in reductions if here(n, *n.children, in_sample=is_ranked(n) and r == 0)),
            tuple(node for node in kept if here(node)),
            tuple((number, root) for number, root in outputs if here(root)),
            sampled,
        )
        targets = [*(c for n, _ in chosen.reductions for c in n.children), *chosen.kept]
        targets += [root for _, root in chosen.outputs]
        if targets:
            passes.append(replace(chosen, nodes=tuple(layout.tiles_of(targets))))
    return Stage(tuple(before), tuple(passes))


def has_rows(node: Node) -> bool:
    """Whether a node is computed of whole rows."""
    return isinstance(node, MergeNode) and node.method.columns is not None
