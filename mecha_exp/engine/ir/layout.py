"""Lays out programs: which stage and which pass of it each node of expanded graphs belongs to.

Reductions and whole-tensor methods end a stage. Within a stage, targets that are read alike share a pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from mecha_exp.engine.ir.calls import Call, Extent
from mecha_exp.engine.ir.program import DeferredCall, Pass, Program, Stage
from mecha_exp.engine.ir.reductions import is_ranked, rounds_of
from mecha_exp.errors import MergeError
from mecha_exp.graph.nodes import LiteralNode, MergeNode, ModelNode, Node, walk
from mecha_exp.method_api.method import Kind, Reduction


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
