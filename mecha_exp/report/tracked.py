"""The numbers of a sweep that a tracking store has beside those of its points."""

from __future__ import annotations

import math
from pathlib import Path

from mecha_exp.report.adaptive_records import losses_by_step
from mecha_exp.report.intervals import prefix
from mecha_exp.report.results import Results
from mecha_exp.report.search.notes import MODE as SEARCH
from mecha_exp.report.search.progress import best_so_far, trials_of


def reported_numbers(results: Results) -> dict[str, float]:
    """The reported number of the chosen setting with its interval, and the p-value against the base.

    `test/accuracy`, `test/accuracy/ci95_low`, `test/accuracy/ci95_high` and `p_holm/base`, or as the metric,
    the split and the base are called; none where nothing was concluded.
    """
    verdict = results.verdict
    if verdict is None or verdict.selected is None:
        return {}
    name = f"{prefix(results, verdict.reported_on)}{verdict.metric}"
    low, high = verdict.selected.overall.ci95
    numbers = {name: verdict.selected.overall.value, f"{name}/ci95_low": low, f"{name}/ci95_high": high}
    compared = verdict.against(verdict.base) if verdict.base is not None else ()
    numbers |= {f"p_holm/{c.against}": c.p_holm for c in compared if c.point == verdict.selected.point}
    return {metric: value for metric, value in numbers.items() if math.isfinite(value)}


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
