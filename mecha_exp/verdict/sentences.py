"""The words of a verdict: a sentence that concludes, and a sentence for each thing that limits it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from mecha_exp.errors import counted
from mecha_exp.verdict.candidates import Candidate, Direction, listed, not_compared
from mecha_exp.verdict.panel import Integers, Panel
from mecha_exp.verdict.result import Comparison, Score, Verdict

ONE_NUMBER = "One number a point: nothing here tells whether differences are chance."
_FEW_CLUSTERS = 20
_FEW_REPLICATES = 5


def sentence(verdict: Verdict) -> str:
    """The conclusion in one sentence: what was chosen, how good it is, and what it can be told from.

    It says less where the data say less: without outcomes by example it ends with `ONE_NUMBER`.
    """
    selected, cost = verdict.selected, verdict.cost
    if selected is None or cost is None:
        return verdict.notes[-1] if verdict.notes else "There is nothing to conclude."
    choice = f"'{selected.point}' has {verdict.metric} {_number(selected.overall.value)}"
    choice += f" on '{verdict.reported_on}'{_interval(verdict)}"
    if cost.candidates > 1:
        same = verdict.selected_on == verdict.reported_on
        where = "the same data" if same else f"'{verdict.selected_on}'"
        choice += f", the best of {cost.candidates} settings on {where}"
    if ONE_NUMBER in verdict.notes:
        return f"{choice}; {ONE_NUMBER[0].lower()}{ONE_NUMBER[1:]}"
    parts = [choice, *_base(verdict), *_ties(verdict), *_resolution(verdict)]
    return "; ".join(parts) + "."


def _interval(verdict: Verdict) -> str:
    """The interval of the estimate, and what it covers."""
    assert verdict.selected is not None
    estimate, replicates = verdict.selected.overall, verdict.selected.replicates
    if math.isnan(estimate.low):
        return ""
    parts = []
    if verdict.examples:
        parts.append(counted(verdict.examples, "example"))
    if 0 < verdict.clusters < verdict.examples:
        parts.append(counted(verdict.clusters, "cluster"))
    if replicates > 1:
        parts.append(counted(replicates, "replicate"))
    bounds = f"95 % interval {_number(estimate.low)} to {_number(estimate.high)}"
    return f" ({bounds} over {', '.join(parts)}{_sources(verdict.selected)})"


def _sources(selected: Score) -> str:
    """What the width of the interval comes from, where that is more than the examples."""
    if len(selected.variance) < 2:
        return ""
    shares = [f"{100 * share:.0f} % from {source}" for source, share in selected.variance.items()]
    return f"; variance: {', '.join(shares)}"


def _base(verdict: Verdict) -> list[str]:
    """The chosen point against the base."""
    assert verdict.selected is not None
    for comparison in verdict.against(verdict.base) if verdict.base is not None else ():
        if comparison.point == verdict.selected.point:
            if not comparison.distinguishable:
                difference = _difference(comparison)
                return [f"it cannot be told from '{comparison.against}' (difference {difference})"]
            is_above = comparison.difference.value > 0
            better = is_above == (verdict.direction == "maximize")
            amount = _difference(comparison, 1 if is_above else -1)
            return [f"it is {'better' if better else 'worse'} than '{comparison.against}' by {amount}"]
    return []


def _ties(verdict: Verdict) -> list[str]:
    """How many settings can be told from the chosen one, and whether one is better."""
    assert verdict.selected is not None
    sign = 1 if verdict.direction == "maximize" else -1
    against = verdict.against(verdict.selected.point)
    if not against:
        return []
    distinct = [comparison for comparison in against if comparison.distinguishable]
    better = [comparison.point for comparison in distinct if sign * comparison.difference.value > 0]
    compared = "the one setting" if len(against) == 1 else f"the {len(against)} settings"
    if not distinct:
        which = f"any of {compared}" if len(against) > 1 else compared
        return [f"the data show no difference from {which} compared with it"]
    share = f"{len(distinct)} of " if verdict.tied else "all of " if len(distinct) > 1 else ""
    parts = [f"the data show a difference from {share}{compared} compared with it"]
    if verdict.tied:
        parts.append(f"not from the other {len(verdict.tied)}")
    if better:
        parts.append(f"{listed(better)} {'is' if len(better) == 1 else 'are'} better than it")
    return [", ".join(parts)]


def _resolution(verdict: Verdict) -> list[str]:
    """The smallest difference that such data show."""
    smallest = verdict.cost.minimum_detectable_difference if verdict.cost else None
    return [] if smallest is None else [f"differences below {_number(smallest)} would often be missed"]


def _difference(comparison: Comparison, sign: int = 1) -> str:
    """A difference times a sign, with its interval and its p-value."""
    estimate = comparison.difference
    low, high = sorted((sign * estimate.low, sign * estimate.high))
    bounds = f"{_number(low)} to {_number(high)}"
    return f"{_number(sign * estimate.value)} ({bounds}, p = {comparison.p_holm:.2g} after Holm)"


def limits(panel: Panel, eligible: Integers, direction: Direction, split: str) -> list[str]:
    """What limits the choice: too few candidates, or candidates that are all equal."""
    if len(eligible) == 1:
        return ["One candidate: nothing was chosen, and nothing is compared with it."]
    parts, scores = panel.contributions[:, eligible], panel.scores[eligible]
    if (parts == parts[:, :1]).all():
        return [
            f"All {len(eligible)} candidates have equal outcomes on '{split}': the first stands for them."
        ]
    top = scores.max() if direction == "maximize" else scores.min()
    ties = [
        panel.names[place] for place in eligible[np.abs(scores - top) <= 1e-12 * max(1.0, abs(float(top)))]
    ]
    if len(ties) > 1:
        return [f"{listed(ties)} have the same best score on '{split}': the first of them is chosen."]
    return []


def limits_of_report(panel: Panel, split: str, base: str | None, *, separate: bool) -> list[str]:
    """What limits the reported numbers: data that were used for the choice, few examples, few replicates."""
    notes = []
    if not separate:
        notes.append(
            f"Chosen and reported on the same data ('{split}'): the estimate of the best is too good."
        )
    if panel.clusters == 1:
        what = "One example" if panel.examples == 1 else "One cluster of examples"
        notes.append(f"{what} on '{split}': nothing can be told apart.")
    elif panel.clusters < _FEW_CLUSTERS:
        count = panel.clusters
        notes.append(f"Bootstrap intervals over {count} independent examples on '{split}' are too short.")
    counts = panel.counts[panel.counts > 1]
    if len(counts) and counts.min() < _FEW_REPLICATES:
        notes.append(f"With {int(counts.min())} replicates, their part of the intervals is a rough estimate.")
    if base is not None and base not in panel.names:
        notes.append(
            f"The base '{base}' has no outcomes to compare on '{split}': no point is compared with it."
        )
    return notes


def limits_of_numbers(
    points: Sequence[Candidate], split: str, usable: Sequence[str], unusable: Mapping[str, Sequence[str]]
) -> tuple[str, ...]:
    """What limits a verdict from one number for each model.

    Args:
        points: of the sweep.
        split: on which one is chosen.
        usable: the points that can be chosen.
        unusable: by split the points and inputs whose number there is not finite.
    """
    notes = []
    missing = [point.name for point in points if split not in point.numbers]
    if missing:
        notes.append(not_compared(missing, f"has no number on the split '{split}'"))
    notes += [
        not_compared(bad, f"has a number that is not finite on '{place}'") for place, bad in unusable.items()
    ]
    if not usable:
        notes.append(f"Nothing was chosen: no point has a number on '{split}'.")
    if len(usable) == 1:
        notes.append("One candidate: nothing was chosen, and nothing is compared with it.")
    if len(points) > len({point.name for point in points}):
        notes.append("Intervals cover replicates alone.")
    notes.append(ONE_NUMBER)
    return tuple(notes)


def _number(value: float) -> str:
    """Four significant digits at most.

    >>> _number(0.886)
    '0.886'
    """
    return f"{value:.4g}"
