"""Trains which entries of a task vector an expert needs for its task, as a mask that merges read.

Gradient descent on scores S brings down the loss of a network with the weights base + sigmoid(S) (expert -
base), with a penalty on the size of sigmoid(S). In the end the mask is 1 where S > 0, and 0 elsewhere.
Source: Localize-and-Stitch, He et al. 2024, arXiv:2408.13656.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mecha_exp.calibration.collectors import Collector
from mecha_exp.calibration.measurement import (
    Advance,
    Request,
    check_output,
    check_weights,
    header_of,
    write_statistics,
)
from mecha_exp.calibration.progress import Partial
from mecha_exp.calibration.subject import Subject
from mecha_exp.checkpoint import StateDictSource
from mecha_exp.errors import ConfigError, EvaluationError, Problems
from mecha_exp.sources.statistics.header import BASE_FINGERPRINT, MASK, StatisticsHeader, fingerprint


@dataclass(frozen=True)
class Training:
    """How a mask is trained; the defaults are those of the authors' code for CLIP.

    Attributes:
        density: share of the entries of the task vector, the largest ones, that begin in the mask.
        bias: scores begin at `bias` in the mask and at `-bias` beside it.
        steps: of gradient descent, each over all examples.
        rate: of the descent, which the penalty is not multiplied by.
        l1: strength of the penalty.
        variant: `paper` is an L1 penalty, which makes the mask smaller. `official` is what the authors' code
            does: it moves scores away from 0, in the mask and beside it.

    Raises:
        ConfigError: everything that is out of range.
    """

    density: float = 1e-5
    bias: float = 5.0
    steps: int = 10
    rate: float = 1e7
    l1: float = 1.0
    variant: str = "paper"

    def __post_init__(self) -> None:
        problems = Problems()
        problems.add_all(wrong_settings(asdict(self)))
        problems.raise_as(ConfigError)


def wrong_settings(settings: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with settings of a training, of which some may be missing."""
    if settings.get("variant", "paper") not in ("paper", "official"):
        yield f"variant: expected paper or official, got {settings['variant']}"
    if not 0 <= settings.get("density", 0) <= 1:
        yield f"density: expected a number from 0 to 1, got {settings['density']}"
    for name in ("bias", "rate"):
        if not 0 < settings.get(name, 1) < math.inf:
            yield f"{name}: expected a number above 0, got {settings[name]}"
    for name in ("l1", "steps"):
        if not 0 <= settings.get(name, 0) < math.inf:
            yield f"{name}: expected 0 or more, got {settings[name]}"


class Scores(Collector):
    """The scores S of the entries of a parameter, in float64.

    Attributes:
        parameter: of the module, with the weights of the expert when this is made.
        threshold: of magnitudes of the task vector; what is larger begins in the mask.
    """

    kind = MASK

    def __init__(self, key: str, parameter: nn.Parameter, base: Tensor, training: Training) -> None:
        super().__init__(key, parameter.shape)
        self.parameter = parameter
        self.threshold = torch.inf
        self._base = base.to(parameter)
        self.delta = parameter.detach() - self._base
        self._training = training

    def start(self) -> None:
        bias = self._training.bias
        self.total = torch.where(self.delta.abs() > self.threshold, bias, -bias).double().cpu()

    def show(self) -> None:
        """Give the module base + sigmoid(S) (expert - base)."""
        with torch.no_grad():
            self.parameter.copy_(self._base + self.total.sigmoid().to(self.delta) * self.delta)

    def step(self, gradient: Tensor) -> None:
        """S -= sigmoid'(S) (rate g d + l1 p), g the gradient of the loss by the parameter, d the task vector.

        p is 1, or -sign(S) for the variant `official`, 0 counting as below 0.
        """
        mask = self.total.sigmoid()
        push = torch.ones_like(mask)
        if self._training.variant == "official":
            push = torch.where(self.total > 0, -1.0, 1.0).double()
        change = self._training.rate * gradient * self.delta.double().cpu() + self._training.l1 * push
        self.total -= mask * (1 - mask) * change

    def result(self, examples: int) -> Tensor:
        return (self.total > 0).float()


