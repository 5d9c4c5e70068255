"""Finds the numbers of the whole model, in trips over all keys before the pass that makes the outputs.

A trip is a run of the scheduler whose keys write nothing. What a key adds to a sum is added up within the
key as for any reduction, and the sums of the keys in the order of the plan. The entry of a rank has one
accumulator for all keys, whose counts and candidates come in any order: a sample tells a bracket, and the
trip over all data finds the entry in it. Only where it is not there, or where too many entries are equal, is
a trip made again (see `order_statistic`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from mecha_exp.engine.devices import CPU
from mecha_exp.engine.ir.model_values import ModelValue
from mecha_exp.engine.ir.order_statistic import Span, in_whole_blocks, sample_of_model
from mecha_exp.engine.ir.program import Pass
from mecha_exp.engine.ir.reductions import (
    Accumulator,
    RankedOverKeys,
    SumsOfKey,
    folded,
    is_known,
    is_ranked,
)
from mecha_exp.engine.ir.stacked_keys import sums_of_rows
from mecha_exp.engine.planner.keys.key_plan import KeyPlan, Trip
from mecha_exp.engine.runtime.buffers import Scratch
from mecha_exp.engine.runtime.context import MergeContext
from mecha_exp.engine.runtime.key_tasks import ComputeKey
from mecha_exp.engine.runtime.scheduler import KeyTask, Scheduler
from mecha_exp.engine.runtime.small_keys import ComputeTogether, in_groups
from mecha_exp.errors import MergeError
from mecha_exp.graph.nodes import MergeNode, ModelNode, Node


def find_model_values(context: MergeContext) -> None:
    """Make the trips of a plan, in order, and put the numbers that they find into the context.

    Raises:
        MergeError: a sum that is not finite; or as `execute`.
    """
    for trip in context.plan.trips:
        context.model_values.update(_TripRun(trip, context).run())
    context.stats.found_model_values = True


class _TripRun:
    """One trip, which is made again as long as an entry of a rank is not found."""

    def __init__(self, trip: Trip, context: MergeContext) -> None:
        self._trip = trip
        self._context = context
        self._quiet = replace(context, progress=lambda key, nbytes: None)
        self._states: dict[Node, torch.Tensor] = {}
        self._totals: dict[Node, dict[str, torch.Tensor]] = {}
        programs = [key.program for key in trip.keys if key.program is not None]
        self._calls = {node: call for program in programs for node, call in program.calls.items()}
        by_width = sorted(programs, key=lambda program: program.dtype.itemsize)
        self._dtypes = {root: program.dtype for program in by_width for root in program.roots}

    def run(self) -> Mapping[Node, torch.Tensor]:
        """The value of each number."""
        ranked = [value for value in self._trip.values if is_ranked(value.call)]
        if self._trip.sample:
            spans = sample_of_model([key.numel for key in self._trip.sample])
            sampled = [(key, s) for key, s in zip(self._trip.sample, spans, strict=True) if s]
            self._go(sampled, ranked, self._quiet)
        self._go([(key, []) for key in self._trip.keys], ranked, self._context)
        while not all(is_known(value.call, self._states[value.call]) for value in ranked):
            self._go([(key, []) for key in self._trip.again], ranked, self._quiet)
        return {value: self._value(value).to(torch.float64) for value in self._trip.values}

    def _go(
        self,
        keys: Sequence[tuple[KeyPlan, list[Span]]],
        ranked: Sequence[ModelValue],
        context: MergeContext,
    ) -> None:
        """Go through keys, or through parts of them, and draw conclusions about the entries of a rank."""
        shared: dict[Node, RankedOverKeys] = {value.call: self._open(value) for value in ranked}
        tally = _Tally(shared, self._states, self._totals)
        large = (_CountedKey(*key, context, tally) for key in keys if not key[0].structure.is_small)
        small = self._small([key for key in keys if key[0].structure.is_small], context, tally)
        Scheduler(large, small, context.plan.options, lambda key: None).run()
        for node, accumulator in shared.items():
            self._states[node] = accumulator.conclude(self._calls[node].hyperparameters)

    def _small(
        self, keys: Sequence[tuple[KeyPlan, list[Span]]], context: MergeContext, tally: _Tally
    ) -> Iterator[KeyTask]:
        """The tasks of small keys: those of one kind together, and those of a sample one by one."""
        spans = {key.key: of_key for key, of_key in keys}
        if any(spans.values()):
            groups: Iterable[list[KeyPlan]] = ([key] for key, _ in keys)
        else:
            counts = Counter(key.structure for key, _ in keys)
            groups = in_groups((key for key, _ in keys), counts, context.plan.options)
        for group in groups:
            if len(group) == 1:
                yield _CountedKey(group[0], spans[group[0].key], context, tally)
            else:
                yield _CountedKeys(group, context, tally)

    def _open(self, value: ModelValue) -> RankedOverKeys:
        count, state = self._trip.counts[value], self._states.get(value.call)
        return RankedOverKeys(value.call, state, count, 1, self._dtypes[value.call])

    def _value(self, value: ModelValue) -> torch.Tensor:
        node = value.call
        if node in self._states:
            return self._states[node]
        by_key = self._totals[node]
        in_order = [by_key[key.key] for key in self._trip.keys if key.key in by_key]
        total = torch.from_numpy(np.asarray(folded(torch.stack(in_order).numpy())))
        if not bool(total.isfinite().all()):
            raise self._not_finite(value, by_key)
        if value.method.finish is None:
            return total
        hyperparameters: dict[str, Any] = self._calls[node].hyperparameters
        count, dtype = self._trip.counts[value], self._dtypes[node]
        return value.method.finish(total, state=None, count=count, dtype=dtype, **hyperparameters)

    def _not_finite(self, value: ModelValue, by_key: Mapping[str, torch.Tensor]) -> MergeError:
        wrong = [key.key for key in self._trip.keys if not bool(by_key[key.key].isfinite().all())]
        where = f"the key '{wrong[0]}' adds a value that is not" if wrong else "the sum over the keys is not"
        return MergeError(
            f"{value.method.identifier}: the number of the whole model is not finite: {where}, and every key "
            "of the output would be lost. Mend that key, or leave it out with on_nonfinite=skip."
        )


@dataclass(frozen=True)
class _Tally:
    """Where the keys of a trip add what they have.

    Attributes:
        shared: the accumulators of ranks.
        states: what earlier trips have left.
        totals: the sums of each key.
    """

    shared: Mapping[Node, RankedOverKeys]
    states: Mapping[Node, torch.Tensor]
    totals: dict[Node, dict[str, torch.Tensor]]
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, root: Node, key: str, total: torch.Tensor) -> None:
        """Add the sum of a key."""
        with self._lock:
            self.totals.setdefault(root, {})[key] = total


class _CountedKey(ComputeKey):
    """A key that adds to numbers of the whole model, or some spans of it."""

    is_of_trip = True

    def __init__(self, key: KeyPlan, spans: Sequence[Span], context: MergeContext, tally: _Tally) -> None:
        super().__init__(key, key.parts[0], context)  # a trip takes a stack of experts as a whole
        self._tally, self._spans = tally, spans
        roots = self._program.roots
        self._values.update({root: tally.states[root] for root in roots if root in tally.states})

    def _read_again(self) -> frozenset[ModelNode]:
        """All inputs: more trips, or the pass, will come to the key."""
        return frozenset() if self._device == CPU else frozenset(self._program.models)

    def _leave(self) -> None:
        """What lies on the device stays there for them."""

    def _accumulator(self, node: MergeNode, block: int) -> Accumulator:
        if node in self._tally.shared:
            return self._tally.shared[node]
        if node in self._program.roots:
            return SumsOfKey(node, None, self._key.numel, block)
        return super()._accumulator(node, block)

    def _sampled_spans(self, pass_: Pass) -> list[Span]:
        is_of_model = any(node in self._tally.shared for node, _ in pass_.reductions)
        if not pass_.sampled or not is_of_model:
            return super()._sampled_spans(pass_)
        return in_whole_blocks(self._spans, self._key.numel, pass_.columns(self._key.shape))

    def _collect(self) -> None:
        for root in self._program.roots:
            if root not in self._tally.shared:
                self._tally.add(root, self._key.key, self._values[root])


class _CountedKeys(ComputeTogether):
    """Small keys that add to numbers of the whole model."""

    def __init__(self, keys: Sequence[KeyPlan], context: MergeContext, tally: _Tally) -> None:
        super().__init__(keys, context)
        self._tally = tally

    def _alone(self, key: KeyPlan) -> Sequence[KeyTask]:
        return [_CountedKey(key, [], self._context, self._tally)]

    def _compute(self, scratch: Scratch) -> Any:
        return self._roots(scratch)

    def _put(self, results: Any) -> None:
        """Add the terms of each number."""
        assert self._structure.program is not None
        for root, terms in zip(self._structure.program.roots, results, strict=True):
            if root in self._tally.shared:
                self._tally.shared[root].add(0, [terms[0].reshape(-1)])
                continue
            for key, total in zip(self.keys, sums_of_rows(terms), strict=True):
                self._tally.add(root, key.key, total)
