"""What is calibrated: a network with the weights of a model, and examples for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mecha_exp.errors import ConfigError, EvaluationError, MechaError

IGNORED = -100
"""A label that does not count, as in torch's cross entropy."""

LABELS = ("sampled", "true", "exact")
"""Which labels Fisher information is of: drawn from the model, those of the data, or all that there are."""

_MOST_CLASSES = 1000


@contextmanager
def example_named(number: int) -> Iterator[None]:
    """Name the example in an error of the user's code in the block."""
    try:
        yield
    except MechaError:
        raise
    except Exception as error:
        raise EvaluationError(f"example {number} fails: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Subject:
    """A network with the weights of a model, and examples for it. A module of the user's own returns one.

    Attributes:
        module: in evaluation mode, with the weights that it is to be measured with.
        examples: anything that `logits` takes, one for each example.
        logits: (example) -> logits [positions, classes] of the module; one position where an example has one
            label.
        labels: (example) -> true labels [positions]; -100 does not count. None where there are none.
        keys: the key of the model for each of the module's parameters; empty where they are the same.
        settings: what decides the examples beside their data, such as the length of windows.
    """

    module: nn.Module
    examples: Sequence[Any]
    logits: Callable[[Any], Tensor]
    labels: Callable[[Any], Tensor] | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def key_of(self, name: str) -> str:
        """The key of the model for a parameter of the module."""
        return self.keys.get(name, name)

    def check(self, labels: str) -> None:
        """Check that there are examples, the labels that are asked for, and no dropout.

        Raises:
            ConfigError: there are none, or the module is in training mode.
        """
        if not len(self.examples):
            raise ConfigError("data: there is no example in it.")
        if labels == "true" and self.labels is None:
            raise ConfigError("labels=true: the data have no labels. Use labels=sampled.")
        if any(module.training for module in self.module.modules()):
            raise ConfigError(
                f"{type(self.module).__name__} is in training mode, in which dropout and batch norms do not "
                "compute what the model computes. Call its eval()."
            )

    def log_likelihoods(self, number: int, labels: str, seed: int) -> list[tuple[float, Tensor]]:
        """The log-likelihoods of an example whose squared gradients are its Fisher information, with weights.

        `sampled` and `true` give one: the sum over positions of the log probability of a label, drawn from
        the model's own distribution, or the true one. `exact` gives one for each class, with its probability.

        Raises:
            ConfigError: exact labels of several positions, or of too many classes.
            EvaluationError: a logit is NaN.
        """
        example = self.examples[number]
        logits = self.logits(example)
        logits = logits.reshape(-1, logits.shape[-1]).float()
        scores = logits.log_softmax(-1)
        if bool(scores.isnan().any()):
            raise EvaluationError(
                f"the logits of example {number} are NaN. Leave the example out, or compute in float32: "
                "dtype=float32."
            )
        true = self.labels(example).reshape(-1).to(scores.device) if self.labels is not None else None
        if labels == "true":
            assert true is not None
            return [(1.0, -F.nll_loss(scores, true, reduction="sum", ignore_index=IGNORED))]
        if labels == "exact":
            if scores.shape[0] != 1 or scores.shape[1] > _MOST_CLASSES:
                raise ConfigError(
                    f"labels=exact takes each class of one label, and an example has {scores.shape[0]:,} "
                    f"labels of {scores.shape[1]:,} classes. Use labels=sampled."
                )
            return list(zip(scores[0].detach().exp().tolist(), scores[0].unbind(), strict=True))
        generator = torch.Generator().manual_seed(mixed(seed, number))
        drawn = torch.multinomial(scores.detach().exp().cpu(), 1, generator=generator)[:, 0].to(scores.device)
        if true is not None:
            drawn = torch.where(true == IGNORED, true, drawn)
        return [(1.0, -F.nll_loss(scores, drawn, reduction="sum", ignore_index=IGNORED))]


def mixed(seed: int, number: int) -> int:
    """A seed for each example, far from those of its neighbours."""
    return (seed * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9) % (1 << 63)
