"""`sweep=gradient`: measures the listed points, learns weights of the experts, measures those, too."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig

from mecha_exp.app.adaptive.coefficients import Coefficients
from mecha_exp.app.adaptive.learning import Descent
from mecha_exp.app.adaptive.points import AdaptivePoints, as_list, learned_setting
from mecha_exp.app.adaptive.progress import Progress, file_of, write_tables
from mecha_exp.app.adaptive.task_vectors import TaskVectors
from mecha_exp.app.hydra.compose import Batch
from mecha_exp.app.point import Point
from mecha_exp.architectures.anatomy import Anatomy
from mecha_exp.engine import Job, plan, run_plan
from mecha_exp.errors import ConfigError
from mecha_exp.evaluation import Scoring
from mecha_exp.evaluation.learning.losses import bound_loss
from mecha_exp.graph.by_key import by_key
from mecha_exp.graph.nodes import MergeNode, ModelNode, Node, call
from mecha_exp.lab.points import Setting

# mypy does not see the packages that live beside mecha_exp in the checkout.
from mecha_exp.methods.tasks import elected_total  # type: ignore[import-not-found, unused-ignore]
from mecha_exp.sources.source import infos_of
from mecha_exp.terminal import stdout

PLAIN, ELECTED = "task_arithmetic", "elected_task_arithmetic"
METHODS = (PLAIN, ELECTED)
"""The methods that are linear in their weights: of task vectors, and of those that TIES would merge."""
VECTORS = "task_vectors"
"""The folder in that of the sweep for task vectors that have to be made; it is gone at the end."""
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Experiment:
    """The models whose weights are learned.

    Attributes:
        point: a point of the sweep, with the engine's options.
        base: the base.
        experts: the experts, in the order of their weights.
        method: one of `METHODS`.
        settings: the other arguments of the method.
    """

    point: Point
    base: ModelNode
    experts: tuple[ModelNode, ...]
    method: str
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, point: Point) -> Experiment:
        """The models of a point.

        Raises:
            ConfigError: it is not base + sum_i w_i (expert_i - base) of files.
        """
        node = point.recipe
        arguments: Mapping[str, Any] = dict(node.arguments) if isinstance(node, MergeNode) else {}
        models = arguments.get("models", ())
        method = node.method.identifier if isinstance(node, MergeNode) else ""
        if method not in METHODS or not all(isinstance(m, ModelNode) for m in (arguments["base"], *models)):
            raise ConfigError(
                "sweep=gradient learns the weights of base + sum of weight (expert - base), of files. Use "
                "recipe=task_arithmetic, or recipe=elected_task_arithmetic (AdaMerging++), with models.base "
                "and models.experts."
            )
        given = ("base", "models", "weights", "scale")
        settings = {name: value for name, value in arguments.items() if name not in given}
        return cls(point, arguments["base"], tuple(models), method, settings)

    @property
    def names(self) -> list[str]:
        """The names of the experts."""
        return [self.point.names[expert] for expert in self.experts]

    def recipe(self, coefficients: Coefficients, values: Floats) -> Node:
        """The recipe with these weights, as a point has it."""
        weights = coefficients.weights(values)
        given = weights if isinstance(weights, list) else by_key(weights)
        return call(self.method, self.base, *self.experts, weights=given, scale=1.0, **self.settings)

    @property
    def identity(self) -> list[str]:
        """What is merged beside the weights, as texts: methods, settings, and the contents of the models."""
        contents = [self.point.contents[self.point.files[m]] for m in (self.base, *self.experts)]
        return [self.method, *(f"{k}={v!r}" for k, v in self.settings.items()), *contents]

    @contextmanager
    def opened(self, folder: Path) -> Iterator[TaskVectors]:
        """The task vectors, opened as the engine opens them.

        Those of which entries were chosen are made in one pass, as files of differences in float32.

        Args:
            folder: of the sweep.
        """
        if self.method == PLAIN:
            with plan([self.point.job({})], self.point.options) as planned:
                yield TaskVectors.of(self.base, self.experts, planned.sources)
            return
        vectors = folder / VECTORS
        try:
            made = self._made_vectors(vectors)
            recipe = call(PLAIN, self.base, *made, weights=[1.0] * len(made), scale=1.0)
            with plan([Job(recipe, {})], self.point.options) as planned:
                yield TaskVectors.of(self.base, made, planned.sources)
        finally:
            shutil.rmtree(vectors, ignore_errors=True)

    def _made_vectors(self, folder: Path) -> tuple[ModelNode, ...]:
        """Write the entries of each task vector that are merged; weights of 0 leave the other experts out."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{place}.safetensors" for place in range(len(self.experts))]
        jobs = []
        for place, path in enumerate(paths):
            alone = [float(other == place) for other in range(len(paths))]
            recipe = elected_total(self.base, *self.experts, weights=alone, **self.settings)
            jobs.append(Job(recipe, path, torch.float32, durable=False))
        with plan(jobs, self.point.options) as planned:
            run_plan(planned)
        return tuple(ModelNode(str(path.absolute()), "delta") for path in paths)

    def coefficients(self, kinds: Sequence[str]) -> dict[str, Coefficients]:
        """What has weights, for each kind; reads headers only."""
        with plan([self.point.job({})], self.point.options) as planned:
            vectors = TaskVectors.of(self.base, self.experts, planned.sources)
            anatomy = Anatomy.of(infos_of(vectors.base))
        name, count = self.point.names[self.base], len(self.experts)
        return {kind: Coefficients.of(kind, vectors.keys, anatomy, count, name) for kind in kinds}

    def check_merge(self, coefficients: Coefficients, vectors: TaskVectors) -> None:
        """Check that the engine merges what is learned: other weights for each part and expert, key by key.

        Raises:
            ConfigError: a key comes out otherwise, such as running statistics that are pooled.
        """
        values = _different_values(coefficients)
        made: dict[str, torch.Tensor] = {}
        job = Job(self.recipe(coefficients, values), made, torch.float32)
        with plan([job], self.point.options) as planned:
            run_plan(planned)
        for key, tensor in vectors.merged(coefficients.by_key(values)).items():
            if key in vectors.keys and not _alike(made.get(key), tensor):
                raise ConfigError(
                    f"sweep=gradient: the engine does not merge '{key}' as base + sum of weight (expert - "
                    "base), so a gradient would be that of another model. For running statistics set "
                    "engine.running_stats=merge."
                )