def train_mask(
    subject: Subject,
    stored: StateDictSource,
    base: StateDictSource,
    training: Training,
    request: Request,
    output: Path,
    advance: Advance = lambda examples: None,
) -> tuple[StatisticsHeader, float]:
    """Train the mask of an expert, and write it: 0 or 1 for each entry of the module's parameters, float32.

    Each step takes the mean gradient over all examples, one by one, in float64. After each the scores are
    written beside the output, and the same call goes on there.

    Args:
        subject: the network with the weights of `stored`, and labelled examples of its task.
        stored: the expert.
        base: the model that it was fine-tuned from.
        training: how.
        request: what the header says of model and data.
        output: a `.safetensors` file.
        advance: is told of progress; each step takes all examples.

    Returns:
        the header of the file, and the share of the entries that the mask has.

    Raises:
        ConfigError: there are no examples or labels, the base lacks a parameter, the module does not have the
            weights of the expert, or the output is an input.
        EvaluationError: a gradient is NaN or infinite.
    """
    if subject.labels is None:
        raise ConfigError("kind=mask: the data have no labels, and a mask is trained on them.")
    subject.check("true")
    check_output(output, (*stored.files, *base.files, Path(request.data)))
    check_weights(subject, stored)
    scores = _scores(subject, stored, base, training)
    settings = {
        **request.settings,
        **asdict(training),
        "base": base.name,
        BASE_FINGERPRINT: fingerprint(base),
    }
    request = replace(request, kinds=(MASK,), labels="true", settings=settings)
    header = header_of(subject, stored, request, scores)
    with Partial(output, json.dumps(asdict(header), sort_keys=True)) as partial:
        _descend(subject, scores, training, partial, advance)
        partial.finish(0, scores, len(subject.examples))
        write_statistics(partial, header, output)
    kept = sum(int((score.total > 0).sum()) for score in scores)
    return header, kept / sum(score.total.numel() for score in scores)


def _scores(
    subject: Subject, stored: StateDictSource, base: StateDictSource, training: Training
) -> list[Scores]:
    """The scores of all parameters, with the threshold that `density` of the task vector exceeds."""
    scores = []
    for name, parameter in subject.module.named_parameters():
        key = subject.key_of(name)
        if not parameter.is_floating_point() or key not in stored:
            continue
        if key not in base or base.info(key).shape != tuple(parameter.shape):
            raise ConfigError(
                f"base: {base.name} has no '{key}' of shape {list(parameter.shape)}, as {stored.name} has. "
                "Name the model that it was fine-tuned from."
            )
        scores.append(Scores(key, parameter, base.read(key), training))
    sizes = torch.cat([score.delta.abs().flatten().float().cpu() for score in scores])
    largest = int(training.density * len(sizes))
    for score in scores:
        score.threshold = float(sizes.kthvalue(len(sizes) - largest + 1).values) if largest else torch.inf
    return scores


def _descend(
    subject: Subject, scores: Sequence[Scores], training: Training, partial: Partial, advance: Advance
) -> None:
    """Take the steps, from where an earlier run has stopped."""
    done = partial.resume(0, scores)
    for step in range(done, training.steps):
        for score in scores:
            score.show()
        gradients = _mean_gradients(subject, scores, advance)
        for score, gradient in zip(scores, gradients, strict=True):
            score.step(gradient)
        partial.save(0, scores, step + 1)


def _mean_gradients(subject: Subject, scores: Sequence[Scores], advance: Advance) -> list[Tensor]:
    """The mean over examples of the gradients of -log p(labels) by the parameters, in float64.

    Raises:
        EvaluationError: one is NaN or infinite.
    """
    parameters = [score.parameter for score in scores]
    totals = [torch.zeros(score.shape, dtype=torch.float64) for score in scores]
    for number in range(len(subject.examples)):
        ((_, likelihood),) = subject.log_likelihoods(number, "true", 0)
        gradients = torch.autograd.grad(-likelihood, parameters, allow_unused=True)
        for score, total, gradient in zip(scores, totals, gradients, strict=True):
            if gradient is None:
                continue
            if not bool(gradient.isfinite().all()):
                raise EvaluationError(
                    f"the gradient of '{score.key}' is NaN or infinite at example {number}. Leave the "
                    "example out, compute in float32 (dtype=float32), or take a smaller rate."
                )
            total += gradient.double().cpu()
        advance(1)
    return [total / len(subject.examples) for total in totals]
