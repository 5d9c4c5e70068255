"""Lays out programs: which stage and which pass of it each node of expanded graphs belongs to.

Reductions and whole-tensor methods end a stage. Within a stage, targets that are read alike share a pass.
A chain of such methods has as many stages as links, so whatever is done for each stage goes by what is new
in it, and never over the whole graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    layout = _Layout({}, {}, set(), compute_dtype, sampled)
    for node in nodes:
        layout.place(node)
    stages = _Stages(roots, nodes, layout).build()
    calls: dict[Node, Call] = {
        node: Call(node, layout.extents, compute_dtype, (caches or {}).get(node))
        for node in nodes
        if isinstance(node, MergeNode)
    }
    return Program(tuple(roots), stages, layout.extents, calls, compute_dtype)


@dataclass(frozen=True)
class _Layout:
    """The extent of each node, the first stage that can use it, and the nodes that need whole rows."""

    extents: dict[Node, Extent]
    ready: dict[Node, int]
    by_rows: set[Node]
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
        if has_rows(node) or (extent is Extent.TILE and any(map(self._has_rows_in_tiles, node.children))):
            self.by_rows.add(node)

    def _has_rows_in_tiles(self, node: Node) -> bool:
        return node in self.by_rows and self.extents[node] is not Extent.SMALL

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


class PassKey(NamedTuple):
    """The traits by which the passes of a stage differ; they run in the order of `PASS_ORDER`."""

    sampled: bool
    by_rows: bool


PASS_ORDER = [PassKey(sampled, by_rows) for sampled in (True, False) for by_rows in (False, True)]


class _Targets(NamedTuple):
    """The results of one pass of a stage."""

    reductions: list[tuple[MergeNode, int]]
    kept: dict[Node, None]
    outputs: list[tuple[int, Node]]


class _Stages:
    """Lays out the stages: what runs before the passes of each, and which pass each target belongs to."""

    def __init__(self, roots: Sequence[Node], nodes: Sequence[Node], layout: _Layout) -> None:
        count = max(layout.ready.values(), default=0) + 1
        self._layout = layout
        self._before: list[list[MergeNode | DeferredCall]] = [[] for _ in range(count)]
        self._targets = [{key: _Targets([], {}, []) for key in PASS_ORDER} for _ in range(count)]
        for node in nodes:
            if isinstance(node, MergeNode) and isinstance(node.method, Reduction):
                self._add_reduction(node)
            elif isinstance(node, MergeNode | DeferredCall) and layout.extents[node] is not Extent.TILE:
                self._add_before(node)
        for number, root in enumerate(roots):
            if layout.extents[root] is not Extent.SMALL:
                self._bucket(layout.ready[root], root).outputs.append((number, root))

    def build(self) -> tuple[Stage, ...]:
        """The stages in order, each with the passes that have a target."""
        needed = {key: _Needed(self._layout.extents) for key in PASS_ORDER}
        return tuple(
            Stage(
                tuple(before),
                tuple(self._pass(key, of[key], needed[key]) for key in PASS_ORDER if any(of[key])),
            )
            for before, of in zip(self._before, self._targets, strict=True)
        )

    def _pass(self, key: PassKey, of: _Targets, needed: _Needed) -> Pass:
        """The pass of a key for its targets."""
        reduced = [child for node, _ in of.reductions for child in node.children]
        targets = (*reduced, *of.kept, *(root for _, root in of.outputs))
        needed.move_to(targets)
        return Pass(
            by_rows=key.by_rows,
            reductions=tuple(of.reductions),
            kept=tuple(of.kept),
            outputs=tuple(of.outputs),
            sampled=key.sampled,
            targets=targets,
            size=needed.size,
            models=needed.models,
            extents=self._layout.extents,
        )

    def _add_reduction(self, node: MergeNode) -> None:
        """Add the rounds of a reduction, each to its stage."""
        first = self._layout.first_stage(node)
        for stage in range(first, self._layout.ready[node]):
            sampled = self._layout.takes_sample(node, stage - first)
            targets = self._bucket(stage, node, *node.children, sampled=sampled)
            targets.reductions.append((node, stage - first))

    def _add_before(self, node: MergeNode | DeferredCall) -> None:
        """Add a value that can be computed once the stage before has ended, and the tiles it needs entire."""
        stage = self._layout.ready[node]
        self._before[stage].append(node)
        if self._layout.extents[node] is not Extent.SMALL:
            for child in node.children:
                if self._layout.extents[child] is Extent.TILE:
                    self._bucket(stage - 1, child).kept[child] = None

    def _bucket(self, stage: int, *targets: Node, sampled: bool = False) -> _Targets:
        """The targets of the pass that some targets belong to."""
        return self._targets[stage][PassKey(sampled, not self._layout.by_rows.isdisjoint(targets))]


class _Needed:
    """The values of each tile that the targets of a pass need, found from those of the pass before.

    Attributes:
        models: the inputs among them, in the order of the graph.
    """

    def __init__(self, extents: Mapping[Node, Extent]) -> None:
        self._extents = extents
        self._inputs = [node for node in extents if isinstance(node, ModelNode)]
        self._targets: Sequence[Node] = ()
        self._users: dict[Node, int] = {}  # of each value, a target being a user of its own
        self.models: tuple[ModelNode, ...] = ()

    @property
    def size(self) -> int:
        """How many values there are."""
        return len(self._users)

    def move_to(self, targets: Sequence[Node]) -> None:
        """Go on to the next pass: only what the two passes do not share is walked through."""
        if self._change(targets, 1) | self._change(self._targets, -1):
            self.models = tuple(model for model in self._inputs if model in self._users)
        self._targets = targets

    def _change(self, targets: Iterable[Node], by: int) -> bool:
        """Add users of some targets, or take them away; whether a model has come or gone."""
        changed, stack = False, [*targets]
        while stack:
            node = stack.pop()
            if self._extents[node] is Extent.SMALL:
                continue
            before = self._users.pop(node, 0)
            if after := before + by:
                self._users[node] = after
            if not (before and after):
                changed = changed or isinstance(node, ModelNode)
                stack += node.children if self._extents[node] is Extent.TILE else ()
        return changed


def has_rows(node: Node) -> bool:
    """Whether a node is computed of whole rows."""
    return isinstance(node, MergeNode) and node.method.columns is not None
