"""Evaluators with their parameters, and the measurements that a configuration asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from mecha_exp.errors import EvaluationError, did_you_mean
from mecha_exp.evaluation.context import Context
from mecha_exp.evaluation.declaration import EXAMPLES, SPLIT, Evaluator
from mecha_exp.evaluation.identity import key_of
from mecha_exp.evaluation.isolation.pool import EvaluationPool, evaluation_pool
from mecha_exp.evaluation.isolation.process import evaluation_process
from mecha_exp.evaluation.isolation.request import Request
from mecha_exp.evaluation.measurement import Measurement, measured_by
from mecha_exp.evaluation.model import Model, load_state_dict
from mecha_exp.evaluation.racing import Fidelity, RaceSettings


@dataclass(frozen=True, eq=False)
class Evaluation:
    """An evaluator with the values of its parameters.

    Attributes:
        evaluator: the registered evaluator.
        parameters: all its parameters by name, defaults included, and the split if it has splits.
        prefix: of the names of its metrics: empty for the main evaluator, a name and `/` for others.
        context: the models that are measured, on which the key may depend.
    """

    evaluator: Evaluator
    parameters: Mapping[str, Any]
    prefix: str = ""
    context: Context | None = None

    @cached_property
    def key(self) -> str:
        """The key of a stored measurement, valid as a file name; see `identity.key_of`.

        Raises:
            ConfigError: a file that the evaluator reads does not exist.
        """
        return key_of(self.evaluator, self.parameters, self.context)

    @property
    def split(self) -> str | None:
        """The part of its data that it measures; None if it has no parts."""
        return self.parameters[SPLIT] if self.evaluator.splits else None

    @property
    def metric(self) -> str:
        """The full name of its main metric, without the split."""
        return self.full_name(self.evaluator.metric)

    def full_name(self, metric: str) -> str:
        """The full name of one of its metrics, without the split."""
        return self.prefix.removeprefix(f"{self.split}/") + metric

    def on(self, split: str) -> Evaluation:
        """Put the evaluator on another split, whose name comes first in the names of the metrics."""
        parameters = {**self.parameters, SPLIT: split}
        return replace(self, parameters=parameters, prefix=f"{split}/{self.prefix}")

    def among(self, examples: Mapping[str, list[int]]) -> Evaluation:
        """The evaluation of some examples, by task and position: parameters, so that its key is another."""
        return replace(self, parameters={**self.parameters, EXAMPLES: examples})

    def at(self, key: str, value: int) -> Evaluation:
        """The evaluation with another value of a parameter, such as less of a fidelity."""
        return replace(self, parameters={**self.parameters, key: value})

    def within(self, context: Context) -> Evaluation:
        """The evaluation of another model, whose tokenizer may be another one."""
        return self if self.evaluator.depends is None else replace(self, context=context)

    def score(self, state_dict: Mapping[str, Tensor], context: Context | None = None) -> Measurement:
        """What the evaluator measures, checked, without the prefix; see `measured_by`.

        Raises:
            EvaluationError: the evaluator raised, or did not return numbers by name.
        """
        return measured_by(self.evaluator, self.parameters, state_dict, context)


@dataclass(frozen=True, eq=False)
class Scoring:
    """The measurements to make of a model.

    Attributes:
        evaluations: the main one first; empty if only the weights are compared.
        metric: the name of the main metric; None if there is no evaluation.
        direction: whether more of `metric` is better.
        timeout: seconds that an evaluator may take for one model; None is unlimited.
        weight_stats: whether the model is compared with its inputs during the merge.
        plugins: the files that define the evaluators, for a separate process.
        workers: the number of processes that measure at the same time; 0 measures in this process, or with a
            timeout in one.
        devices: of the workers, in turn.
        race: how the points of a sweep race; None if all of them are measured whole.
        objectives: the metrics that are traded off against each other, `metric` first, each with its
            direction; empty where there is one.
    """

    evaluations: tuple[Evaluation, ...]
    metric: str | None
    direction: str
    timeout: float | None
    weight_stats: bool
    plugins: tuple[str, ...] = ()
    workers: int = 0
    devices: tuple[str, ...] = ()
    race: RaceSettings | Fidelity | None = None
    objectives: Mapping[str, str] = field(default_factory=dict)

    @property
    def units(self) -> dict[str, str]:
        """The units of the metrics, by their full names."""
        return {e.prefix + name: unit for e in self.evaluations for name, unit in e.evaluator.units.items()}

    @property
    def directions(self) -> dict[str, str]:
        """Whether more is better of the objectives, or of the main metric and of each further evaluator's."""
        if self.objectives:
            return dict(self.objectives)
        main = {} if self.metric is None else {self.metric: self.direction}
        return main | {e.metric: e.evaluator.direction for e in self.evaluations[1:] if e.metric not in main}

    @property
    def keys(self) -> dict[str, str]:
        """The key of each evaluation, by the prefix of its metrics."""
        return {evaluation.prefix: evaluation.key for evaluation in self.evaluations}

    @property
    def selection_split(self) -> str | None:
        """The split by which points are chosen; None if the main evaluator has none."""
        return self.evaluations[0].split if self.evaluations else None

    @property
    def report_split(self) -> str | None:
        """The split on which chosen points are reported; None if it is the one by which they are chosen."""
        split = self.evaluations[0].evaluator.report_split if self.evaluations else None
        return split if split != self.selection_split else None

    def on(self, split: str) -> Scoring:
        """The measurements of the evaluators that have this split, on it."""
        parts = [e.on(split) for e in self.evaluations if split in e.evaluator.splits and e.split != split]
        return replace(self, evaluations=tuple(parts))

    @property
    def is_isolated(self) -> bool:
        """Whether evaluators run in processes of their own."""
        return self.timeout is not None or self.workers > 0

    @property
    def pool(self) -> EvaluationPool:
        """The workers that measure at the same time."""
        return evaluation_pool(self.plugins, self.workers, self.devices)

    def start(
        self,
        evaluation: Evaluation,
        model: Model,
        context: Context | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Future[Measurement]:
        """Begin to measure a model by one evaluator in the pool, if it is wanted then; see `measure_one`."""
        return self.pool.submit(Request(evaluation, model, self.timeout, context), is_wanted)

    def measure(self, model: Model, context: Context | None = None) -> dict[str, float]:
        """Measure a model by every evaluator; returns the metrics by their full names; see `measure_one`."""
        measured: dict[str, float] = {}
        if not self.is_isolated and self.evaluations:
            model = load_state_dict(model)
        for evaluation in self.evaluations:
            metrics = self.measure_one(evaluation, model, context).metrics
            measured |= {evaluation.prefix + name: value for name, value in metrics.items()}
        return measured

    def measure_one(
        self, evaluation: Evaluation, model: Model, context: Context | None = None
    ) -> Measurement:
        """Measure a model by one evaluator; returns its numbers, without the prefix, and its outcomes.

        Args:
            evaluation: one of `evaluations`.
            model: a safetensors file, or a state dict in memory.
            context: what an evaluator may know of the point.

        With a timeout the evaluator runs in a separate process, which is killed when the time is over; with
        workers in one of theirs.

        Raises:
            EvaluationError: the evaluator raised, took too long, or did not return numbers by name.
        """
        if not self.is_isolated:
            return evaluation.score(load_state_dict(model), context)
        request = Request(evaluation, model, self.timeout, context)
        return self.pool.measure(request) if self.workers else evaluation_process(self.plugins).score(request)


def nan_warning(scoring: Scoring, measured: Mapping[str, float]) -> str | None:
    """A warning if the main metric, or another objective, is NaN or infinite, else None.

    Raises:
        EvaluationError: no evaluator returned it.
    """
    for metric in scoring.objectives or filter(None, [scoring.metric]):
        if metric not in measured:
            hint = did_you_mean(metric, measured)
            message = f"evaluator.metric={metric}: no evaluator returned it.{hint}"
            raise EvaluationError(message, "evaluator.metric")
        value = measured[metric]
        if not math.isfinite(value):
            return f"{metric} is {value}: this point is listed last and never counts as the best"
    return None
