"""The words of a verdict: a sentence that concludes, and a sentence for each thing that limits it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from mecha_exp.errors import counted
from mecha_exp.verdict.candidates import Candidate, Direction, listed, not_compared
from mecha_exp.verdict.comparisons import Family
from mecha_exp.verdict.paired_tests import skewness
from mecha_exp.verdict.panel import Floats, Integers, Panel
from mecha_exp.verdict.result import Comparison, Cost, Score, Verdict

ONE_NUMBER = "One number a point: nothing here tells whether differences are chance."
_FEW_CLUSTERS = 50
_FEW_REPLICATES = 5
_SKEWED = 0.2
"""The skewness of a sum of differences from which on a paired test may not hold its level."""


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
        choice += f", {_rank(cost)} on {where}"
        if same and cost.cross_validated is not None:
            choice += f" ({_number(cost.cross_validated)} cross-validated)"
    if ONE_NUMBER in verdict.notes:
        return f"{choice}; {ONE_NUMBER[0].lower()}{ONE_NUMBER[1:]}"
    parts = [choice, *_inputs(verdict), *_ties(verdict), *_resolution(verdict)]
    return "; ".join(parts) + "."


def _rank(cost: Cost) -> str:
    """What the chosen setting is the best of; after a race, of those that it left."""
    left = cost.candidates - cost.dropped
    if not cost.dropped:
        return f"the best of {cost.candidates} settings"
    place = "the one" if left == 1 else f"the best of the {left}"
    return f"{place} that a race left of {cost.candidates} settings"


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
        parts.append(counted(replicates, "new replicate" if verdict.fresh else "replicate"))
    bounds = f"95 % interval {_number(estimate.low)} to {_number(estimate.high)}"
    choice = " and the choice" if "choice" in verdict.covers else ""
    return f" ({bounds} over {', '.join(parts)}{choice}{_sources(verdict.selected)})"


def _sources(selected: Score) -> str:
    """What the width of the interval comes from, where that is more than the examples and can be told."""
    if len(selected.variance) < 2 or selected.replicates < _FEW_REPLICATES:
        return ""
    shares = [f"{100 * share:.0f} % from {source}" for source, share in selected.variance.items()]
    return f"; variance: {', '.join(shares)}"


def _inputs(verdict: Verdict) -> list[str]:
    """The chosen point against the base, and against the best input."""
    parts = []
    for name in dict.fromkeys((verdict.base, verdict.best_input)):
        what = f"'{name}'"
        if name == verdict.best_input:
            what = f"'{name}', the best input," if name == verdict.base else f"the best input '{name}'"
        parts += [_against(verdict, c, what) for c in verdict.chosen_against(name)]
    return parts


def _against(verdict: Verdict, comparison: Comparison, what: str) -> str:
    """The chosen point against an input."""
    if not comparison.distinguishable:
        return f"it cannot be told from {what.rstrip(',')} (difference {_difference(comparison)})"
    is_above = comparison.difference.value > 0
    better = is_above == (verdict.direction == "maximize")
    amount = _difference(comparison, 1 if is_above else -1)
    return f"it is {'better' if better else 'worse'} than {what} by {amount}"


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
    """The smallest differences that such data show, of each kind of comparison."""
    missed, never = [], []
    for detectable in verdict.cost.detectable if verdict.cost else ():
        kind = "between settings" if detectable.against is None else f"from '{detectable.against}'"
        if detectable.split != verdict.reported_on:
            kind += f" on '{detectable.split}'"
        if math.isfinite(detectable.difference):
            missed.append(f"{kind} below {_number(detectable.difference)}")
        else:
            never.append(kind)
    parts = [f"differences {' and '.join(missed)} would often be missed"] if missed else []
    if never:
        parts.append(f"any difference {' and '.join(never)} would often be missed")
    return parts


def _difference(comparison: Comparison, sign: int = 1) -> str:
    """A difference times a sign, with its interval, which is its own, and its corrected p-value."""
    estimate = comparison.difference
    low, high = sorted((sign * estimate.low, sign * estimate.high))
    bounds = f"{_number(low)} to {_number(high)}"
    return f"{_number(sign * estimate.value)} ({bounds} by itself, p = {comparison.p_holm:.2g} after Holm)"


def limits(
    panel: Panel, eligible: Integers, direction: Direction, split: str, *, dropped: int = 0
) -> list[str]:
    """What limits the choice: too few candidates, or candidates that are all equal."""
    if len(eligible) == 1 and dropped:
        return ["A race left one setting: it is the best of those, and is compared with no other."]
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


def limits_of_report(panel: Panel, split: str, chosen: str, base: str | None, *, separate: bool) -> list[str]:
    """What limits the reported numbers: data that were used for the choice, few examples, few replicates."""
    notes = []
    if not separate:
        notes.append(
            f"Chosen and reported on the same data ('{split}'): the estimate of the best is too good."
        )
    count, all_hits = panel.effective_clusters, panel.binary and panel.clusters == panel.examples
    if panel.clusters == 1:
        what = "One example" if panel.examples == 1 else "One cluster of examples"
        notes.append(f"{what} on '{split}': nothing can be told apart.")
    elif count < _FEW_CLUSTERS and not (all_hits and len(panel.tasks) == 1):
        notes.append(
            f"The examples on '{split}' tell as much as {count:.0f} independent ones: intervals and tests "
            "miss what is rare and large, and may be too narrow where outcomes are skewed."
        )
    elif _is_skewed(panel, panel.contributions[:, panel.index(chosen)]):
        notes.append(
            f"The outcomes of '{chosen}' are strongly skewed for so few examples: "
            "its interval may be too narrow."
        )
    counts = panel.counts[panel.counts > 1]
    if len(counts) and counts.min() < _FEW_REPLICATES:
        notes.append(
            f"With {int(counts.min())} replicates, their spread is a rough estimate: intervals are wide, and "
            "differences are seldom shown."
        )
    if base is not None and base not in panel.names:
        notes.append(
            f"The base '{base}' has no outcomes to compare on '{split}': no point is compared with it."
        )
    return notes


def limits_of_choice(chosen: str, replicates: int, *, draws: bool, several: bool) -> list[str]:
    """What limits a setting that was chosen among models that were drawn."""
    if replicates > 1 and several:
        cure = "Measure it again with new ones."
        if draws:
            cure = "sweep.fresh=5 measures it again with new ones."
        return [
            f"'{chosen}' was chosen by these {replicates} replicates, which may be lucky ones: its estimate "
            f"is too good on any split. {cure}"
        ]
    if draws and replicates == 1:
        return [
            f"'{chosen}' was drawn with one seed, and nothing here says what others give: its interval and "
            "comparisons are those of this one model. sweep.replicates=5 runs each setting with five."
        ]
    return []


def _is_skewed(panel: Panel, parts: Floats) -> bool:
    """Whether a few large parts decide the sum."""
    return abs(skewness(panel, parts)) > _SKEWED


def limits_of_tests(families: Sequence[Family], comparisons: Sequence[Comparison]) -> list[str]:
    """What limits paired tests: differences by example that are strongly skewed, in few clusters."""
    skewed = {
        family.panel.names[int(one)]
        for family in families
        for one, other in family.pairs
        if _is_skewed(family.panel, family.panel.contributions[:, one] - family.panel.contributions[:, other])
    }
    told = {comparison.point for comparison in comparisons if comparison.distinguishable}
    if not skewed:
        return []
    names = sorted(skewed & told) or sorted(skewed)
    return [
        f"The differences by example of {listed(names)} are strongly skewed for so few examples: a few large "
        "ones decide, and p-values may be too small. More examples tell."
    ]


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
