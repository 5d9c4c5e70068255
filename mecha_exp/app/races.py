"""The races of a process: the points of each pass race while their models are at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from mecha_exp.app.batch import Merged
from mecha_exp.app.point import Point
from mecha_exp.errors import ConfigError, EvaluationError, some
from mecha_exp.evaluation import Context, Evaluation, Measurement, Scoring
from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.evaluation.racing import Dropped, Fidelity, Hyperband, Order, Race
from mecha_exp.evaluation.racing.order import Part
from mecha_exp.runs.files import FILES, add_files, write_files
from mecha_exp.system.texts import json_hash

FindWhole = Callable[[Mapping[Point, Merged]], Outcomes]
"""The outcomes of some model by the points' main evaluator on all examples; raises an EvaluationError."""
MeasureWhole = Callable[[Point, Merged], Outcomes]
"""The outcomes of a point by its main evaluator on all examples; raises an EvaluationError."""
ContextOf = Callable[[Point], Context]
"""The context of a point, in which what a race measures is kept."""
Start = Callable[[Point, Merged, Evaluation], Callable[[], Measurement]]
"""Begins to measure a point, and returns a function that waits for it, or finds it stored."""


_Group = Mapping[str, tuple[Point, Merged]]


class Races:
    """The decisions of races, by evaluation and point.

    Outcomes on some of the examples are kept here alone and never stored; numbers at a lower fidelity are.
    What is left in the race is measured whole afterwards, as without one.
    """

    def __init__(self) -> None:
        self._races: dict[str, Race | Hyperband] = {}
        self._dropped: dict[tuple[str, str], Dropped] = {}
        self._errors: dict[tuple[str, str], EvaluationError] = {}

    def begin(self) -> None:
        """Forget earlier races, as a new command starts its own."""
        self._races.clear()
        self._dropped.clear()
        self._errors.clear()

    def run(
        self,
        results: Mapping[Point, Merged],
        find_whole: FindWhole,
        whole: MeasureWhole,
        start: Start,
        context_of: ContextOf,
    ) -> None:
        """Race the points of a pass, each evaluation for itself.

        Args:
            results: the merges of the points, which have their models.
            find_whole: tells which examples there are.
            whole: measures a point on all of them.
            start: measures a point at a lower fidelity.
            context_of: gives the contexts in which some examples of points are measured.
        """
        groups: dict[str, dict[str, tuple[Point, Merged]]] = {}
        for point, merged in results.items():
            if point.scoring.race is not None and merged.model is not None:
                groups.setdefault(_key(point), {})[point.digest] = point, merged
        for key, group in groups.items():
            for point, _ in group.values():  # of an earlier start
                write_files({}, point.folder / FILES)
            try:
                race = self._races.get(key) or _new_race(group, find_whole)
            except EvaluationError as error:
                self._errors |= {(key, digest): error for digest in group}
                continue
            self._races[key] = race
            if isinstance(race, Hyperband):
                dropped, errors = race.run(list(group), partial(_measure_at, group, start))
            else:
                measure = partial(_measure, group, context_of)
                dropped, errors = race.run(list(group), measure, partial(_measure_whole, group, whole))
            self._dropped |= {(key, digest): result for digest, result in dropped.items()}
            self._errors |= {(key, digest): _named(error, *group[digest]) for digest, error in errors.items()}

    def result_of(self, point: Point) -> Dropped | None:
        """The numbers of a dropped point; None if it was not dropped.

        Raises:
            EvaluationError: it could not be measured in the race.
        """
        if point.scoring.race is None or not point.scoring.evaluations:
            return None
        key = _key(point), point.digest
        if key in self._errors:
            raise self._errors[key]
        return self._dropped.get(key)

    def has_ended_for(self, point: Point) -> bool:
        """Whether a point was dropped, or could not be measured."""
        return self.has_dropped(point) or (_key(point), point.digest) in self._errors

    def has_dropped(self, point: Point) -> bool:
        """Whether a point was dropped."""
        return (_key(point), point.digest) in self._dropped

    def complete(self, point: Point, outcomes: Mapping[str, Outcomes]) -> None:
        """Note the outcomes of a point on all examples, against which later passes race."""
        if point.scoring.race is None or not point.scoring.evaluations:
            return
        race, main = self._races.get(_key(point)), point.scoring.evaluations[0]
        if isinstance(race, Race) and main.prefix in outcomes:
            race.complete(point.digest, outcomes[main.prefix])


