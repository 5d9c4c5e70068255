"""What a search gained over those of its trials that were drawn at random."""

from __future__ import annotations

from collections.abc import Container, Sequence

from mecha_exp.errors import counted
from mecha_exp.report.results import Results
from mecha_exp.report.settings import Setting
from mecha_exp.verdict import Comparison

NOT_RUN = "A random search of as many trials was not run."


def gain_note(results: Results) -> str | None:
    """A sentence on the gain, and on whether it is more than chance; None without both kinds of trials.

    The points with which the search began, known or enqueued, are of neither kind.
    """
    ranked = [s for s in results.ranked if s.estimate(results.metric).count]
    given = [s for s in ranked if _has_one_of(s, results.given)]
    at_random = [s for s in ranked if _has_one_of(s, results.at_random)]
    chosen = [s for s in ranked if s not in given and s not in at_random]
    if not at_random or not chosen or results.best_setting is None:
        return None
    first, best, count = results.best_setting, at_random[0], len(at_random)
    if first not in chosen:
        origin = "that were drawn at random" if first in at_random else "with which the search began"
        among = count if first in at_random else len(given)
        return (
            f"The best trial is one of the {among} {origin}: the {len(chosen)} that the sampler chose gained "
            "nothing over them."
        )
    gain = abs(first.estimate(results.metric).mean - best.estimate(results.metric).mean)
    what = (
        f"The best of the {counted(len(chosen), 'trial')} that the sampler chose is better by {gain:.4g} "
        f"{results.metric} than the best of the {count} that were drawn at random"
    )
    left_out = " Trials that were dropped are left out." if results.dropped else ""
    return f"{what}{_certainty(results, first, best)}{left_out} {NOT_RUN}"


def _has_one_of(setting: Setting, points: Container[int]) -> bool:
    return any(id(record) in points for record in setting.records)


def _certainty(results: Results, first: Setting, best: Setting) -> str:
    """Whether two settings can be told apart, by the comparison that the verdict has."""
    compared = _comparison(results.verdict.comparisons if results.verdict else (), first.name, best.name)
    if compared is None:
        return "; with one number a point, nothing tells whether that is chance."
    low, high = sorted((-compared.difference.low, -compared.difference.high))
    if results.minimized:
        low, high = -high, -low
    numbers = (
        f"on '{compared.split}', 95 % interval {low:.4g} to {high:.4g}, p = {compared.p_holm:.2g} after Holm"
    )
    if compared.distinguishable and high > 0:
        return f" ({numbers}), which is more than chance among the examples."
    if compared.distinguishable:
        return f" ({numbers}): there it is worse, by more than chance among the examples."
    return f" ({numbers}), which cannot be told from chance."


def _comparison(comparisons: Sequence[Comparison], first: str, best: str) -> Comparison | None:
    return next((c for c in comparisons if (c.point, c.against) == (best, first)), None)
