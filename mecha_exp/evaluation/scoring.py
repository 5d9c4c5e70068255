"""The evaluators that a configuration asks for, with their parameters and the main metric."""

from __future__ import annotations

import hashlib
import json
import math
import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mecha_exp.checkpoint import open_stored
from mecha_exp.errors import ConfigError, EvaluationError, Problems, brief, did_you_mean, nearest, some
from mecha_exp.evaluation.isolation import evaluation_process
from mecha_exp.evaluation.registry import (
    DIRECTIONS,
    SETTINGS,
    WEIGHT_STATS,
    Evaluator,
    Shapes,
    find_evaluator,
)
from mecha_exp.graph.nodes import InMemory
from mecha_exp.sources.memory import MemorySource
from mecha_exp.sources.quantised.view import dequantised

Model = Path | Mapping[str, Tensor]


@dataclass(frozen=True)
class Evaluation:
    """An evaluator with the values of its parameters.

    Attributes:
        evaluator: the registered evaluator.
        parameters: all its parameters by name, defaults included.
        prefix: of the names of its metrics: empty for the main evaluator, its name and `/` for others.
    """

    evaluator: Evaluator
    parameters: Mapping[str, Any]
    prefix: str = ""

    @property
    def key(self) -> str:
        """The key of a stored measurement, valid as a file name: a hash of name, version and parameters."""
        identity = [self.evaluator.name, self.evaluator.version, dict(self.parameters)]
        text = json.dumps(identity, sort_keys=True, default=str)
        name = re.sub(r"\W", "_", self.evaluator.name)
        return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def score(self, state_dict: Mapping[str, Tensor]) -> dict[str, float]:
        """The evaluator's numbers, checked, without the prefix.

        Raises:
            EvaluationError: the evaluator raised, or did not return numbers by name.
        """
        name = self.evaluator.name
        try:
            measured = self.evaluator.score(state_dict, **self.parameters)
        except ConfigError:
            raise
        except Exception as error:
            trace = traceback.format_exc().rstrip()
            line = f"{type(error).__name__}: {error}"
            raise EvaluationError(f"the evaluator '{name}' failed: {line}\n{trace}") from error
        return _checked(self.evaluator, measured)


@dataclass(frozen=True)
class Scoring:
    """The measurements to make of a model.

    Attributes:
        evaluations: the main one first; empty if only the weights are compared.
        metric: the name of the main metric; None if there is no evaluation.
        direction: whether more of `metric` is better.
        timeout: seconds that an evaluator may take for one model; None is unlimited.
        weight_stats: whether the model is compared with its inputs during the merge.
        plugins: the files that define the evaluators, for a separate process.
    """

    evaluations: tuple[Evaluation, ...]
    metric: str | None
    direction: str
    timeout: float | None
    weight_stats: bool
    plugins: tuple[str, ...] = ()

    @property
    def units(self) -> dict[str, str]:
        """The units of the metrics, by their full names."""
        return {e.prefix + name: unit for e in self.evaluations for name, unit in e.evaluator.units.items()}

    def measure(self, model: Model) -> dict[str, float]:
        """Measure a model by every evaluator; see `measure_one`."""
        measured: dict[str, float] = {}
        if self.timeout is None and self.evaluations:
            model = load_state_dict(model)
        for evaluation in self.evaluations:
            measured.update(self.measure_one(evaluation, model))
        return measured

    def measure_one(self, evaluation: Evaluation, model: Model) -> dict[str, float]:
        """Measure a model by one evaluator; returns the metrics by their full names.

        Args:
            evaluation: one of `evaluations`.
            model: a safetensors file, or a state dict in memory.

        With a timeout the evaluator runs in a separate process, which is killed when the time is over.

        Raises:
            EvaluationError: the evaluator raised, took too long, or did not return numbers by name.
        """
        if self.timeout is None:
            measured = evaluation.score(load_state_dict(model))
        else:
            measured = evaluation_process(self.plugins).score(evaluation, model, self.timeout)
        return {evaluation.prefix + name: value for name, value in measured.items()}


