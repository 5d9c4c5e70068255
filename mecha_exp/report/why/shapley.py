"""The Shapley values of a sweep of coalitions: what each expert, or block, adds to the metric."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mecha_exp.errors import EvaluationError
from mecha_exp.report.results import Results
from mecha_exp.report.settings import Setting
from mecha_exp.report.verdict import candidates_of, inputs_of, splits_of
from mecha_exp.report.why.factors import KEYS, coalitions_of, players_of, settings_by_other_keys
from mecha_exp.runs.outcomes import ModelOutcomes

if TYPE_CHECKING:
    from mecha_exp.verdict.intervals import Estimate

MODE = "shapley"
Worth = Mapping[frozenset[str], float]


@dataclass(frozen=True)
class Attribution:
    """The Shapley values of players at one setting of the other swept keys.

    Attributes:
        setting: the values of the other keys, as in `alpha=0.3`; empty where there are none.
        kind: what the players are: `expert` or `block`.
        values: by player, the largest first. They add up to `full` less `none`. Intervals are over examples
            where all coalitions were measured, else over the sampled orders.
        none: the metric without any player.
        full: the metric with all.
        covers: what the intervals cover: `examples`, `sampled orders` or nothing.
    """

    setting: str
    kind: str
    values: Mapping[str, Estimate]
    none: float
    full: float
    covers: str


Attributions = tuple[Sequence[Attribution], Sequence[str]]
"""The Shapley values of each setting of the other keys, and a sentence for each setting that has none."""


def attributions(results: Results, models: Sequence[ModelOutcomes] = ()) -> Attributions:
    """The Shapley values of a sweep of mode `shapley`, and a sentence for each setting that has none.

    Args:
        results: of the sweep.
        models: the outcomes by example, for intervals; without them those of `results.attributed`, if any.
    """
    if results.attributed is not None and not models:
        return results.attributed
    key = next((key for key in KEYS if key in results.swept), None)
    if results.mode != MODE or not results.judged or key is None:
        return [], []
    players = players_of(results, key)
    entries, notes = [], []
    for others, settings in settings_by_other_keys(results, key).items():
        of = f" ({others})" if others else ""
        worth = coalitions_of(results, settings, key)
        if frozenset[str]() not in worth and key == "subset":
            notes.append(
                f"Shapley values{of} need a base, which is what no expert makes, and none was measured"
            )
            continue
        try:
            entries.append(_attribution(results, models, players, worth, settings, (others, key)))
        except EvaluationError as error:
            notes.append(f"{error}{of}")
    return entries, notes


def _attribution(
    results: Results,
    models: Sequence[ModelOutcomes],
    players: Sequence[str],
    worth: Worth,
    settings: Sequence[Setting],
    where: tuple[str, str],
) -> Attribution:
    from mecha_exp.verdict.intervals import Estimate
    from mecha_exp.verdict.why import EXACT_PLAYERS, shapley

    values, covers = shapley(worth, players), "sampled orders"
    others, key = where
    if len(players) <= EXACT_PLAYERS:
        errors = _errors_over_examples(results, models, players, settings, key)
        covers = "examples" if errors else ""
        values = {
            player: Estimate(value.value, *(_bounds(value.value, errors[player]) if errors else ()))
            for player, value in values.items()
        }
    ordered = dict(sorted(values.items(), key=lambda item: -item[1].value))
    none, full = worth[frozenset()], worth[frozenset(players)]
    return Attribution(others, KEYS[key], ordered, none, full, covers)


def _bounds(value: float, error: float) -> tuple[float, float]:
    """The normal 95 % interval."""
    from mecha_exp.verdict.intervals import student_quantile

    half = float(student_quantile(math.inf)) * error
    return value - half, value + half


def _errors_over_examples(
    results: Results,
    models: Sequence[ModelOutcomes],
    players: Sequence[str],
    settings: Sequence[Setting],
    key: str,
) -> dict[str, float]:
    """Each value's standard error over examples; empty where an outcome by example is missing."""
    from mecha_exp.verdict.candidates import comparable
    from mecha_exp.verdict.panel import Panel
    from mecha_exp.verdict.sources import error_over_examples
    from mecha_exp.verdict.why.shapley import weights

    split, names = splits_of(results)[0], {s.name: coalitions_of(results, [s], key) for s in settings}
    groups = {name: max(worth, key=len) for name, worth in names.items() if worth}
    base = results.finished[0].base if key == "subset" else None
    if base is not None:
        groups[base] = frozenset()
    candidates = [
        c for c in [*candidates_of(results, models), *inputs_of(results, models)] if c.name in groups
    ]
    usable, _ = comparable([c for c in candidates if split in c.outcomes], split)
    if {c.name for c in usable} != set(groups) or len(groups) < 2 ** len(players):
        return {}
    panel = Panel.of(usable, split)
    shares = weights(players, [groups[name] for name in panel.names])
    return {
        player: error_over_examples(panel, panel.contributions @ row)
        for player, row in zip(players, shares, strict=True)
    }


def sentence(attribution: Attribution, metric: str | None) -> str:
    """The values of all players as one sentence."""
    parts = []
    for player, gain in attribution.values.items():
        interval = "" if math.isnan(gain.low) else f" ({gain.low:+.4f} to {gain.high:+.4f})"
        parts.append(f"{player} {gain.value:+.4f}{interval}")
    none, full = attribution.none, attribution.full
    of = f" ({attribution.setting})" if attribution.setting else ""
    return (
        f"Shapley values of {metric}{of}: {', '.join(parts)}; together {full - none:+.4f}, from "
        f"{none:.4f} without any to {full:.4f} with all"
    )


def shapley_notes(results: Results) -> list[str]:
    """A sentence for each setting of a sweep of coalitions."""
    entries, notes = attributions(results)
    return [*(sentence(attribution, results.metric) for attribution in entries), *notes]
