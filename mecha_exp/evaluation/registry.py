"""The decorator that registers evaluators, and the registry in which configurations look them up.

@evaluator("my_score", metric="score", direction="maximize")
def my_score(state_dict, *, images: int = 100):
    return {"score": ...}
"""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mecha_exp.errors import ConfigError, Problems, brief, did_you_mean

Shapes = Mapping[str, tuple[int, ...]]
Score = Callable[..., Mapping[str, float]]

BUILTIN = ("mecha_exp.evaluation.digits", "mecha_exp.evaluation.mini8")
DIRECTIONS = ("maximize", "minimize")
AUTO = "auto"
WEIGHT_STATS = "weight_stats"
"""The name of the comparison with the inputs, which is measured during the merge, without a state dict."""
SETTINGS = ("name", "also", "metric", "direction", "timeout", WEIGHT_STATS)
"""Keys of the configuration's `evaluator` that are not parameters of an evaluator."""


@dataclass(frozen=True)
class Evaluator:
    """A named way to measure a model.

    Attributes:
        name: its name in configurations.
        score: a function of a state dict, and parameters by name, to named numbers.
        metric: the number that a sweep is sorted by.
        direction: whether more of `metric` is better: `maximize` or `minimize`.
        fits: whether it can measure a model of these keys and shapes.
        version: of its computation; another version makes stored evaluations stale.
        units: of the numbers, for tables and figures.
    """

    name: str
    score: Score
    metric: str
    direction: str
    fits: Callable[[Shapes], bool]
    version: int | str = 1
    units: Mapping[str, str] = field(default_factory=dict)

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The parameters beside the state dict, by name."""
        listed = list(inspect.signature(self.score).parameters.values())[1:]
        return {p.name: p for p in listed if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}

    def bind(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The values of all parameters, defaults included.

        Raises:
            ConfigError: all arguments that are unknown, missing, or not of the annotated type.
        """
        problems, parameters = Problems(), self.parameters
        for name in arguments:
            if name not in parameters:
                hint = did_you_mean(name, [*parameters, *SETTINGS])
                problems.add(f"evaluator.{name}: the evaluator '{self.name}' has no such parameter.{hint}")
        bound: dict[str, Any] = {}
        types = _annotations(self.score)
        for name, parameter in parameters.items():
            value = bound[name] = arguments.get(name, parameter.default)
            if value is inspect.Parameter.empty:
                problems.add(f"evaluator.{name}: the evaluator '{self.name}' needs a value for it.")
            elif name in arguments and not _is_a(value, types.get(name)):
                expected = types[name].__name__
                problems.add(f"evaluator.{name}: expected {expected}, got {brief(value)}.")
        problems.raise_as(ConfigError)
        return bound


_registry: dict[str, Evaluator] = {}


def evaluator(
    name: str,
    *,
    metric: str,
    direction: str = "maximize",
    fits: Callable[[Shapes], bool] = lambda shapes: True,
    version: int | str = 1,
    units: Mapping[str, str] | None = None,
) -> Callable[[Score], Score]:
    """Register a function of a state dict, and parameters, to a dictionary of numbers.

    Args:
        name: its name in configurations, as in `evaluator.name=my_score`.
        metric: the number that a sweep is sorted by, and the objective of an optimiser.
        direction: `maximize` if more of `metric` is better, or `minimize`.
        fits: whether it can measure a model of these keys and shapes; any, by default.
        version: raise it when the function computes something else: stored numbers are then computed again.
        units: of the numbers, as in `{"loss": "nats"}`.

    The function's first parameter is the state dict (key to tensor); the others are set by the keys of the
    configuration's `evaluator`, are checked against their annotations (`int`, `float`, `str`, `bool`), and
    have their defaults.

    Raises:
        ConfigError: the direction is unknown, or a parameter has the name of a setting.

    >>> @evaluator("sparsity", metric="zeros")
    ... def sparsity(state_dict, *, below: float = 0.0):
    ...     tensors = state_dict.values()
    ...     return {"zeros": sum(int((t.abs() <= below).sum()) for t in tensors)}
    """
    if direction not in DIRECTIONS:
        raise ConfigError(f"{name}: unknown direction '{direction}'.{did_you_mean(direction, DIRECTIONS)}")

    def register(score: Score) -> Score:
        entry = Evaluator(name, score, metric, direction, fits, version, dict(units or {}))
        if reserved := [p for p in entry.parameters if p in SETTINGS]:
            raise ConfigError(f"{name}: call the parameter '{reserved[0]}' something else: it is a setting.")
        _registry[name] = entry
        return score

    return register


def all_evaluators() -> dict[str, Evaluator]:
    """All registered evaluators, by name."""
    for module in BUILTIN:
        importlib.import_module(module)
    return dict(sorted(_registry.items()))


def find_evaluator(name: str | None, shapes: Shapes) -> Evaluator | None:
    """The evaluator with this name; for `auto` the built-in one if it fits the model, else None.

    Raises:
        ConfigError: no evaluator has this name, or it cannot measure this model.
    """
    if name is None:
        return None
    evaluators = all_evaluators()
    if name == AUTO:
        return evaluators["digits"] if evaluators["digits"].fits(shapes) else None
    if name not in evaluators:
        hint = did_you_mean(name, [*evaluators, AUTO, WEIGHT_STATS])
        raise ConfigError(
            f"unknown evaluator '{name}'.{hint} One of yours is known when its file is among the `plugins`."
        )
    chosen = evaluators[name]
    if not chosen.fits(shapes):
        raise ConfigError(
            f"evaluator={name} cannot measure this model: its keys or shapes do not match its network. "
            "Use evaluator=none, or an evaluator of your own."
        )
    return chosen


def _annotations(score: Score) -> dict[str, type]:
    """The annotations int, float, str and bool, which values of a configuration are checked against."""
    try:
        hints = typing.get_type_hints(score)
    except NameError:  # a type that is imported for type checkers only
        return {}
    return {name: hint for name, hint in hints.items() if hint in (int, float, str, bool)}


def _is_a(value: Any, kind: type | None) -> bool:
    if kind is None:
        return True
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
