"""Measures points and inputs by their evaluators, unless the store has the numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mecha_exp.app.batch import Merged
from mecha_exp.app.point import Point
from mecha_exp.errors import CheckpointError, ConfigError, EvaluationError, MechaError, MergeError
from mecha_exp.evaluation import NORMALISED, Context, Evaluation, Measurement
from mecha_exp.evaluation.normalisation import find_experts, normalised
from mecha_exp.evaluation.outcome_table import decode, encode
from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.evaluation.scoring import load_state_dict
from mecha_exp.lab.content_hash import contents_of
from mecha_exp.lab.store import ResultStore, StoredEvaluation
from mecha_exp.runs.outcomes import WHOLE, MeasuredOutcomes
from mecha_exp.sources.search import find_model

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measured:
    """What all evaluators measured of a model.

    Attributes:
        parts: each evaluation with its measurement.
    """

    parts: Sequence[tuple[Evaluation, Measurement]]

    @property
    def numbers(self) -> dict[str, float]:
        """The metrics by their full names."""
        return {e.prefix + name: value for e, m in self.parts for name, value in m.metrics.items()}

    @property
    def outcomes(self) -> dict[str, Outcomes]:
        """The outcomes by the prefix of their evaluation."""
        return {e.prefix: m.outcomes for e, m in self.parts if m.outcomes is not None}

    def rows(self, role: str, name: str) -> list[MeasuredOutcomes]:
        """The outcomes for a file, under the name of a point or an input."""
        return [
            MeasuredOutcomes(role, None, name, e.metric, e.split or WHOLE, m.outcomes)
            for e, m in self.parts
            if m.outcomes is not None
        ]


def context_of(point: Point) -> Context:
    """What evaluators may know of a point."""
    inputs = {name: point.files[node] for node, name in point.names.items()}
    return Context(
        point.folder.name, point.hyperparameters, point.config.get("seed"), point.folder.absolute(), inputs
    )


class Measurements:
    """The measurements of a process.

    Args:
        store: keeps them; None keeps the inputs' in memory alone.
        write: writes to the store, and warns if that fails.
        is_fresh: whether stored measurements are ignored.
    """

    def __init__(
        self, store: ResultStore | None, write: Callable[..., None], *, is_fresh: bool = False
    ) -> None:
        self._store, self._write, self._is_fresh = store, write, is_fresh
        self._inputs: dict[tuple[str, str], Measurement | None] = {}

    def begin(self) -> None:
        """Forget the inputs' measurements, which a new command may ask for anew."""
        self._inputs.clear()

    def are_stored(self, point: Point) -> bool:
        """Whether the store has all numbers of a point."""
        return all(self._stored(e.key, point.digest) is not None for e in point.scoring.evaluations)

    def of_point(self, point: Point, merged: Merged) -> Measured:
        """Measure a point by all its evaluators, or recall what the store has.

        Raises:
            EvaluationError: an evaluator failed.
        """
        parts = []
        model = merged.model
        for evaluation in point.scoring.evaluations:
            measurement = self._stored(evaluation.key, point.digest)
            if measurement is None:
                if model is None:
                    raise MergeError("the model was not kept, so it cannot be measured. Use rerun=always.")
                model = model if point.scoring.timeout is not None else load_state_dict(model)
                try:
                    measurement = point.scoring.measure_one(evaluation, model, context_of(point))
                except (EvaluationError, ConfigError) as error:
                    raise EvaluationError(str(error), evaluation.key) from error
                self._put(evaluation, measurement, point.digest)
            parts.append((evaluation, measurement))
        return Measured(parts)

    def of_inputs(self, point: Point) -> dict[str, Measured]:
        """What the evaluators measure of each input, by its name; empty where one cannot be measured."""
        return {
            point.names[node]: self._of_input(point, path, point.names[node])
            for node, path in point.files.items()
            if node.merge_space == "weight" and point.scoring.evaluations
        }

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
        named = {task: self._of_input(point, path, task) for task, path in _named_experts(point).items()}
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
        """The models among which experts are looked for: the inputs, and experts that a recipe leaves out."""
        candidates = dict(inputs)
        for model in point.config["models"].get("experts") or ():
            try:
                path = find_model(str(model), point.options.model_dirs)
            except CheckpointError:  # the recipe does without it
                continue
            if path not in point.files.values():
                candidates[str(path)] = self._of_input(point, path, path.stem)
        return candidates

    def _of_input(self, point: Point, path: Path, name: str) -> Measured:
        parts = []
        content = point.contents.get(path) or contents_of([path])[path]
        for evaluation in point.scoring.evaluations:
            key = (evaluation.key, content)
            if key not in self._inputs:
                self._inputs[key] = self._stored(evaluation.key, content=content) or self._measure_input(
                    point, evaluation, path, name, content
                )
            if (measurement := self._inputs[key]) is not None:
                parts.append((evaluation, measurement))
        return Measured(parts)

    def _measure_input(
        self, point: Point, evaluation: Evaluation, path: Path, name: str, content: str
    ) -> Measurement | None:
        try:
            measurement = point.scoring.measure_one(evaluation, path, Context(name, inputs={name: path}))
        except MechaError as error:
            log.warning("the input %s cannot be measured for comparison: %s", path, error)
            return None
        self._put(evaluation, measurement, content=content)
        return measurement

    def _stored(self, key: str, signature: str = "", *, content: str = "") -> Measurement | None:
        if self._store is None or self._is_fresh:
            return None
        stored = self._store.evaluation(key, signature, content=content)
        if stored is None:
            return None
        try:
            outcomes = decode(stored.outcomes) if stored.outcomes is not None else None
        except ValueError:
            return None
        return Measurement(stored.metrics, outcomes)

    def _put(
        self, evaluation: Evaluation, measurement: Measurement, signature: str = "", *, content: str = ""
    ) -> None:
        if self._store:
            outcomes = encode(measurement.outcomes) if measurement.outcomes is not None else None
            stored = StoredEvaluation(measurement.metrics, outcomes)
            self._write(self._store.put_evaluation, evaluation.key, stored, signature, content=content)


def base_of(point: Point) -> str | None:
    """The name of the base among the inputs of a point; None if it is none of them."""
    base = point.config["models"].get("base")
    names = {point.files[node]: name for node, name in point.names.items()}
    try:
        return names.get(find_model(str(base), point.options.model_dirs)) if base else None
    except CheckpointError:  # it does not exist, and the recipe does without it
        return None


def experts_of(point: Point) -> dict[str, str]:
    """The names of the inputs that `models.expert_of` makes experts, by task; other models are left out."""
    names = {point.files[node]: name for node, name in point.names.items()}
    return {task: names[path] for task, path in _named_experts(point).items() if path in names}


def _named_experts(point: Point) -> dict[str, Path]:
    """The files of the experts that `models.expert_of` names, by task: inputs by their names, or paths."""
    named = point.config["models"].get("expert_of") or {}
    if not isinstance(named, Mapping):
        raise ConfigError(f"models.expert_of={named}: expected tasks with models: {{task_a: expert_a}}.")
    files = {name: point.files[node] for node, name in point.names.items()}
    return {
        str(task): files.get(str(model)) or find_model(str(model), point.options.model_dirs)
        for task, model in named.items()
    }
