"""Measures points and inputs by their evaluators, unless the store has the numbers."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mecha_exp.app.batch import Merged
from mecha_exp.app.experts import base_of, base_of_adapter, experts_found, experts_left_out, named_experts
from mecha_exp.app.outputs.makers import adapted
from mecha_exp.app.point import Point
from mecha_exp.app.provenance import names_of_input
from mecha_exp.app.races import Races, without_outcomes
from mecha_exp.errors import ConfigError, EvaluationError, MechaError, MergeError
from mecha_exp.evaluation import NORMALISED, Context, Evaluation, Measurement, transfers
from mecha_exp.evaluation.isolation.pool import close_pools
from mecha_exp.evaluation.model import Model, load_state_dict
from mecha_exp.evaluation.normalisation import find_experts, normalised
from mecha_exp.evaluation.outcome_table import decode, encode
from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.evaluation.racing import Dropped
from mecha_exp.lab.content_hash import contents_of
from mecha_exp.lab.store import ResultStore
from mecha_exp.lab.stored_results import StoredEvaluation
from mecha_exp.method_api.views import data_of
from mecha_exp.runs.outcomes import WHOLE, MeasuredOutcomes
from mecha_exp.system.texts import json_hash
from mecha_exp.terminal.bars import MeasuringBars

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measured:
    """What all evaluators measured of a model.

    Attributes:
        parts: each evaluation with its measurement; none of a dropped point.
        dropped: what a race measured before it dropped the point; None if all examples were measured.
        is_known: whether the store had all of it.
    """

    parts: Sequence[tuple[Evaluation, Measurement]]
    dropped: Dropped | None = None
    is_known: bool = False

    @property
    def numbers(self) -> dict[str, float]:
        """The metrics by their full names."""
        return {e.prefix + name: value for e, m in self.parts for name, value in m.metrics.items()}

    @property
    def outcomes(self) -> dict[str, Outcomes]:
        """The outcomes by the prefix of their evaluation."""
        return {e.prefix: m.outcomes for e, m in self.parts if m.outcomes is not None}

    @property
    def files(self) -> dict[str, bytes | Path]:
        """The files beside the numbers, by their names below the prefix of their evaluation."""
        return {e.prefix + name: content for e, m in self.parts for name, content in m.files.items()}

    def rows(self, role: str, name: str, experts: int | None) -> list[MeasuredOutcomes]:
        """The outcomes for a file, under the name of a point or an input, with the number of its set."""
        return [
            MeasuredOutcomes(role, None, name, e.full_name(metric), e.split or WHOLE, outcomes, experts)
            for e, m in self.parts
            for metric, outcomes in m.by_metric(e.evaluator.metric).items()
        ]


class Measurements:
    """The measurements of a process.

    Args:
        store: keeps them; None keeps the inputs' in memory alone.
        write: writes to the store, and warns if that fails.
        is_fresh: whether stored measurements are ignored.

    Attributes:
        is_wanted: asked before a worker begins with a point; False where another process measures it.
    """

    def __init__(
        self, store: ResultStore | None, write: Callable[..., None], *, is_fresh: bool = False
    ) -> None:
        self._store, self._write, self._is_fresh = store, write, is_fresh
        self._bars = MeasuringBars()
        self._inputs: dict[tuple[str, str], Measurement | None] = {}
        self._started: dict[tuple[str, str], Future[Measurement]] = {}
        self._races = Races()
        self._whole: dict[tuple[str, str], Measured] = {}
        self.is_wanted: Callable[[Point], bool] = lambda point: True

    def begin(self) -> None:
        """Forget the inputs' measurements, which a new command may ask for anew."""
        self._inputs.clear()
        self._races.begin()
        self._whole.clear()

    def race(self, results: Mapping[Point, Merged | Exception]) -> None:
        """Race the points of a pass where the configuration asks for it; `of_point` tells who was dropped.

        Points whose numbers are known take no part.
        """
        racing = {
            point: merged
            for point, merged in results.items()
            if isinstance(merged, Merged) and point.scoring.race and not self.are_stored(point)
        }
        self._races.run(racing, self._whole_of, self._measure_whole, self._begin, self._keeping)
        for point, merged in racing.items():
            if self._races.has_dropped(point) and self._store is not None:
                self._store.forget_parts(*_raced(point))
            elif not self._races.has_ended_for(point) and _raced(point) not in self._whole:
                self._start(point, merged)

    def _keeping(self, point: Point) -> Context:
        """The context of a part of a point's examples: what is left in a race goes on from what is kept."""
        return replace(self._watched(point.context, *_raced(point)), report=None)

    def _measure_whole(self, point: Point, merged: Merged) -> Outcomes:
        """The outcomes of a point on all examples in the middle of a race; `of_point` recalls the numbers."""
        measured = self.of_point(point, merged)
        self._whole[_raced(point)] = measured
        prefix = point.scoring.evaluations[0].prefix
        if prefix not in measured.outcomes:
            raise without_outcomes(point)
        return measured.outcomes[prefix]

    def _whole_of(self, results: Mapping[Point, Merged]) -> Outcomes:
        """The outcomes on all examples of an input, or else of a point."""
        first = next(iter(results))
        prefix = first.scoring.evaluations[0].prefix
        for measured in self.of_inputs(first).values():
            if prefix in measured.outcomes:
                return measured.outcomes[prefix]
        failure = without_outcomes(first)
        for point, merged in results.items():
            try:
                measured = self.of_point(point, merged)
            except EvaluationError as error:
                failure = error
                continue
            if prefix not in measured.outcomes:
                break
            self._whole[_raced(point)] = measured
            return measured.outcomes[prefix]
        raise failure

    def begin_workers(self, points: Sequence[Point]) -> None:
        """Start the workers that will measure points, while these are merged."""
        missing = [p.scoring.pool for p in points if p.scoring.workers and not self.are_stored(p)]
        for pool, count in Counter(missing).items():
            pool.begin(count)

    def start(self, point: Point, merged: Merged) -> None:
        """Begin to measure a point where the configuration asks for workers; `of_point` waits for it.

        Points that race begin after their race.
        """
        if point.scoring.race is None:
            self._start(point, merged)

    def expect(self, point: Point, result: Merged | Exception) -> None:
        """Begin to copy the model of the next point to a GPU, while the present one is measured there."""
        model = result.model if isinstance(result, Merged) else None
        if isinstance(model, Mapping) and not (point.scoring.is_isolated or self.are_stored(point)):
            transfers.expect(model)

    def _start(self, point: Point, merged: Merged) -> None:
        if not point.scoring.workers or merged.model is None:
            return
        for evaluation in point.scoring.evaluations:
            self._start_one(point, merged.model, evaluation)

    def _start_one(self, point: Point, model: Model, evaluation: Evaluation) -> None:
        key = (evaluation.key, point.digest)
        if key not in self._started and self._stored(*key) is None:
            context = self._watched(point.context, *key)
            is_wanted = partial(self.is_wanted, point)
            self._started[key] = point.scoring.start(evaluation, model, context, is_wanted)

    def _begin(self, point: Point, merged: Merged, evaluation: Evaluation) -> Callable[[], Measurement]:
        """Begin to measure a point by another evaluation than its own; returns a function that waits."""
        model = merged.model
        assert model is not None
        if point.scoring.workers:
            self._start_one(point, model, evaluation)
        stored = self._stored(evaluation.key, point.digest)
        return lambda: stored or self._measure(point, model, evaluation)

    def end(self) -> None:
        """End the workers, and what they still measure."""
        self._started.clear()
        close_pools()

    def are_stored(self, point: Point) -> bool:
        """Whether the store has all numbers of a point."""
        return all(self._stored(e.key, point.digest) is not None for e in point.scoring.evaluations)

    def of_point(self, point: Point, merged: Merged) -> Measured:
        """Measure a point by all its evaluators, or recall what the store has.

        Raises:
            EvaluationError: an evaluator failed.
        """
        if (dropped := self._races.result_of(point)) is not None:
            return Measured((), dropped)
        if point.scoring.race and (measured := self._whole.pop(_raced(point), None)) is not None:
            self._races.complete(point, measured.outcomes)
            return measured
        parts, is_known = [], True
        model = merged.model
        for evaluation in point.scoring.evaluations:
            measurement = self._stored(evaluation.key, point.digest)
            if measurement is None:
                is_known = False
                if model is None:
                    raise MergeError("the model was not kept, so it cannot be measured. Use rerun=always.")
                model = model if point.scoring.is_isolated else load_state_dict(model)
                measurement = self._measure(point, model, evaluation)
            parts.append((evaluation, measurement))
        measured = Measured(parts, is_known=is_known)
        self._races.complete(point, measured.outcomes)
        return measured

    def _measure(self, point: Point, model: Model, evaluation: Evaluation) -> Measurement:
        """Measure a point, or wait for the worker that does, and store the numbers."""
        started = self._started.pop((evaluation.key, point.digest), None)
        context = self._watched(point.context, evaluation.key, point.digest)
        try:
            measured = started.result() if started else point.scoring.measure_one(evaluation, model, context)
        except (EvaluationError, ConfigError) as error:
            raise EvaluationError(str(error), evaluation.key) from error
        finally:
            self._bars.end(context.name)
        self._put(evaluation, measured, point.digest)
        return measured

    def of_inputs(self, point: Point) -> dict[str, Measured]:
        """The measurements of each input, by its name; empty where an input cannot be measured."""
        statistics = data_of(point.recipe)
        return {
            point.names[node]: self._of_input(point, path, point.names[node])
            for node, path in point.files.items()
            if node.merge_space == "weight" and node not in statistics and point.scoring.evaluations
        }

    def of_inputs_and_experts(self, point: Point) -> dict[str, Measured]:
        """The measurements of each input, and of each further expert that `models.expert_of` names.

        Raises:
            ConfigError: `models.expert_of` is not a mapping of tasks to models.
            CheckpointError: it names a model that does not exist.
        """
        measured = self.of_inputs(point)
        for name, path in experts_left_out(point).items():
            if measured and name not in measured:
                measured[name] = self._of_input(point, path, name)
        return measured

    def normalised_scores(
        self, point: Point, measured: Measured, inputs: Mapping[str, Measured]
    ) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
        """The normalised scores of a point and of its inputs, by the names of their metrics.

        Raises:
            ConfigError: `models.expert_of` is not a mapping of tasks to models.
            EvaluationError: it names a task that is not measured.
        """
        own: dict[str, float] = {}
        of_inputs: dict[str, dict[str, float]] = {name: {} for name in inputs}
        named = {task: self._of_input(point, path, task) for task, path in named_experts(point).items()}
        candidates = self._candidates(point, inputs) if measured.outcomes else {}
        for evaluation, measurement in measured.parts:
            if measurement.outcomes is None:
                continue
            prefix = evaluation.prefix
            experts = find_experts(
                {name: m.outcomes[prefix] for name, m in candidates.items() if prefix in m.outcomes},
                base_of(point),
                {task: m.outcomes[prefix] for task, m in named.items() if prefix in m.outcomes},
                minimized=evaluation.evaluator.direction == "minimize",
            )
            metric = f"{prefix}{evaluation.evaluator.metric}/{NORMALISED}"
            of_models = [(own, measured), *((of_inputs[name], m) for name, m in inputs.items())]
            for scores, model in of_models:
                score = normalised(model.outcomes[prefix], experts) if prefix in model.outcomes else None
                if score is not None:
                    scores[metric] = score
        return own, of_inputs

    def _candidates(self, point: Point, inputs: Mapping[str, Measured]) -> dict[str, Measured]:
        """The models among which experts are looked for: the inputs, and experts that a recipe leaves out.

        A recipe that merges none of `models.experts` names its models itself, as one of mergekit does.
        """
        candidates, experts, merged = dict(inputs), experts_found(point), {*point.files.values()}
        if merged.isdisjoint(experts):
            return candidates
        others = [path for path in experts if path not in merged]
        return {
            **candidates,
            **{str(path): self._of_input(point, path, names_of_input(path)[0]) for path in others},
        }

    def _of_input(self, point: Point, path: Path, name: str) -> Measured:
        parts = []
        base = base_of_adapter(point, path)
        content = _content(point, path)
        if base is not None:
            content = json_hash([content, _content(point, base)])
        others = {other: file for other, file in point.context.inputs.items() if file != path}
        context = Context(name, inputs={name: base or path, **others}, offline=point.is_offline)
        for shared in point.scoring.evaluations:
            evaluation = shared.within(context)
            key = (evaluation.key, content)
            if key not in self._inputs:
                self._inputs[key] = self._stored(evaluation.key, content=content) or self._measure_input(
                    point, evaluation, path, base, context, content
                )
            if (measurement := self._inputs[key]) is not None:
                parts.append((evaluation, measurement))
        return Measured(parts)

    def _measure_input(
        self,
        point: Point,
        evaluation: Evaluation,
        path: Path,
        base: Path | None,
        context: Context,
        content: str,
    ) -> Measurement | None:
        context = self._watched(context, evaluation.key, content=content)
        try:
            model = path if base is None else adapted(base, path, point.options)
            measurement = point.scoring.measure_one(evaluation, model, context)
        except MechaError as error:
            log.warning("the input %s cannot be measured for comparison: %s", path, error)
            return None
        finally:
            self._bars.end(context.name)
        self._put(evaluation, measurement, content=content)
        return measurement

    def _watched(self, context: Context, key: str, signature: str = "", *, content: str = "") -> Context:
        """The context of a measurement that shows its progress and keeps its parts."""
        kept = None
        if self._store is not None and not self._is_fresh:
            kept = self._store.partial(key, signature, content=content).absolute()
        return replace(context, kept=kept, report=partial(self._bars.show, context.name))

    def _stored(self, key: str, signature: str = "", *, content: str = "") -> Measurement | None:
        if self._store is None or self._is_fresh:
            return None
        stored = self._store.evaluation(key, signature, content=content)
        if stored is None:
            return None
        try:
            outcomes = decode(stored.outcomes) if stored.outcomes is not None else {}
        except ValueError:
            return None
        return Measurement(stored.metrics, outcomes.pop("", None), stored.files, outcomes)

    def _put(
        self, evaluation: Evaluation, measurement: Measurement, signature: str = "", *, content: str = ""
    ) -> None:
        if self._store:
            by_metric = measurement.by_metric("")
            outcomes = encode(by_metric) if by_metric else None
            stored = StoredEvaluation(measurement.metrics, outcomes, measurement.files)
            self._write(self._store.put_evaluation, evaluation.key, stored, signature, content=content)


def _content(point: Point, path: Path) -> str:
    return point.contents.get(path) or contents_of([path])[path]


def _raced(point: Point) -> tuple[str, str]:
    """A point and the evaluation by which it races."""
    return point.scoring.evaluations[0].key, point.digest
