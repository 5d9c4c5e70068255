"""The context of a running merge, which its workers share."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from mecha_exp.engine.planner.keys.key_plan import KeyPlan
from mecha_exp.engine.planner.plan import Plan
from mecha_exp.engine.residence import Residence
from mecha_exp.engine.runtime.kernels import Kernels
from mecha_exp.engine.sinks import Sink
from mecha_exp.engine.spill import Spill
from mecha_exp.graph.nodes import ModelNode, Node
from mecha_exp.method_api.state_dict import Tile

Progress = Callable[[str, int], None]
"""Called with the key and the number of bytes read, after each tile."""


@dataclass
class MergeStats:
    """The counts of a running merge, which its workers share.

    Attributes:
        nonfinite: of each job and key the number of values of the output that are NaN or infinite.
        peaks: of each job and key the largest magnitude so far, where an input's dtype goes lower than the
            output's.
        disagreeing: copied keys of which the inputs hold different bytes.
        moments: of each job and input the `moments` of each key.
        errors: of each job that quantises the `moments` of what is stored and what was merged, by key.
        resumed: the keys that an interrupted run had finished.
        found_model_values: whether the trips were made that find numbers of the whole model.
    """

    nonfinite: dict[tuple[int, str], int] = field(default_factory=dict)
    peaks: dict[tuple[int, str], float] = field(default_factory=dict)
    disagreeing: list[str] = field(default_factory=list)
    moments: dict[tuple[int, ModelNode], dict[str, torch.Tensor]] = field(default_factory=dict)
    errors: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    resumed: list[KeyPlan] = field(default_factory=list)
    found_model_values: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    _moments_of_experts: dict[tuple[int, ModelNode, str], dict[int, torch.Tensor]] = field(
        default_factory=dict
    )

    def add_peak(self, job: int, key: str, peak: float) -> None:
        """Take the largest magnitude in a part of a key into account; that of NaN is infinite."""
        with self.lock:
            known = self.peaks.get((job, key), 0.0)
            self.peaks[job, key] = max(known, peak if peak < math.inf else math.inf)

    def add_moments(self, job: int, model: ModelNode, key: KeyPlan, part: Tile, values: torch.Tensor) -> None:
        """Record the `moments` of a part of a key; those of all experts are added up, in their order."""
        if key.experts is not None and part.expert is not None:
            by_expert = self._moments_of_experts.setdefault((job, model, key.key), {})
            by_expert[part.expert] = values
            if len(by_expert) < key.experts:
                return
            del self._moments_of_experts[job, model, key.key]
            values = torch.stack([by_expert[expert] for expert in range(key.experts)]).sum(0)
        self.moments.setdefault((job, model), {})[key.key] = values


@dataclass(frozen=True)
class MergeContext:
    """The plan, outputs and kernels of a running merge.

    Attributes:
        model_values: the numbers of the whole model that have been found.
        factors: those that the trips have found, by what `ComputeKey` names them.
        residence: what passes over a key have left on the device for those after them.
    """

    plan: Plan
    sinks: Mapping[int, Sink]
    stats: MergeStats
    progress: Progress
    kernels: Kernels
    factors: Spill
    residence: Residence
    model_values: dict[Node, torch.Tensor] = field(default_factory=dict)
