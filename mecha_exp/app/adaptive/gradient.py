"""`sweep=gradient`: measures the listed points, learns weights of the experts, measures those, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from mecha_exp.app.adaptive.experiment import Experiment
from mecha_exp.app.adaptive.learning import Descent
from mecha_exp.app.adaptive.optimiser import Floats
from mecha_exp.app.adaptive.points import as_list, learned_setting
from mecha_exp.app.adaptive.progress import Progress, file_of, write_tables
from mecha_exp.app.adaptive.request import Request
from mecha_exp.app.adaptive.task_vectors import TaskVectors
from mecha_exp.app.config.jobs import Batch
from mecha_exp.app.sweep.settings import checked_count
from mecha_exp.errors import ConfigError
from mecha_exp.evaluation.learning.losses import bound_loss
from mecha_exp.lab.points import Setting
from mecha_exp.numbers import is_number
from mecha_exp.system.texts import json_hash
from mecha_exp.terminal.console import stdout


@dataclass(frozen=True)
class Learning:
    """The sweep: what is listed, and the descents.

    Attributes:
        experiment: the models.
        descents: what is learned, one after another.
        begun: the points that are listed.
        learns: what points with learned weights set beside these.
        words: makes the overrides of a point from what it sets.
    """

    experiment: Experiment
    descents: Sequence[Descent]
    begun: Sequence[Setting]
    learns: Setting
    words: Callable[[Setting], list[str]]

    @property
    def trials(self) -> int:
        """The number of points: those that are listed, and the checkpoints of each descent."""
        return len(self.begun) + sum(len(descent.checkpoints) for descent in self.descents)

    @property
    def notes(self) -> list[str]:
        """Warnings about losses of the user's, which nothing can check."""
        return list(dict.fromkeys(note for descent in self.descents if (note := descent.loss.note)))

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
                yield self.learns | learned_setting(descent.name, step, text)


def learning_of(request: Request) -> Learning:
    """The sweep that is asked for.

    Raises:
        ConfigError: anything that is wrong with it; nothing has been written then.
    """
    settings, scoring = request.config.sweep, request.scoring
    if not scoring.evaluations:
        raise ConfigError(
            "sweep=gradient learns by a loss on an evaluator's data: choose one with evaluator=digits or "
            "another that has logits, or one of your own (docs/learned-weights.md)."
        )
    experiment = Experiment.of(request.point)
    batch = None if settings.batch is None else checked_count("sweep.batch", settings.batch)
    seed = checked_count("sweep.seed", settings.seed, least=0)
    evaluation = scoring.evaluations[0]
    losses = {str(name): bound_loss(name, evaluation, batch, seed) for name in as_list(settings.loss)}
    low, high, rate = _numbers(settings)
    start = _start(settings.start, len(experiment.experts), low, high)
    checkpoints = _checkpoints(settings)
    descents = []
    for name, loss in losses.items():
        for kind, coefficients in experiment.coefficients([str(k) for k in as_list(settings.by)]).items():
            numbers = [start.tolist(), rate, low, high, checkpoints]
            decides = [loss.key, coefficients.identity, numbers, experiment.identity]
            key = json_hash(decides)[:16]
            arguments = (loss, coefficients, start, rate, low, high, checkpoints, key)
            descents.append(Descent(f"{name}/{kind}", *arguments))
    known = request.known
    return Learning(experiment, descents, known.begun, known.learns, request.words)


def _followed(descent: Descent, vectors: TaskVectors, path: Path) -> Progress:
    """Run a descent and show its loss now and then."""
    last = descent.checkpoints[-1]
    for progress in descent.run(vectors, path):
        if (step := progress.adam.steps) in descent.checkpoints:
            recent = progress.losses[-max(1, last // 10) :]
            mean = sum(recent) / len(recent)
            stdout.print(f"learning {descent.name}: step {step}/{last}, loss {mean:.4g}", markup=False)
    return descent.progress(path)


def _numbers(settings: DictConfig) -> tuple[float, float, float]:
    """The bounds of the weights, and the learning rate."""
    values = {name: settings[name] for name in ("low", "high", "rate")}
    for name, value in values.items():
        if not is_number(value) or not np.isfinite(value):
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
    values = as_list(value)
    numbers = values * experts if len(values) == 1 else values
    if len(numbers) != experts or not all(type(n) in (int, float) and low <= n <= high for n in numbers):
        raise ConfigError(
            f"sweep.start={value}: expected one number from {low:g} to {high:g} (sweep.low, sweep.high), or "
            f"a list of one for each of the {experts} experts."
        )
    return np.array(numbers, dtype=np.float64)


def _checkpoints(settings: DictConfig) -> list[int]:
    """The steps after which the weights are kept: evenly spread up to the end, each at most once."""
    steps = checked_count("sweep.steps", settings.steps)
    count = min(checked_count("sweep.checkpoints", settings.checkpoints), steps)
    return [round(steps * (i + 1) / count) for i in range(count)]