def read_scoring(settings: Mapping[str, Any], shapes: Shapes, plugins: Sequence[str] = ()) -> Scoring:
    """Read the `evaluator` part of a configuration, for a model of these keys and shapes.

    Raises:
        ConfigError: all problems of this part.
    """
    problems = Problems()
    evaluations: list[Evaluation] = []
    rest = {key: value for key, value in settings.items() if key not in SETTINGS}
    for index, request in enumerate(_requests(settings, rest)):
        try:
            if request["name"] == WEIGHT_STATS:
                continue
            evaluator = find_evaluator(request.pop("name"), shapes)
            if evaluator is None:
                continue
            prefix = f"{evaluator.name}/" if index else ""
            evaluations.append(Evaluation(evaluator, evaluator.bind(request), prefix))
        except ConfigError as error:
            problems.add(error)
    metric, direction = _main_metric(settings, evaluations, problems)
    timeout = settings.get("timeout")
    if timeout is not None and (isinstance(timeout, bool | str) or not timeout > 0):
        problems.add(f"evaluator.timeout: expected seconds above 0, or null for any time, got {timeout!r}.")
    if rest and not evaluations and not problems:
        hint = did_you_mean(next(iter(rest)), SETTINGS)
        problems.add(f"evaluator.{next(iter(rest))}: no evaluator takes it.{hint}")
    problems.raise_as(ConfigError)
    stats = wants_weight_stats(settings)
    return Scoring(tuple(evaluations), metric, direction, timeout, stats, tuple(plugins))


def wants_weight_stats(settings: Mapping[str, Any]) -> bool:
    """Whether a configuration asks for the comparison with the inputs."""
    named = (settings.get("name"), *(settings.get("also") or ()))
    return bool(settings.get(WEIGHT_STATS)) or WEIGHT_STATS in named


def load_state_dict(model: Model) -> Mapping[str, Tensor]:
    """Load a model from its file; a model in memory is returned as it is. A quantised one becomes numbers."""
    source = open_stored(model) if isinstance(model, Path) else MemorySource(InMemory(model))
    with source:
        plain = dequantised(source)
        if plain is source and not isinstance(model, Path):
            return model
        return {key: plain.read(key) for key in plain.keys()}


def _requests(settings: Mapping[str, Any], rest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The main evaluator and the others, as dictionaries of `name` and parameters."""
    requests = [{"name": settings.get("name"), **rest}]
    for other in settings.get("also") or ():
        if isinstance(other, Mapping) and "name" not in other:
            raise ConfigError(f"evaluator.also: {dict(other)} does not say which evaluator: give its `name`.")
        requests.append(dict(other) if isinstance(other, Mapping) else {"name": other})
    return [request for request in requests if request["name"] is not None]


def _main_metric(
    settings: Mapping[str, Any], evaluations: Sequence[Evaluation], problems: Problems
) -> tuple[str | None, str]:
    """The metric that the configuration names, or the main evaluator's own, and its direction."""
    main = evaluations[0].evaluator if evaluations else None
    metric, direction = settings.get("metric"), settings.get("direction")
    if direction is not None and direction not in DIRECTIONS:
        hint = did_you_mean(str(direction), DIRECTIONS)
        problems.add(f"evaluator.direction: unknown direction '{direction}'.{hint}")
    if metric is None or (main and metric == main.metric):
        return (main.metric if main else None), direction or (main.direction if main else DIRECTIONS[1])
    owners = {e.prefix + e.evaluator.metric: e.evaluator.direction for e in evaluations}
    if direction is None and metric not in owners:
        near = f" Did you mean '{nearest(str(metric), owners)[0]}'?" if nearest(str(metric), owners) else ""
        problems.add(
            f"evaluator.metric={metric}: say whether more of it is better: evaluator.direction=maximize or "
            f"minimize.{near} The main metrics are {some(owners) or 'none'}."
        )
    return metric, direction or owners.get(metric, DIRECTIONS[0])


def _checked(evaluator: Evaluator, measured: Any) -> dict[str, float]:
    """Check that an evaluator returned numbers by name with its main metric, and convert them to float."""
    who = f"the evaluator '{evaluator.name}'"
    if not isinstance(measured, Mapping):
        raise EvaluationError(f"{who} must return a dictionary of numbers, not {type(measured).__name__}.")
    numbers: dict[str, float] = {}
    for name, value in measured.items():
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            shown = brief(value)
            raise EvaluationError(f"{who} returned {shown} for '{name}', which is not a number.") from None
    if evaluator.metric not in numbers:
        raise EvaluationError(
            f"{who} did not return its main metric '{evaluator.metric}', only {some(numbers) or 'nothing'}."
        )
    return numbers


def nan_warning(scoring: Scoring, measured: Mapping[str, float]) -> str | None:
    """A warning if the main metric is NaN or infinite, else None.

    Raises:
        EvaluationError: no evaluator returned the main metric.
    """
    if scoring.metric is None:
        return None
    if scoring.metric not in measured:
        hint = did_you_mean(scoring.metric, measured)
        raise EvaluationError(f"evaluator.metric={scoring.metric}: no evaluator returned it.{hint}")
    value = measured[scoring.metric]
    if math.isfinite(value):
        return None
    return f"{scoring.metric} is {value}: this point is listed last and never counts as the best"