@dataclass(frozen=True)
class Learning:
    """The sweep: what is listed, and the descents.

    Attributes:
        experiment: the models.
        descents: what is learned, one after another.
        begun: the points that are listed.
        words: makes the overrides of a point from what it sets.
    """

    experiment: Experiment
    descents: Sequence[Descent]
    begun: Sequence[Setting]
    words: Callable[[Setting], list[str]]

    @property
    def trials(self) -> int:
        """The number of points: those that are listed, and the checkpoints of each descent."""
        return len(self.begun) + sum(len(descent.checkpoints) for descent in self.descents)

    def check_folder(self, folder: Path) -> None:
        """Check that the progress in a folder can be read; what belongs to other descents is not used.

        Raises:
            ConfigError: it is damaged.
        """
        for descent in self.descents:
            descent.progress(file_of(folder, descent.name))

    def batches(self, folder: Path) -> Iterator[Batch]:
        """Yield the listed points, then those with learned weights.

        Raises:
            MechaError: the weights cannot be learned.
        """
        yield Batch([self.words(setting) for setting in self.begun])
        learned = self._settings(self._learned(folder))
        yield Batch([self.words(setting) for setting in learned], first=len(self.begun))

    def _learned(self, folder: Path) -> dict[str, Progress]:
        """The progress of each descent at its end."""
        learned = {}
        with self.experiment.opened(folder) as vectors:
            for descent in self.descents:
                self.experiment.check_merge(descent.coefficients, vectors)
                learned[descent.name] = _followed(descent, vectors, file_of(folder, descent.name))
                parts = {d.name: d.coefficients.parts for d in self.descents}
                write_tables(folder, learned, parts, self.experiment.names)
        return learned

    def _settings(self, learned: Mapping[str, Progress]) -> Iterator[Setting]:
        for descent in self.descents:
            for step in descent.checkpoints:
                text = descent.coefficients.text(learned[descent.name].kept[step])
                yield learned_setting(descent.name, step, text)


