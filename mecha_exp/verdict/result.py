"""What a verdict says, as values: for the terminal, the report, and `verdict.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from mecha_exp.verdict.candidates import Direction
from mecha_exp.verdict.intervals import Estimate
from mecha_exp.verdict.normalisation import Normalised


@dataclass(frozen=True)
class Comparison:
    """A setting against another on the same examples.

    Attributes:
        point: the setting.
        against: the chosen setting, or the base.
        split: on which both were measured.
        difference: the score of `point` less that of `against`, with its own 95 % interval.
        p: of the paired test, two-sided.
        p_holm: after Holm's correction for all comparisons of the sweep.
        distinguishable: whether `p_holm` is below 5 %.
    """

    point: str
    against: str
    split: str
    difference: Estimate
    p: float
    p_holm: float
    distinguishable: bool


@dataclass(frozen=True)
class Score:
    """How good a setting, or an input, is on a split.

    Attributes:
        point: the name of the setting or the input.
        recipe: None for an input.
        split: on which it was measured.
        overall: the main metric.
        tasks: by task; empty where the evaluator returns one number for each model.
        normalised: in units of the experts; None where a task has no expert.
        replicates: how many models the numbers are means of.
        variance: each source's share of the squared standard error of `overall`: `examples`, and what
            replicates differ in, such as `seed`; empty where that is not known.
    """

    point: str
    recipe: str | None
    split: str
    overall: Estimate
    tasks: Mapping[str, Estimate]
    normalised: Normalised | None = None
    replicates: int = 1
    variance: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Column:
    """A column of a table of methods by tasks.

    Attributes:
        task: None for the main metric.
        best: the best row.
        tied: the rows that cannot be told from it.
    """

    task: str | None
    best: str
    tied: tuple[str, ...]


@dataclass(frozen=True)
class Detectable:
    """The true difference that a kind of comparison shows with 80 % power, after its correction.

    Attributes:
        against: the base, if the chosen setting is compared with it; None for comparisons of settings.
        split: on which they are compared.
        difference: in units of the metric; infinite where none is shown that the metric can have.
    """

    against: str | None
    split: str
    difference: float


@dataclass(frozen=True)
class Cost:
    """What having chosen among many costs.

    Attributes:
        candidates: how many settings could have been chosen.
        selection_estimate: of the chosen setting, on the data on which it was chosen.
        gap: `selection_estimate` less the estimate on the reported split; None where they are one split.
        cross_validated: the score of choosing, on examples that had no part in the choice; None where there
            are too few examples.
        dropped: how many of the candidates a race dropped.
        detectable: what each kind of comparison shows with 80 % power.
    """

    candidates: int
    selection_estimate: float
    gap: float | None = None
    cross_validated: float | None = None
    dropped: int = 0
    detectable: tuple[Detectable, ...] = ()

    @property
    def detectable_between_settings(self) -> float | None:
        """The difference that comparisons of settings show; None without any, or where none is shown."""
        smallest = [d.difference for d in self.detectable if d.against is None]
        return smallest[0] if smallest and math.isfinite(smallest[0]) else None


@dataclass(frozen=True)
class Verdict:
    """What a sweep shows, and what it does not.

    Attributes:
        metric: the name of the main metric.
        direction: of the metric.
        selected_on: the split on which the setting was chosen.
        reported_on: the split of the estimate; the same where there is only one.
        selected: the score of the chosen setting on `reported_on`; None where nothing could be chosen.
        cost: of the choice.
        scores: of all settings and inputs, on each split on which they were measured.
        chosen: the best setting of each recipe, on `selected_on`.
        comparisons: with the chosen setting and with the base.
        columns: of a table of the chosen settings, on `reported_on`.
        examples: how many there are of `reported_on`.
        clusters: how many independent sources these have.
        base: the input with which all settings are compared.
        notes: a sentence for each thing that limits the verdict.
        best_input: the best of the measured inputs on `selected_on`, with which the chosen setting is
            compared; None where there is none.
        fresh: how many new replicates of the chosen setting `selected` is of, which had no part in the
            choice; 0 where it is of those by which it was chosen.
        covers: what the interval of `selected` covers: `examples`, `replicates`, and `choice` where the same
            data, or the same replicates, made the setting the best.
    """

    metric: str
    direction: Direction
    selected_on: str
    reported_on: str
    selected: Score | None = None
    cost: Cost | None = None
    scores: tuple[Score, ...] = ()
    chosen: Mapping[str, str] | None = None
    comparisons: tuple[Comparison, ...] = ()
    columns: tuple[Column, ...] = ()
    examples: int = 0
    clusters: int = 0
    base: str | None = None
    notes: tuple[str, ...] = ()
    best_input: str | None = None
    fresh: int = 0
    covers: tuple[str, ...] = ("examples",)

    def score(self, point: str, split: str | None = None) -> Score | None:
        """The score of a setting or an input on a split, `reported_on` by default; None if it has none."""
        return self._by_place.get((point, split or self.reported_on))

    @cached_property
    def _by_place(self) -> dict[tuple[str, str], Score]:
        """The first score of each point on each split."""
        return {(score.point, score.split): score for score in reversed(self.scores)}

    def against(self, name: str) -> tuple[Comparison, ...]:
        """The comparisons with one setting or input."""
        return tuple(comparison for comparison in self.comparisons if comparison.against == name)

    def chosen_against(self, name: str | None) -> tuple[Comparison, ...]:
        """The comparison of the chosen setting with an input; none where it was not compared."""
        if name is None or self.selected is None:
            return ()
        return tuple(c for c in self.against(name) if c.point == self.selected.point)

    @property
    def with_chosen(self) -> list[Comparison]:
        """The comparisons with the chosen setting, the nearest first; none where nothing was chosen."""
        compared = self.against(self.selected.point) if self.selected else ()
        return sorted(compared, key=lambda comparison: abs(comparison.difference.value))

    @property
    def tied(self) -> tuple[str, ...]:
        """The settings that the data cannot tell from the chosen one."""
        compared = self.against(self.selected.point) if self.selected else ()
        return tuple(comparison.point for comparison in compared if not comparison.distinguishable)


def as_json(verdict: Verdict) -> dict[str, object]:
    """The content of `verdict.json`: numbers, texts, lists and dictionaries; null for what is not known."""
    cost, selected = verdict.cost, verdict.selected
    return {
        "metric": verdict.metric,
        "direction": verdict.direction,
        "selected_on": verdict.selected_on,
        "reported_on": verdict.reported_on,
        "candidates": cost.candidates if cost else 0,
        "selected": selected
        and {
            "recipe": selected.recipe,
            "point": selected.point,
            "estimate": _number(selected.overall.value),
            "ci95": _bounds(selected.overall),
            "covers": list(verdict.covers),
            "fresh": verdict.fresh,
            "variance": {source: _number(share) for source, share in selected.variance.items()},
        },
        "comparisons": [_comparison(comparison) for comparison in verdict.comparisons],
        "normalised": selected and _normalised(selected.normalised),
        "detectable": [_detectable(detectable) for detectable in cost.detectable] if cost else [],
        "best_input": verdict.best_input,
        "selection_estimate": cost and _number(cost.selection_estimate),
        "selection_gap": cost and _number(cost.gap),
        "cross_validated": cost and _number(cost.cross_validated),
        "examples": verdict.examples,
        "clusters": verdict.clusters,
        "notes": list(verdict.notes),
    }


def _comparison(comparison: Comparison) -> dict[str, object]:
    """A comparison as JSON."""
    return {
        "point": comparison.point,
        "against": comparison.against,
        "difference": _number(comparison.difference.value),
        "ci95": _bounds(comparison.difference),
        "p": _number(comparison.p),
        "p_holm": _number(comparison.p_holm),
        "distinguishable": comparison.distinguishable,
        "split": comparison.split,
    }


def _detectable(detectable: Detectable) -> dict[str, object]:
    """A detectable difference as JSON; null where none is shown that the metric can have."""
    difference = _number(detectable.difference)
    return {"against": detectable.against, "split": detectable.split, "difference": difference}


def _normalised(normalised: Normalised | None) -> dict[str, object] | None:
    """Normalised scores as JSON."""
    if normalised is None:
        return None
    return {
        "estimate": _number(normalised.overall.value),
        "ci95": _bounds(normalised.overall),
        "tasks": {task: _number(value) for task, value in normalised.tasks.items()},
        "experts": dict(normalised.experts),
    }


def _bounds(estimate: Estimate) -> list[float | None] | None:
    """The interval, or nothing where there is none."""
    return None if math.isnan(estimate.low) else [_number(bound) for bound in estimate.ci95]


def _number(value: float | None) -> float | None:
    """A finite number; JSON has nothing for others."""
    return float(value) if value is not None and math.isfinite(value) else None
