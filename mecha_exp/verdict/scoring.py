"""Scores and differences of a panel's settings with their intervals, from one resampling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mecha_exp.verdict.candidates import Direction
from mecha_exp.verdict.intervals import (
    CONFIDENCE,
    Estimate,
    Resampling,
    estimates,
    macro_bounds,
    over_replicates,
    percentile_bounds,
    replicate_squares,
    student_quantile,
    task_bounds,
    unseen,
    uses_wilson,
)
from mecha_exp.verdict.normalisation import Normalised, shares_of_expert
from mecha_exp.verdict.paired_tests import squared_errors
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
        draws, means = panel.by_setting(drawn), panel.by_setting(task.means)
        bounds = task_bounds(panel, name, draws)
        tasks[name] = estimates(means, bounds)
        parts.append((means, bounds, task.binary))
        overall += draws / count
        if experts:
            drawn_shares = shares_of_expert(panel, drawn, experts[name])
            normalised += panel.by_setting(drawn_shares) / count
            shares[name] = shares_of_expert(panel, task.means, experts[name])
    if count > 1:
        bounds = macro_bounds(panel, overall, parts)
    differences = _differences(panel, pairs, overall)
    by_setting = _normalised(panel, shares, normalised, experts) if experts else None
    return Measured(estimates(panel.scores, bounds), tasks, by_setting, differences)


def counting_choice(
    panel: Panel, place: int, alone: Estimate, *, candidates: int, direction: Direction, same_data: bool
) -> Estimate:
    """The interval of a setting that is the best of many, wide enough on the side that the choice flatters.

    There the quantiles are those of 2.5 % over the number of candidates (Bonferroni), so that the bound holds
    for all of them at once and with that for the best: of the replicates in any case, since a setting may be
    the best by luck of its seeds, and of the examples where these are the ones of the choice.

    Args:
        panel: of the reported data.
        place: of the setting.
        alone: its estimate as if it were the only one.
        candidates: that could have been chosen.
        direction: of the metric.
        same_data: whether the examples are those of the choice.
    """
    level, p = 1 - CONFIDENCE, (1 - CONFIDENCE) / candidates
    alone_squares, squares = (
        float(replicate_squares(panel, panel.column_scores, q)[place]) for q in (level, p)
    )
    factor = 1.0
    if same_data:
        exact = len(panel.tasks) == 1 and uses_wilson(panel, next(iter(panel.tasks)))
        clusters = panel.effective_clusters - len(np.unique(panel.strata))
        freedom = math.inf if exact else max(clusters, 1.0)
        factor = float(student_quantile(freedom, p) / student_quantile(freedom, level))
    flattered = alone.value - alone.low if direction == "maximize" else alone.high - alone.value
    half = math.sqrt(max(flattered**2 - alone_squares, 0.0) * factor**2 + squares)
    if direction == "maximize":
        low = alone.value - half
        return Estimate(alone.value, max(low, 0.0) if panel.binary else low, alone.high)
    high = alone.value + half
    return Estimate(alone.value, alone.low, min(high, 1.0) if panel.binary else high)


def _differences(panel: Panel, pairs: Integers, draws: Floats) -> list[Estimate]:
    """Paired differences; where 0/1 outcomes agree everywhere, as wide as unseen disagreements demand."""
    first, second = panel.scores[pairs[:, 0]], panel.scores[pairs[:, 1]]
    gains = first - second
    only_rounded = np.isclose(first, second, rtol=1e-12, atol=0)
    low, high = np.empty(len(pairs)), np.empty(len(pairs))
    for start in range(0, len(pairs), _PAIRS):
        part = pairs[start : start + _PAIRS]
        rows = slice(start, start + _PAIRS)
        bounds = percentile_bounds(draws[:, part[:, 0]] - draws[:, part[:, 1]], gains[rows], panel)
        low[rows], high[rows] = over_replicates(bounds, gains[rows], _squares(panel, part))
    same = np.array([_agree(panel, int(one), int(other)) for one, other in pairs], dtype=bool)
    rest = float(np.mean([unseen(len(task.sizes)) for task in panel.tasks.values()])) if panel.binary else 0.0
    values = np.where(same | only_rounded, 0.0, gains)
    return estimates(values, (np.where(same, -rest, low), np.where(same, rest, high)))


def _squares(panel: Panel, pairs: Integers) -> Floats:
    """The sum of t^2 times the squared errors over replicates of each difference, [comparisons]."""
    squares = np.zeros(len(pairs))
    for number, (one, other) in enumerate(pairs if panel.replicated else ()):
        errors, freedom = squared_errors(panel, int(one), int(other))
        squares[number] = float((student_quantile(freedom[1:]) ** 2 * errors[1:]).sum())
    return squares


def _agree(panel: Panel, one: int, other: int) -> bool:
    """Whether two settings have the same outcomes in all clusters."""
    return bool((panel.contributions[:, one] == panel.contributions[:, other]).all())


def _normalised(
    panel: Panel, shares: Mapping[str, Floats], draws: Floats, experts: Mapping[str, int]
) -> list[Normalised]:
    """Normalised scores with intervals; experts vary with the examples as well."""
    usable = draws[~np.isnan(draws).any(axis=1)]
    columns = np.mean(list(shares.values()), axis=0)
    overall = panel.by_setting(columns)
    bounds = (np.full_like(overall, np.nan),) * 2
    if len(usable):
        bounds = percentile_bounds(usable, overall, panel)
        bounds = over_replicates(bounds, overall, replicate_squares(panel, columns))
    names = {task: panel.names[place] for task, place in experts.items()}
    by_task = {task: panel.by_setting(share) for task, share in shares.items()}
    return [
        Normalised(estimate, {task: float(share[place]) for task, share in by_task.items()}, names)
        for place, estimate in enumerate(estimates(overall, bounds))
    ]
