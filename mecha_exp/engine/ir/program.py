"""Lays out the computation for one key of a recipe: stages of passes over tiles.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch

from mecha_exp.engine.ir.calls import Call, Extent
from mecha_exp.engine.ir.reductions import is_by_entry, is_ranked, rounds_of
from mecha_exp.errors import MergeError
from mecha_exp.graph.nodes import LiteralNode, MergeNode, ModelNode, Node, models_of, walk
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
            for pass_ in stage.passes:  # which computes its tiles anew, and reads whole tensors
                read = (node for node in pass_.nodes if self.extents[node] is Extent.WHOLE)
                last |= dict.fromkeys(read, (index, None))
        released: dict[tuple[int, Node | None], list[Node]] = {}
        for child, moment in last.items():
            if self.extents[child] is not Extent.SMALL:
                released.setdefault(moment, []).append(child)
        return released

    def unmade(self, shape: tuple[int, ...]) -> frozenset[Node]:
        """The factors that make nothing of a shape, and the tiles that would be kept for them alone."""
        if shape not in self._unmade:
            before = [node for stage in self.stages for node in stage.before]
            factors = {node for node in before if self._elements(node, shape) is None}
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
        held: set[Node] = {node for node in self.extents if isinstance(node, LiteralNode)}
        most = 0
        for index, stage in enumerate(self.stages):
            for moment in (*stage.before, None):
                held.update([moment] if moment else (node for pass_ in stage.passes for node in pass_.kept))
                held -= self.unmade(shape)
                most = max(most, sum(self._elements(node, shape) or 0 for node in held))
                held.difference_update(self.released.get((index, moment), ()))
        return most

    def _elements(self, node: Node, shape: tuple[int, ...]) -> int | None:
        if self.extents[node] is Extent.SMALL:
            return 0
        if isinstance(node, MergeNode) and isinstance(node.method, Factor):
            return node.method.size(shape, self.calls[node].arguments)
        return math.prod(shape)


def compile_program(
    roots: Sequence[Node],
    compute_dtype: torch.dtype,
    caches: Mapping[Node, Any] | None = None,
    sampled: bool | None = None,
) -> Program:
    """Lay out the stages for expanded graphs without per-key values.

    Args:
        roots: the graphs.
        compute_dtype: of the arithmetic.
        caches: for their methods.
        sampled: of a trip that finds numbers of the whole model, whether it is over a sample of the data.
            None for any other program, which knows such numbers already (see `model_values`).

    Raises:
        MergeError: a graph that cannot be run key by key.
    """
    nodes = list(walk(*roots))
    layout = _Layout({}, {}, compute_dtype, sampled)
    for node in nodes:
        layout.place(node)
    count = max(layout.ready.values(), default=0) + 1
    stages = tuple(_StageBuilder(index, roots, nodes, layout).build() for index in range(count))
    calls: dict[Node, Call] = {
        node: Call(node, layout.extents, compute_dtype, (caches or {}).get(node))
        for node in nodes
        if isinstance(node, MergeNode)
    }
    return Program(tuple(roots), stages, layout.extents, calls, compute_dtype)


@dataclass(frozen=True)
class _Layout:
    """The extent of each node, and the first stage that can use it."""

    extents: dict[Node, Extent]
    ready: dict[Node, int]
    compute_dtype: torch.dtype
    sampled: bool | None

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
            self._refuse_of_model(node.method)
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

    def _refuse_of_model(self, method: Reduction) -> None:
        if method.of_model and self.sampled is None:
            raise MergeError(
                f"'{method.identifier}' is a number of the whole model, and is asked for by a merge that a "
                "method with state dicts reads key by key. Merge that one to a file first, and read the file."
            )

    def takes_sample(self, node: MergeNode, round: int) -> bool:
        """Whether a round of a reduction is over a sample of the data."""
        assert isinstance(node.method, Reduction)
        return is_ranked(node) and (bool(self.sampled) if node.method.of_model else round == 0)

    def first_stage(self, node: MergeNode) -> int:
        """The stage of a reduction's first round."""
        assert isinstance(node.method, Reduction)
        return self.ready[node] - rounds_of(node.method, self.compute_dtype)

    def tiles_of(self, targets: Sequence[Node]) -> list[Node]:
        """The values of each tile that the targets need, arguments before their users."""
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


