"""Learns the weights of experts by gradient descent on a differentiable loss of the merged model.

The gradient of the loss with respect to the weight of an expert in a part of the model is the sum over the
keys of the part of <dL/dtheta, d>, d being the expert's task vector: one backward pass of one model and one
streaming pass over the experts give all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mecha_exp.app.adaptive.coefficients import Coefficients
from mecha_exp.app.adaptive.optimiser import Adam, Floats
from mecha_exp.app.adaptive.progress import Progress, read_progress, write_progress
from mecha_exp.app.adaptive.task_vectors import TaskVectors
from mecha_exp.errors import EvaluationError
from mecha_exp.evaluation.learning.losses import BoundLoss
from mecha_exp.system.cores import one_thread

SECONDS_BETWEEN_WRITES = 2.0
"""A kill loses at most so many seconds and a step."""


@dataclass(frozen=True)
class Descent:
    """One descent: a loss, what has weights, and the settings of the optimiser.

    Attributes:
        name: of the descent, such as `entropy/block`.
        loss: of the merged model.
        coefficients: what has weights.
        start: the weight of each expert to begin with, float64 [experts].
        rate: the learning rate of Adam.
        low, high: the bounds of a weight.
        checkpoints: the steps after which the weights are kept, ascending; the last one ends it.
        key: a hash of what decides the result.
    """

    name: str
    loss: BoundLoss
    coefficients: Coefficients
    start: Floats
    rate: float
    low: float
    high: float
    checkpoints: Sequence[int]
    key: str

    def run(self, vectors: TaskVectors, path: Path) -> Iterator[Progress]:
        """Learn, and yield the progress after each step; continues from what an earlier start has written.

        Args:
            vectors: the task vectors, opened.
            path: of the file that keeps the progress.

        Raises:
            EvaluationError: the loss or a gradient is NaN or infinite, or the loss failed.
        """
        progress = self.progress(path)
        written = time.monotonic()
        while progress.adam.steps < self.checkpoints[-1]:
            progress = self._step(progress, vectors)
            is_checkpoint = progress.adam.steps in self.checkpoints
            if is_checkpoint or time.monotonic() - written > SECONDS_BETWEEN_WRITES:
                write_progress(path, self.key, progress)
                written = time.monotonic()
            yield progress

    def progress(self, path: Path) -> Progress:
        """The progress in a file; the beginning where there is none, or another descent's."""
        start = np.tile(self.start, (len(self.coefficients.parts), 1))
        begun = Progress(Adam.begin(start, self.rate, self.low, self.high), (), {})
        return read_progress(path, self.key, begun)

    def _step(self, progress: Progress, vectors: TaskVectors) -> Progress:
        adam = progress.adam
        value, gradient = loss_and_gradient(self.loss, self.coefficients, vectors, adam.values, adam.steps)
        if not (math.isfinite(value) and np.isfinite(gradient).all()):
            what = f"is {value}" if not math.isfinite(value) else "has a gradient that is not finite"
            raise EvaluationError(
                f"learned={self.name}: the loss {what} at step {adam.steps}. Lower sweep.rate={self.rate:g}, "
                "narrow sweep.low and sweep.high, or begin with smaller weights (sweep.start)."
            )
        adam = adam.after(gradient)
        kept = dict(progress.kept)
        if adam.steps in self.checkpoints:
            kept[adam.steps] = adam.values
        return Progress(adam, (*progress.losses, value), kept)


def loss_and_gradient(
    loss: BoundLoss, coefficients: Coefficients, vectors: TaskVectors, values: Floats, step: int
) -> tuple[float, Floats]:
    """Compute the loss of the merged model and its gradient with respect to all weights.

    On one thread, so that the numbers do not depend on the number of cores.

    Args:
        loss: of a state dict.
        coefficients: what has weights.
        vectors: the task vectors.
        values: the weights, float64 [parts, experts].
        step: decides the batch.

    Returns:
        The loss, and the gradient, float64 [parts, experts].
    """
    with one_thread():
        model = vectors.merged(coefficients.by_key(values))
        leaves = {key: model[key].requires_grad_() for key in vectors.keys}
        value = _called(loss, model, step)
        value.backward()  # type: ignore[no-untyped-call]
        gradient: Mapping[str, Tensor] = {k: t.grad for k, t in leaves.items() if t.grad is not None}
        return value.item(), coefficients.gradient(vectors.products(gradient))


def _called(loss: BoundLoss, model: Mapping[str, Tensor], step: int) -> Tensor:
    """The loss of a model; what a user's code raises becomes an error that names it."""
    try:
        with torch.enable_grad():
            return loss(model, step)
    except EvaluationError:
        raise
    except Exception as error:
        raise EvaluationError(
            f"the loss '{loss.name}' failed at step {step}: {type(error).__name__}: {error}"
        ) from error