def learning_of(
    config: DictConfig,
    point: Point,
    scoring: Scoring,
    known: AdaptivePoints,
    words: Callable[[Setting], list[str]],
) -> Learning:
    """The sweep that a configuration asks for.

    Args:
        config: of a point, with the settings of `sweep`.
        point: one of its points.
        scoring: what measures it.
        known: its points that are known beforehand.
        words: makes the overrides of a point from what it sets.

    Raises:
        ConfigError: anything that is wrong with it; nothing has been written then.
    """
    settings = config.sweep
    if not scoring.evaluations:
        raise ConfigError(
            "sweep=gradient learns by a loss on an evaluator's data: choose one with evaluator=digits or "
            "another that has logits, or one of your own (docs/learned-weights.md)."
        )
    experiment = Experiment.of(point)
    batch = None if settings.batch is None else _count("sweep.batch", settings.batch)
    seed = _count("sweep.seed", settings.seed, least=0)
    evaluation = scoring.evaluations[0]
    losses = {str(name): bound_loss(name, evaluation, batch, seed) for name in as_list(settings.loss)}
    low, high, rate = _numbers(settings)
    start = _start(settings.start, len(experiment.experts), low, high)
    checkpoints = _checkpoints(settings)
    descents = []
    for name, loss in losses.items():
        for kind, coefficients in experiment.coefficients([str(k) for k in as_list(settings.by)]).items():
            decides = [loss.key, kind, start.tolist(), rate, low, high, checkpoints, experiment.identity]
            key = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]
            arguments = (loss, coefficients, start, rate, low, high, checkpoints, key)
            descents.append(Descent(f"{name}/{kind}", *arguments))
    return Learning(experiment, descents, known.begun, words)


def _followed(descent: Descent, vectors: TaskVectors, path: Path) -> Progress:
    """Run a descent and show its loss now and then."""
    last = descent.checkpoints[-1]
    for progress in descent.run(vectors, path):
        if (step := progress.adam.steps) in descent.checkpoints:
            recent = progress.losses[-max(1, last // 10) :]
            mean = sum(recent) / len(recent)
            stdout.print(f"learning {descent.name}: step {step}/{last}, loss {mean:.4g}", markup=False)
    return descent.progress(path)


def _different_values(coefficients: Coefficients) -> Floats:
    """Weights from 0.1 to 0.9 with three digits, of which neighbours differ."""
    parts, experts = coefficients.shape
    numbers = [round(0.1 + 0.8 * (i * 0.6180339887 % 1), 3) for i in range(parts * experts)]
    return np.array(numbers, dtype=np.float64).reshape(parts, experts)


def _alike(made: torch.Tensor | None, expected: torch.Tensor) -> bool:
    """Whether a merged tensor is what the sum of task vectors gives, up to rounding."""
    if made is None or made.shape != expected.shape:
        return False
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    return bool(((made - expected).abs() <= 1e-4 * scale).all())


def _numbers(settings: DictConfig) -> tuple[float, float, float]:
    """The bounds of the weights, and the learning rate."""
    values = {name: settings[name] for name in ("low", "high", "rate")}
    for name, value in values.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not np.isfinite(value):
            raise ConfigError(f"sweep.{name}={value}: expected a finite number.")
    if values["rate"] <= 0:
        raise ConfigError(f"sweep.rate={values['rate']}: expected a learning rate above 0, as 0.001.")
    if values["low"] >= values["high"]:
        raise ConfigError(
            f"sweep.low={values['low']} is not below sweep.high={values['high']}: no weight lies between."
        )
    return float(values["low"]), float(values["high"]), float(values["rate"])


def _start(value: Any, experts: int, low: float, high: float) -> Floats:
    """The weight of each expert to begin with."""
    given = as_list(value)
    numbers = given * experts if len(given) == 1 else given
    if len(numbers) != experts or not all(isinstance(n, int | float) and low <= n <= high for n in numbers):
        raise ConfigError(
            f"sweep.start={value}: expected one number from {low:g} to {high:g} (sweep.low, sweep.high), or "
            f"a list of one for each of the {experts} experts."
        )
    return np.array(numbers, dtype=np.float64)


def _checkpoints(settings: DictConfig) -> list[int]:
    """The steps after which the weights are kept: evenly spread up to the end, each at most once."""
    steps = _count("sweep.steps", settings.steps)
    count = min(_count("sweep.checkpoints", settings.checkpoints), steps)
    return [round(steps * (i + 1) / count) for i in range(count)]


def _count(key: str, value: Any, least: int = 1) -> int:
    if type(value) is not int or value < least:
        raise ConfigError(f"{key}={value}: expected a whole number, {least} or more.")
    return value