class PassKey(NamedTuple):
    """The traits by which the passes of a stage differ; they run in the order of `PASS_ORDER`."""

    sampled: bool
    by_rows: bool


PASS_ORDER = [PassKey(sampled, by_rows) for sampled in (True, False) for by_rows in (False, True)]


class _StageBuilder:
    """Lays out one stage: what runs before its passes, and which pass each target belongs to."""

    def __init__(self, index: int, roots: Sequence[Node], nodes: Sequence[Node], layout: _Layout) -> None:
        self._index = index
        self._roots = roots
        self._nodes = nodes
        self._calls = [node for node in nodes if isinstance(node, MergeNode)]
        self._layout = layout

    def build(self) -> Stage:
        passes = (self._pass(key) for key in PASS_ORDER)
        return Stage(self._before(), tuple(pass_ for pass_ in passes if pass_ is not None))

    def _before(self) -> tuple[MergeNode | DeferredCall, ...]:
        """Small and whole-tensor values that can be computed once the stage before has ended."""
        return tuple(
            node
            for node in self._nodes
            if isinstance(node, MergeNode | DeferredCall)
            and not isinstance(node.method, Reduction)
            and self._layout.ready[node] == self._index
            and self._layout.extents[node] is not Extent.TILE
        )

    def _pass(self, key: PassKey) -> Pass | None:
        """The pass of a key with its targets; None where it has none."""
        reductions = self._buckets[key].reductions
        kept, outputs = self._buckets[key].kept, self._buckets[key].outputs
        targets = [*(child for node, _ in reductions for child in node.children), *kept]
        targets += [root for _, root in outputs]
        if not targets:
            return None
        nodes = tuple(self._layout.tiles_of(targets))
        return Pass(key.by_rows, nodes, tuple(reductions), tuple(kept), tuple(outputs), key.sampled)

    @cached_property
    def _buckets(self) -> dict[PassKey, _Targets]:
        """The targets of the stage by the pass that computes them."""
        buckets = {key: _Targets() for key in PASS_ORDER}
        for node, round in self._reductions():
            key = self._key_of(node, *node.children, sampled=self._layout.takes_sample(node, round))
            buckets[key].reductions.append((node, round))
        for tile in self._kept():
            buckets[self._key_of(tile)].kept.append(tile)
        for number, root in enumerate(self._roots):
            if self._layout.extents[root] is not Extent.SMALL and self._layout.ready[root] == self._index:
                buckets[self._key_of(root)].outputs.append((number, root))
        return buckets

    def _reductions(self) -> Iterator[tuple[MergeNode, int]]:
        """The reductions that have a round in this stage, with its number."""
        for node in self._calls:
            if isinstance(node.method, Reduction):
                first = self._layout.first_stage(node)
                if first <= self._index < self._layout.ready[node]:
                    yield node, self._index - first

    def _kept(self) -> dict[Node, None]:
        """The tiles that whole-tensor methods and factors of the next stage need entire."""
        layout, whole = self._layout, (Extent.WHOLE, Extent.FACTOR)
        users = [n for n in self._calls if layout.extents[n] in whole and layout.ready[n] == self._index + 1]
        children = (child for node in users for child in node.children)
        return {child: None for child in children if layout.extents[child] is Extent.TILE}

    def _key_of(self, *targets: Node, sampled: bool = False) -> PassKey:
        return PassKey(sampled, any(map(has_rows, (*targets, *self._layout.tiles_of(targets)))))


@dataclass
class _Targets:
    """The results of one pass of a stage."""

    reductions: list[tuple[MergeNode, int]] = field(default_factory=list)
    kept: list[Node] = field(default_factory=list)
    outputs: list[tuple[int, Node]] = field(default_factory=list)


def has_rows(node: Node) -> bool:
    """Whether a node is computed of whole rows."""
    return isinstance(node, MergeNode) and node.method.columns is not None
