"""What moved the metric of a sweep: effects of its keys, and where its variance comes from."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mecha_exp.errors import ConfigError, EvaluationError
from mecha_exp.report.results import MISSING, Results
from mecha_exp.report.search.notes import MODE as SEARCH
from mecha_exp.report.verdict import candidates_of, splits_of
from mecha_exp.report.why.shapley import Attribution, attributions
from mecha_exp.runs.outcomes import ModelOutcomes
from mecha_exp.runs.values import ALL_DIGITS, as_text

if TYPE_CHECKING:
    from mecha_exp.verdict import Candidate
    from mecha_exp.verdict.why import Effects, EffectsOverNoise

DRAWN_MODES = (SEARCH, "random", "latin")
_LEVEL = 0.05
MAX_VALUES = 2_000_000
"""Outcomes up to which shares of variance are computed: a value for each example of each point."""


@dataclass(frozen=True)
class Reasons:
    """What moved the metric of a sweep.

    Attributes:
        metric: the main metric.
        split: on which all points were measured.
        points: how many settings are compared.
        effects: main effects and interactions of the swept keys; None where the points are not a full grid.
        over_noise: the effects less what noise alone would give, with intervals; None without outcomes by
            example, or where `effects` is None.
        importances: each key's importance for drawn points, relative to the others; None where `effects` has
            them.
        chance: of each key of drawn points the p-value of its independence of the metric.
        shares: of the variance of outcomes: method, hyperparameters, task, example and residual.
        shapley: the values of experts or blocks, of a sweep over their coalitions.
        notes: a sentence for each part that the data do not give.
    """

    metric: str
    split: str
    points: int
    effects: Effects | None
    over_noise: EffectsOverNoise | None
    importances: Mapping[str, float] | None
    chance: Mapping[str, float]
    shares: Mapping[str, float] | None
    shapley: Sequence[Attribution]
    notes: Sequence[str]


def reasons_of(results: Results, models: Sequence[ModelOutcomes]) -> Reasons:
    """Decompose the main metric of a sweep, as it was when points were chosen.

    Args:
        results: of the sweep.
        models: the outcomes, as `outcomes_of_sweep` reads them.

    Raises:
        ConfigError: fewer than two points have a metric, a race dropped points, or nothing was swept.
    """
    if results.dropped:
        raise ConfigError(
            f"{results.title}: what moved the metric needs the numbers of all points, and a race dropped "
            f"{len(results.dropped)} of {len(results.records)}. Run the sweep with evaluator.race=false."
        )
    settings = results.measured
    if len(settings) < 2 or not results.keys:
        raise ConfigError(
            f"{results.title}: what moved the metric needs two points with different settings and a finite "
            f"metric, and there are {len(settings)}. Sweep a key."
        )
    columns: dict[str, list[Hashable]] = {
        key: [as_text(setting.values[key], ALL_DIGITS) or MISSING for setting in settings]
        for key in results.keys
    }
    values = [setting.estimate(results.metric).mean for setting in settings]
    notes: list[str] = []
    shapley, sentences = attributions(results, models)
    notes += sentences
    effects: Effects | None = None
    over_noise: EffectsOverNoise | None = None
    importances: Mapping[str, float] | None = None
    chance: Mapping[str, float] = {}
    if not shapley and (effects := _effects(columns, values, results, notes)):
        over_noise = _over_noise(columns, values, results, models, notes)
    elif not shapley:
        importances, chance = _importances(columns, values, results, notes)
    return Reasons(
        str(results.metric),
        splits_of(results)[0],
        len(settings),
        effects,
        over_noise,
        importances,
        chance,
        _shares(results, models, notes),
        shapley,
        tuple(notes),
    )


def _effects(
    columns: Mapping[str, Sequence[Hashable]], values: Sequence[float], results: Results, notes: list[str]
) -> Effects | None:
    """The exact decomposition of a full grid; None of other points."""
    from mecha_exp.verdict.why import functional_anova

    try:
        return functional_anova(columns, values)
    except EvaluationError as error:
        if results.mode not in DRAWN_MODES:
            notes.append(f"Exact effects need a full grid: {error}")
        return None


def _over_noise(
    columns: Mapping[str, Sequence[Hashable]],
    values: Sequence[float],
    results: Results,
    models: Sequence[ModelOutcomes],
    notes: list[str],
) -> EffectsOverNoise | None:
    """The effects less what noise gives; None without the outcomes of all settings."""
    from mecha_exp.verdict.candidates import comparable
    from mecha_exp.verdict.panel import Panel
    from mecha_exp.verdict.why import effects_over_noise, score_errors

    split, names = splits_of(results)[0], [setting.name for setting in results.measured]
    points, _ = comparable(candidates_of(results, models), split)
    if {point.name for point in points} != set(names):
        notes.append("How much of the effects is noise is not known: there are no outcomes by example.")
        return None
    panel = Panel.of(points, split)
    effects = effects_over_noise(
        columns, values, score_errors(panel)[:, [panel.index(name) for name in names]]
    )
    if effects.nothing_told:
        notes.insert(0, "No effect can be told from the noise of examples and replicates.")
    return effects


def _importances(
    columns: Mapping[str, Sequence[Hashable]], values: Sequence[float], results: Results, notes: list[str]
) -> tuple[Mapping[str, float] | None, Mapping[str, float]]:
    """The relative importances of drawn points, and whether each key is more than chance."""
    from mecha_exp.verdict.why import chance_of_keys, importances

    numeric = {key: [_number(text) for text in column] for key, column in columns.items()}
    shares = importances(numeric, values)
    if isinstance(shares, str):
        notes.append(shares)
        return None, {}
    notes.append(
        "Importances are estimates of a random forest, of main effects alone, and relative: they add up to "
        "1 whether or not any key matters."
    )
    chance = chance_of_keys(numeric, values)
    if min(chance.values()) >= _LEVEL:
        notes.insert(
            0, "No key can be told from chance: importances of keys that do nothing look like these."
        )
    if results.mode == SEARCH:
        notes.append("A search draws more points where it was good before, so its p-values are too small.")
    return shares, chance


def _number(text: Hashable) -> Hashable:
    try:
        return float(str(text))
    except ValueError:
        return text


def _shares(results: Results, models: Sequence[ModelOutcomes], notes: list[str]) -> dict[str, float] | None:
    """The shares of variance of the outcomes by example; None where there are none."""
    from mecha_exp.verdict.candidates import comparable
    from mecha_exp.verdict.why import variance_shares

    split = splits_of(results)[0]
    points, sentences = comparable(candidates_of(results, models), split)
    notes += sentences
    if not points:
        notes.append("Shares of variance need an outcome for each example, and there are none.")
        return None
    size = len(points) * sum(len(v) for v in points[0].outcomes[split].values.values())
    if size > MAX_VALUES:
        notes.append(f"Shares of variance are left out: {size:,} outcomes are more than {MAX_VALUES:,}.")
        return None
    factors, values = _rows(points, split)
    if len(set(factors["hyperparameters"])) == len(set(factors["method"])):
        notes.append("Each method has one setting, so method and hyperparameters are one factor.")
        del factors["hyperparameters"]
    try:
        return variance_shares(factors, values)
    except EvaluationError as error:
        notes.append(str(error))
        return None


def _rows(points: Sequence[Candidate], split: str) -> tuple[dict[str, list[Hashable]], list[float]]:
    """A row for each example of each point: the levels of the factors, and the value."""
    factors: dict[str, list[Hashable]] = {n: [] for n in ("method", "hyperparameters", "task", "example")}
    values: list[float] = []
    for point in points:
        outcomes = point.outcomes[split]
        for task, array in outcomes.values.items():
            factors["method"] += [point.recipe] * len(array)
            factors["hyperparameters"] += [point.name] * len(array)
            factors["task"] += [task] * len(array)
            factors["example"] += [f"{task}\n{name}" for name in outcomes.examples[task].tolist()]
            values += array.tolist()
    return factors, values
