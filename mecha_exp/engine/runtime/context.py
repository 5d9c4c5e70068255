"""The context of a running merge, which its workers share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from mecha_exp.engine.planner.plan import KeyPlan, Plan
from mecha_exp.engine.runtime.kernels import Kernels
from mecha_exp.engine.sinks import Sink
from mecha_exp.graph.nodes import ModelNode

Progress = Callable[[str, int], None]
"""Called with the key and the number of bytes read, after each tile."""


@dataclass
class MergeStats:
    """What a merge has counted so far; the workers share it.

    Attributes:
        nonfinite: of each job and key the number of values of the output that are NaN or infinite.
        disagreeing: copied keys of which the inputs hold different bytes.
        moments: of each job and input the `moments` of each key.
        errors: of each job that quantises the `moments` of what is stored and what was merged, by key.
        resumed: the keys that an interrupted run had finished.
    """

    nonfinite: dict[tuple[int, str], int] = field(default_factory=dict)
    disagreeing: list[str] = field(default_factory=list)
    moments: dict[tuple[int, ModelNode], dict[str, torch.Tensor]] = field(default_factory=dict)
    errors: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    resumed: list[KeyPlan] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True)
class MergeContext:
    """The plan, outputs and kernels of a running merge."""

    plan: Plan
    sinks: Mapping[int, Sink]
    stats: MergeStats
    progress: Progress
    kernels: Kernels
