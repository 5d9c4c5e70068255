"""The verdict where each model has one number: a choice, and no test."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from mecha_exp.verdict import sentences
from mecha_exp.verdict.candidates import Candidate, Direction
from mecha_exp.verdict.choice import best
from mecha_exp.verdict.intervals import student
from mecha_exp.verdict.result import Cost, Score, Verdict


def verdict_of_numbers(
    points: Sequence[Candidate],
    inputs: Sequence[Candidate],
    metric: str,
    direction: Direction,
    splits: Sequence[str],
) -> Verdict:
    """The best point by its number, with an interval over replicates where it has several, and no comparison.

    Arguments as for `conclude`.
    """
    measured = {split for point in points for split in point.numbers}
    available = [split for split in splits if split in measured] or sorted(measured) or list(splits[:1])
    selected_on, reported_on = available[0], available[min(1, len(available) - 1)]
    both = dict.fromkeys((selected_on, reported_on))
    scores = [score for split in both for score in _scores((*points, *inputs), split)]
    sweep = {point.name for point in points}
    finite = [s for s in scores if math.isfinite(s.overall.value)]
    eligible = [s for s in finite if s.split == selected_on and s.point in sweep]
    unusable: dict[str, list[str]] = {}
    for score in scores:
        if not math.isfinite(score.overall.value):
            unusable.setdefault(score.split, []).append(score.point)
    notes = sentences.limits_of_numbers(points, selected_on, [s.point for s in eligible], unusable)
    if not eligible:
        return Verdict(metric, direction, selected_on, reported_on, notes=notes)
    first = eligible[best(np.array([s.overall.value for s in eligible]), direction)]
    again = [s for s in finite if (s.point, s.split) == (first.point, reported_on)]
    shown = again[0] if again else first
    gap = first.overall.value - shown.overall.value if shown.split != selected_on else None
    cost = Cost(len(eligible), first.overall.value, gap)
    return Verdict(
        metric,
        direction,
        selected_on,
        shown.split,
        shown,
        cost,
        tuple(scores),
        notes=notes,
        covers=("replicates",) if shown.replicates > 1 else (),
    )


def _scores(candidates: Sequence[Candidate], split: str) -> Iterator[Score]:
    """The means over replicates of all settings and inputs that have a number on a split."""
    groups: dict[str, list[float]] = {}
    for candidate in candidates:
        if split in candidate.numbers:
            groups.setdefault(candidate.name, []).append(float(candidate.numbers[split]))
    recipes = {candidate.name: candidate.recipe for candidate in candidates}
    for name, values in groups.items():
        overall = student(np.array(values, dtype=np.float64))
        yield Score(name, recipes[name], split, overall, {}, replicates=len(values))
