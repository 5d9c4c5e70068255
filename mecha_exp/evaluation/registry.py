"""How an evaluator declares itself, and how a configuration finds it.

@evaluator("my_score", metric="score", direction="maximize")
def my_score(state_dict):
    return {"score": ...}
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from mecha_exp.errors import ConfigError, did_you_mean

Shapes = Mapping[str, tuple[int, ...]]
Score = Callable[[Mapping[str, torch.Tensor]], dict[str, float]]

BUILTIN = ("mecha_exp.evaluation.digits",)
DIRECTIONS = ("maximize", "minimize")


@dataclass(frozen=True)
class Evaluator:
    """A named way to measure a model.

    Attributes:
        name: what configurations call it.
        score: from a state dict to named numbers.
        metric: the one that a sweep is sorted by.
        direction: whether more of it is better: `maximize` or `minimize`.
        fits: whether it can measure a model of these keys and shapes.
    """

    name: str
    score: Score
    metric: str
    direction: str
    fits: Callable[[Shapes], bool]


_registry: dict[str, Evaluator] = {}


def evaluator(
    name: str,
    *,
    metric: str,
    direction: str = "maximize",
    fits: Callable[[Shapes], bool] = lambda shapes: True,
) -> Callable[[Score], Score]:
    """Register a function of a state dict to a dictionary of numbers; see `Evaluator`.

    Raises:
        ConfigError: a direction that is neither `maximize` nor `minimize`.
    """
    if direction not in DIRECTIONS:
        raise ConfigError(f"{name}: unknown direction '{direction}'.{did_you_mean(direction, DIRECTIONS)}")

    def register(score: Score) -> Score:
        _registry[name] = Evaluator(name, score, metric, direction, fits)
        return score

    return register


def find_evaluator(name: str | None, shapes: Shapes) -> Evaluator | None:
    """The evaluator of that name; for `auto` the built-in one that fits the model, if any does.

    Raises:
        ConfigError: there is none of that name, or it cannot measure this model.
    """
    if name is None:
        return None
    for module in BUILTIN:
        importlib.import_module(module)
    if name == "auto":
        return next((e for e in _registry.values() if e.score.__module__ in BUILTIN and e.fits(shapes)), None)
    if name not in _registry:
        raise ConfigError(f"unknown evaluator '{name}'.{did_you_mean(name, [*_registry, 'auto'])}")
    found = _registry[name]
    if not found.fits(shapes):
        raise ConfigError(
            f"evaluator={name} cannot measure this model: its keys and shapes are those of another network. "
            "Use evaluator=none, or an evaluator of your own."
        )
    return found
