"""The steps of a sweep: trials of a search in their order, the best so far, and losses of descents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from mecha_exp.report.adaptive_records import losses_by_step
from mecha_exp.report.results import Results
from mecha_exp.report.search.notes import MODE as SEARCH

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


def histories_of(results: Results, folder: Path) -> dict[str, dict[int, float]]:
    """The values by step that a sweep has: trials of a search and the best so far, losses of descents.

    Args:
        results: of the sweep.
        folder: of the sweep, with `learning.csv` where weights were learned.
    """
    histories = {
        f"loss/{name}": {step: value for step, value in enumerate(values) if math.isfinite(value)}
        for name, values in losses_by_step(folder).items()
    }
    trials = (
        trials_of(results) if results.mode == SEARCH and results.judged and not results.objectives else []
    )
    if trials:
        best = best_so_far(results, trials)
        histories[f"trial/{results.metric}"] = {number: value for number, _, value in trials}
        histories[f"best_so_far/{results.metric}"] = {
            trial[0]: found[2] for trial, found in zip(trials, best, strict=True)
        }
    return histories