def without_outcomes(point: Point) -> EvaluationError:
    """The error of an evaluator by whose numbers points cannot race."""
    return EvaluationError(
        f"the evaluator '{point.scoring.evaluations[0].evaluator.name}' declares takes_examples=True and "
        "returns no outcomes, by which points race. Return Outcomes, or leave evaluator.race out.",
        _key(point),
    )


def _key(point: Point) -> str:
    return point.scoring.evaluations[0].key


def _new_race(group: _Group, find_whole: FindWhole) -> Race | Hyperband:
    point, _ = next(iter(group.values()))
    settings, minimized = point.scoring.race, point.scoring.direction == "minimize"
    assert settings is not None
    if isinstance(settings, Fidelity):
        return Hyperband(settings, minimized=minimized)
    order = Order.of(find_whole(dict(group.values())), settings.seed)
    best = _best_outcome(point) if settings.best is None else settings.best
    return Race(order, settings, minimized=minimized, best=best)


def _best_outcome(point: Point) -> float | None:
    """The best value that an example can have, as far as the evaluator says so for this direction."""
    evaluation = point.scoring.evaluations[0]
    tell = evaluation.evaluator.best_outcome
    if tell is None or evaluation.evaluator.direction != point.scoring.direction:
        return None
    return tell(point.context, evaluation.parameters)


def _measure(
    group: _Group, context_of: ContextOf, names: Sequence[str], part: Part
) -> dict[str, Outcomes | EvaluationError]:
    """The outcomes of points on some examples, or why there are none; workers measure side by side.

    Files go to the folders of the points at once: those that are dropped keep them.
    """
    contexts = {name: replace(context_of(group[name][0]), among=_digest(part)) for name in names}
    measuring = {name: _started(*group[name], part, contexts[name]) for name in names}
    measured: dict[str, Outcomes | EvaluationError] = {}
    for name, result in measuring.items():
        try:
            measurement, point = result(), group[name][0]
            if measurement.outcomes is None:
                raise without_outcomes(point)
            measured[name] = measurement.outcomes
            add_files(measurement.files, point.folder / FILES)
        except (EvaluationError, ConfigError) as error:
            measured[name] = EvaluationError(str(error), _key(group[name][0]))
    return measured


def _measure_whole(group: _Group, whole: MeasureWhole, name: str) -> Outcomes | EvaluationError:
    """The outcomes of a point on all examples, or why there are none."""
    try:
        return whole(*group[name])
    except EvaluationError as error:
        return error


def _measure_at(
    group: _Group, start: Start, names: Sequence[str], value: int
) -> dict[str, float | EvaluationError]:
    """The metric of points at a lower fidelity, or why there is none; workers measure side by side."""
    measuring = {}
    for name in names:
        point, merged = group[name]
        assert isinstance(point.scoring.race, Fidelity)
        lower = point.scoring.evaluations[0].at(point.scoring.race.key, value)
        measuring[name] = start(point, merged, lower)
    measured: dict[str, float | EvaluationError] = {}
    for name, result in measuring.items():
        scoring = group[name][0].scoring
        try:
            measured[name] = _metric_in(result().metrics, scoring)
        except EvaluationError as error:  # under the key by which `rerun=never` looks for failures
            measured[name] = EvaluationError(str(error), _key(group[name][0]))
    return measured


def _metric_in(metrics: Mapping[str, float], scoring: Scoring) -> float:
    metric = str(scoring.metric)
    if metric not in metrics:
        name = scoring.evaluations[0].evaluator.name
        raise EvaluationError(
            f"sweep.fidelity drops points by {metric}, and the evaluator '{name}' returned "
            f"{some(metrics)}. Choose one of these with evaluator.metric, or leave sweep.fidelity out.",
            scoring.evaluations[0].key,
        )
    return metrics[metric]


def _digest(part: Part) -> str:
    """A name of some examples that tells them from others."""
    return json_hash(part, sort_keys=True)[:16]


def _started(point: Point, merged: Merged, part: Part, context: Context) -> Callable[[], Measurement]:
    """A function that returns a point's measurement on some examples, which workers have begun."""
    evaluation, scoring = point.scoring.evaluations[0].among(part), point.scoring
    assert merged.model is not None
    if scoring.workers:
        return scoring.start(evaluation, merged.model, context).result
    return partial(scoring.measure_one, evaluation, merged.model, context)


def _named(error: EvaluationError, point: Point, _: Merged) -> EvaluationError:
    """An error of a race with its evaluator."""
    if error.evaluation:
        return error
    name = point.scoring.evaluations[0].evaluator.name
    return EvaluationError(f"the evaluator '{name}': {error}", _key(point))
