"""Scores and differences of a panel's settings with their intervals, from one resampling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mecha_exp.verdict.intervals import (
    Estimate,
    Resampling,
    estimates,
    macro_bounds,
    percentile_bounds,
    task_bounds,
    unseen,
)
from mecha_exp.verdict.normalisation import Normalised, shares_of_expert
from mecha_exp.verdict.panel import Floats, Integers, Panel
from mecha_exp.verdict.result import Score
from mecha_exp.verdict.sources import variance_sources

_PAIRS = 256


@dataclass(frozen=True)
class Measured:
    """Every setting's estimates: overall, by task, normalised; and the differences of pairs."""

    overall: list[Estimate]
    tasks: dict[str, list[Estimate]]
    normalised: list[Normalised] | None
    differences: list[Estimate]

    def scores(self, panel: Panel, recipes: Mapping[str, str | None], split: str) -> list[Score]:
        """A score for each setting of the panel."""
        return [
            Score(
                name,
                recipes[name],
                split,
                self.overall[place],
                {task: of_task[place] for task, of_task in self.tasks.items()},
                self.normalised[place] if self.normalised else None,
                len(panel.replicates[place]),
                variance_sources(panel, place),
            )
            for place, name in enumerate(panel.names)
        ]


def measure(
    panel: Panel, pairs: Integers, experts: Mapping[str, int], *, resamples: int, seed: int
) -> Measured:
    """Estimate scores and paired differences with 95 % intervals.

    Args:
        panel: of the settings and inputs.
        pairs: the differences to estimate, first less second, [comparisons, 2].
        experts: the place of each task's expert; empty where scores are not normalised.
        resamples: draws of clusters and replicates.
        seed: same seed, same intervals.
    """
    resampling, count = Resampling(panel, resamples, seed), len(panel.tasks)
    tasks, shares, parts = {}, {}, []
    overall, normalised = np.zeros((resamples, len(panel.names))), np.zeros((resamples, len(panel.names)))
    for name, task in panel.tasks.items():
        drawn = resampling.task_means(name)
        draws, means = resampling.over_replicates(drawn), panel.by_setting(task.means)
        bounds = task_bounds(panel, task, draws)
        tasks[name] = estimates(means, bounds)
        parts.append((means, bounds, task.binary))
        overall += draws / count
        if experts:
            drawn_shares = shares_of_expert(panel, drawn, experts[name])
            normalised += resampling.over_replicates(drawn_shares) / count
            shares[name] = panel.by_setting(shares_of_expert(panel, task.means, experts[name]))
    if count > 1:
        bounds = macro_bounds(overall, panel.scores, parts)
    differences = _differences(panel, pairs, overall)
    by_setting = _normalised(panel, shares, normalised, experts) if experts else None
    return Measured(estimates(panel.scores, bounds), tasks, by_setting, differences)


def _differences(panel: Panel, pairs: Integers, draws: Floats) -> list[Estimate]:
    """Paired differences; where 0/1 outcomes agree everywhere, as wide as unseen disagreements demand."""
    first, second = panel.scores[pairs[:, 0]], panel.scores[pairs[:, 1]]
    only_rounded = np.isclose(first, second, rtol=1e-12, atol=0)
    low, high = np.empty(len(pairs)), np.empty(len(pairs))
    for start in range(0, len(pairs), _PAIRS):
        part = pairs[start : start + _PAIRS]
        bounds = percentile_bounds(draws[:, part[:, 0]] - draws[:, part[:, 1]])
        low[start : start + _PAIRS], high[start : start + _PAIRS] = bounds
    same = np.array([_agree(panel, int(one), int(other)) for one, other in pairs], dtype=bool)
    rest = float(np.mean([unseen(len(task.sizes)) for task in panel.tasks.values()])) if panel.binary else 0.0
    values = np.where(same | only_rounded, 0.0, first - second)
    return estimates(values, (np.where(same, -rest, low), np.where(same, rest, high)))


def _agree(panel: Panel, one: int, other: int) -> bool:
    """Whether two settings have the same outcomes in all clusters."""
    return bool((panel.contributions[:, one] == panel.contributions[:, other]).all())


def _normalised(
    panel: Panel, shares: Mapping[str, Floats], draws: Floats, experts: Mapping[str, int]
) -> list[Normalised]:
    """Normalised scores with intervals; experts vary with the examples as well."""
    usable = draws[~np.isnan(draws).any(axis=1)]
    overall = np.mean(list(shares.values()), axis=0)
    bounds = percentile_bounds(usable) if len(usable) else (np.full_like(overall, np.nan),) * 2
    names = {task: panel.names[place] for task, place in experts.items()}
    return [
        Normalised(estimate, {task: float(share[place]) for task, share in shares.items()}, names)
        for place, estimate in enumerate(estimates(overall, (bounds[0], bounds[1])))
    ]
