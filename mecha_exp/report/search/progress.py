"""The trials of a search in their order, and the best so far."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mecha_exp.report.results import Results

Trial = tuple[int, str, float]
"""A trial: its place among the settings, its name, and the mean of the main metric."""


def trials_of(results: Results) -> list[Trial]:
    """The settings with a finite main metric, in the order in which they were tried."""
    values = {s.name: s.estimate(results.metric).mean for s in results.settings}
    return [(n, name, value) for n, (name, value) in enumerate(values.items()) if math.isfinite(value)]


def best_so_far(results: Results, trials: Sequence[Trial]) -> list[Trial]:
    """The best trial up to each one."""
    best = list(trials[:1])
    for trial in trials[1:]:
        is_better = trial[2] < best[-1][2] if results.minimized else trial[2] > best[-1][2]
        best.append(trial if is_better else best[-1])
    return best
