"""Losses of merged models, bound to an evaluator: entropy, cross entropy, or a user's own, batch by batch."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from mecha_exp.engine.code_hash import of_function
from mecha_exp.errors import ConfigError, EvaluationError, did_you_mean, some
from mecha_exp.evaluation.declaration import SPLIT
from mecha_exp.evaluation.learning.registry import (
    CROSS_ENTROPY,
    ENTROPY,
    OF_LOGITS,
    evaluators_with_logits,
    find_logits,
    find_own_loss,
    known_losses,
)
from mecha_exp.evaluation.scoring import Evaluation
from mecha_exp.system.texts import json_hash

Positions = dict[str, list[int]]


def mean_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean entropy of softmax(logits), in nats: -sum_c p_c log p_c, over examples. Labels are not used.

    Args:
        logits: float [examples, classes].
        labels: ignored.

    Source: AdaMerging, Yang et al. 2024, arXiv:2310.02575.
    """
    log_p = logits.log_softmax(1)
    return -(log_p.exp() * log_p).sum(1).mean()


def mean_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean cross entropy of softmax(logits) with the labels, in nats.

    Args:
        logits: float [examples, classes].
        labels: int64 [examples].
    """
    return F.cross_entropy(logits, labels)


_OF_LOGITS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    ENTROPY: mean_entropy,
    CROSS_ENTROPY: mean_cross_entropy,
}


@dataclass(frozen=True, eq=False)
class BoundLoss:
    """A differentiable loss of a state dict, with the data and the settings that it is computed on.

    Attributes:
        name: such as `entropy`.
        evaluation: the evaluator whose data it uses, with its parameters.
        function: registered logits, or a user's loss.
        batch: examples of each task in a step; None is all of them. A user's loss draws its own.
        seed: of the batches.
    """

    name: str
    evaluation: Evaluation
    function: Callable[..., Any]
    batch: int | None = 16
    seed: int = 0
    _sizes: dict[str, int] = field(default_factory=dict, repr=False)

    def __call__(self, state_dict: Mapping[str, Tensor], step: int) -> Tensor:
        """The loss at a step, a scalar; of logits the sum over tasks of the mean over a batch of examples.

        Raises:
            EvaluationError: the function returned something else, or what carries no gradient.
        """
        if self.name in OF_LOGITS:
            value = self._of_logits(state_dict, step)
        else:
            value = self.function(dict(state_dict), **self._accepted({"step": step, "seed": self.seed}))
        return self._checked(value)

    @property
    def note(self) -> str | None:
        """What nothing can check of a user's loss: that it leaves test alone; None of a built-in one."""
        used, unseen = self.evaluation.split, self.evaluation.evaluator.report_split
        if self.name in OF_LOGITS or used == unseen:
            return None
        return f"the loss '{self.name}' is yours: nothing checks that it uses '{used}' alone, not '{unseen}'"

    @property
    def key(self) -> str:
        """A hash of what decides its values beside the models: code, parameters, data, batches."""
        own = of_function(inspect.unwrap(self.function))
        content = [self.name, self.evaluation.key, own, self.batch, self.seed]
        return json_hash(content, default=str)[:16]

    def positions(self, state_dict: Mapping[str, Tensor], step: int) -> Positions | None:
        """The examples of a step, by task: drawn without replacement from seed, step and task alone."""
        if self.batch is None:
            return None
        if not self._sizes:
            with torch.no_grad():
                everything = self._logits(state_dict, None)
            self._sizes.update({task: len(labels) for task, (_, labels) in everything.items()})
        return {
            task: sorted(random.Random(f"{self.seed}/{step}/{task}").sample(range(n), min(self.batch, n)))
            for task, n in self._sizes.items()
        }

    def _of_logits(self, state_dict: Mapping[str, Tensor], step: int) -> Tensor:
        by_task = self._logits(state_dict, self.positions(state_dict, step))
        return cast(Tensor, sum(_OF_LOGITS[self.name](*pair) for pair in by_task.values()))

    def _logits(
        self, state_dict: Mapping[str, Tensor], examples: Positions | None
    ) -> Mapping[str, tuple[Tensor, Tensor]]:
        returned = self.function(dict(state_dict), **self._accepted({"examples": examples}))
        is_sound = isinstance(returned, Mapping) and returned and all(map(_is_pair, returned.values()))
        if not is_sound:
            raise EvaluationError(
                f"the logits of the evaluator '{self.evaluation.evaluator.name}' must be (logits, labels) by "
                "task: float [examples, classes] and int64 [examples]."
            )
        return cast(Mapping[str, tuple[Tensor, Tensor]], returned)

    def _accepted(self, more: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords that the function declares, of the evaluator's parameters and others."""
        offered = {**self.evaluation.parameters, **more}
        declared = list(inspect.signature(self.function).parameters)[1:]
        return {name: offered[name] for name in declared if name in offered}

    def _checked(self, value: Any) -> Tensor:
        if not isinstance(value, Tensor) or value.ndim != 0:
            got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise EvaluationError(f"the loss '{self.name}' must return a scalar tensor, not {got}.")
        if not value.requires_grad:
            raise EvaluationError(
                f"the loss '{self.name}' does not depend on the tensors of the state dict, or was computed "
                "without gradients. Leave out detach(), .data, torch.no_grad() and torch.inference_mode()."
            )
        return value


def bound_loss(name: Any, evaluation: Evaluation, batch: int | None = 16, seed: int = 0) -> BoundLoss:
    """The loss of a name, over the data of an evaluator.

    Args:
        name: `entropy`, `cross_entropy`, or that of a loss of the user's.
        evaluation: of the evaluator, on the split by which points are chosen.
        batch: examples of each task in a step; None is all.
        seed: of the batches.

    Raises:
        ConfigError: there is no such loss, the evaluator has no logits for it, it cannot use some examples
            alone, or it cannot be told which part of the data to use.
    """
    own = find_own_loss(str(name))
    if own is not None:
        if evaluation.evaluator.splits and SPLIT not in inspect.signature(own).parameters:
            raise ConfigError(
                f"the loss '{name}' has no parameter 'split', and its evaluator has splits: weights are "
                "learned on validation, and test is left alone. Add it, and use that part of the data alone; "
                "a loss that uses no data has it, too."
            )
        return BoundLoss(str(name), evaluation, own, batch, seed)
    if name not in OF_LOGITS:
        raise ConfigError(
            f"sweep.loss={name}: there is no such loss.{did_you_mean(str(name), known_losses())}"
        )
    evaluator = evaluation.evaluator.name
    logits = find_logits(evaluator)
    if logits is None:
        raise ConfigError(
            f"sweep.loss={name}: the evaluator '{evaluator}' gives no logits to differentiate. Register them "
            f'with @logits_of("{evaluator}") in a plugin, write a loss of your own with @loss("NAME") and '
            "choose it by sweep.loss=NAME, or take an evaluator that has logits: "
            f"{some(evaluators_with_logits()) or 'digits, mini8'}."
        )
    if batch is not None and "examples" not in inspect.signature(logits).parameters:
        raise ConfigError(
            f"sweep.batch={batch}: the logits of the evaluator '{evaluator}' have no parameter 'examples'. "
            "Add it, or use all examples in each step with sweep.batch=null."
        )
    if evaluation.evaluator.splits and SPLIT not in inspect.signature(logits).parameters:
        raise ConfigError(
            f"the logits of the evaluator '{evaluator}' have no parameter 'split', and the evaluator has "
            "splits: weights are learned on validation, and test is left alone. Add it."
        )
    return BoundLoss(str(name), evaluation, logits, batch, seed)


def _is_pair(value: Any) -> bool:
    """Whether a value is logits [examples, classes] with labels [examples]."""
    if not isinstance(value, tuple) or len(value) != 2 or not all(isinstance(v, Tensor) for v in value):
        return False
    logits, labels = value
    return bool(logits.ndim == 2 and labels.shape == logits.shape[:1] and len(labels))
