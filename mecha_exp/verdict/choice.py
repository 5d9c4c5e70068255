"""Choosing: the best setting, what it costs to have chosen it, and the Pareto front of several metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from mecha_exp.verdict.candidates import Direction
from mecha_exp.verdict.paired_tests import FLIPS, detectable_difference
from mecha_exp.verdict.panel import Floats, Integers, Panel

LEVEL = 0.05
POWER = 0.8
FOLDS = 5
REPEATS = 10


def best(scores: Floats, direction: Direction) -> int:
    """The place of the best score; the first of those that are equal up to rounding."""
    signed = scores if direction == "maximize" else -scores
    return int(np.flatnonzero(signed >= signed.max() - 1e-12 * max(1.0, abs(float(signed.max()))))[0])


def cross_validated(
    panel: Panel,
    settings: Integers,
    direction: Direction,
    *,
    folds: int = FOLDS,
    repeats: int = REPEATS,
    seed: int = 0,
) -> float | None:
    """The score of choosing: the best of the other folds, measured on each fold in turn.

    Clusters are dealt to folds within their strata, and the score is a macro mean of the values that each
    example has for the setting that was chosen without it. None where a task has too few clusters.

    Args:
        panel: of the split on which the choice is made.
        settings: that can be chosen, by place.
        direction: of the metric.
        folds: fewer where a task has fewer clusters.
        repeats: random divisions, over which the score is averaged.
        seed: same seed, same divisions.
    """
    folds = min([folds, *(len(task.sizes) for task in panel.tasks.values())])
    if folds < 2:
        return None
    random, scores = np.random.default_rng([seed, 4]), []
    parts = {name: panel.by_setting(task.sums)[:, settings] for name, task in panel.tasks.items()}
    for _ in range(repeats):
        fold = _deal(panel.strata, folds, random)
        if any(np.ptp(fold[task.members]) == 0 for task in panel.tasks.values()):
            return None
        chosen, values = _choose_by_fold(panel, parts, fold, folds, direction)
        scores.append(sum(float(v[range(folds), chosen].sum()) for v in values) / len(values))
    return float(np.mean(scores))


def _deal(strata: Integers, folds: int, random: np.random.Generator) -> Integers:
    """A fold for each cluster: the strata are shuffled and dealt like cards, one after the other."""
    order = np.lexsort((random.random(len(strata)), strata))
    fold = np.empty(len(strata), dtype=np.intp)
    fold[order] = np.arange(len(strata)) % folds
    return fold


def _choose_by_fold(
    panel: Panel, parts: Mapping[str, Floats], fold: Integers, folds: int, direction: Direction
) -> tuple[list[int], list[Floats]]:
    """The setting chosen without each fold, and each task's values [folds, settings]."""
    rest, values = [], []
    for name, task in panel.tasks.items():
        member = (fold[task.members] == np.arange(folds)[:, None]).astype(np.float64)
        inside, sizes = member @ parts[name], member @ task.sizes
        values.append(inside / task.examples)
        rest.append((inside.sum(axis=0) - inside) / (task.examples - sizes)[:, None])
    return [best(row, direction) for row in np.mean(rest, axis=0)], values


def minimum_detectable_difference(
    panel: Panel, pairs: Integers, family: int, share: float = 1.0, *, flips: int = FLIPS
) -> float | None:
    """The smallest true difference that a comparison shows with 80 % power, after Holm's first step.

    The median of `detectable_difference` over the comparisons, at the level 0.05 share / m. It is infinite
    where no difference is shown so often that the metric can have: means of 0 and 1 differ by 1 at most.

    Args:
        panel: of the split on which settings are compared.
        pairs: the comparisons, [comparisons, 2]. Those without any difference do not count.
        family: the number of comparisons m of the correction.
        share: of the 5 % that this family has.
        flips: sign patterns that permutation tests draw.

    Returns:
        The difference in units of the metric, or None where no pair differs anywhere.
    """
    level = LEVEL * share / max(1, family)
    smallest = [
        detectable_difference(panel, int(i), int(j), level=level, power=POWER, flips=flips) for i, j in pairs
    ]
    smallest = [difference for difference in smallest if difference > 0]
    if not smallest:
        return None
    median = float(np.median(smallest))
    return math.inf if panel.binary and median > 1 else median


def pareto_front(
    metrics: Mapping[str, Sequence[float]], directions: Mapping[str, Direction]
) -> tuple[bool, ...]:
    """Which points are on the Pareto front: no other is as good in all metrics and better in one.

    Args:
        metrics: the values of all points, by metric. A point with NaN in a metric is never on the front.
        directions: of each metric.

    >>> pareto_front({"accuracy": [0.9, 0.8, 0.7], "loss": [0.5, 0.3, 0.4]},
    ...              {"accuracy": "maximize", "loss": "minimize"})
    (True, True, False)
    """
    signed = [
        np.asarray(values, float) * (1 if directions[name] == "maximize" else -1)
        for name, values in metrics.items()
    ]
    points = np.stack(signed, axis=1)
    front = []
    for point in points:
        beaten = (points >= point).all(axis=1) & (points > point).any(axis=1)
        front.append(not np.isnan(point).any() and not bool(beaten.any()))
    return tuple(front)
