"""The decorator that registers evaluators, and the registry in which configurations look them up.

@evaluator("my_score", metric="score", direction="maximize")
def my_score(state_dict, *, images: int = 100):
    return {"score": ...}
"""

from __future__ import annotations

import importlib
import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mecha_exp.errors import ConfigError, Problems, brief, did_you_mean
from mecha_exp.evaluation.outcomes import Outcomes

Shapes = Mapping[str, tuple[int, ...]]
Score = Callable[..., Mapping[str, float] | Outcomes]

BUNDLED = ("digits", "mini8")
"""The evaluators of the bundled models, each in a module of its name."""
DIRECTIONS = ("maximize", "minimize")
AUTO = "auto"
WEIGHT_STATS = "weight_stats"
"""The name of the comparison with the inputs, which is measured during the merge, without a state dict."""
SPLIT, CONTEXT = "split", "context"
"""The parameters of an evaluator that no configuration sets: the part of its data, and the point."""
SETTINGS = ("name", "also", "metric", "direction", "timeout", SPLIT, WEIGHT_STATS)
"""Keys of the configuration's `evaluator` that are not parameters of an evaluator."""
VALIDATION, TEST = "validation", "test"
_METRIC = re.compile(r"[^/]+(/[^/]+)*")
_DOTS = re.compile(r"(^|/)\.{1,2}(/|$)")


@dataclass(frozen=True)
class Evaluator:
    """A named way to measure a model.

    Attributes:
        name: its name in configurations.
        score: a function of a state dict, and parameters by name, to named numbers or outcomes.
        metric: the number that a sweep is sorted by.
        direction: whether more of `metric` is better: `maximize` or `minimize`.
        fits: whether it can measure a model of these keys and shapes.
        version: of its computation; another version makes stored evaluations stale.
        units: of the numbers, for tables and figures.
        splits: the names of the parts of its data; empty if it measures everything at once.
        data: the files and folders that it reads; relative ones lie beside its code.
        variables: the environment variables that it reads.
    """

    name: str
    score: Score
    metric: str
    direction: str
    fits: Callable[[Shapes], bool]
    version: int | str = 1
    units: Mapping[str, str] = field(default_factory=dict)
    splits: tuple[str, ...] = ()
    data: tuple[Path, ...] = ()
    variables: tuple[str, ...] = ()

    @property
    def accepted(self) -> dict[str, inspect.Parameter]:
        """The parameters of the function beside the state dict, by name."""
        listed = list(inspect.signature(self.score).parameters.values())[1:]
        return {p.name: p for p in listed if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The parameters that a configuration sets, by name."""
        reserved = (CONTEXT, SPLIT) if self.splits else (CONTEXT,)
        return {name: parameter for name, parameter in self.accepted.items() if name not in reserved}

    @property
    def selection_split(self) -> str | None:
        """The split that points are sorted and chosen by: `validation`, or the first one."""
        return None if not self.splits else VALIDATION if VALIDATION in self.splits else self.splits[0]

    @property
    def report_split(self) -> str | None:
        """The split that chosen points are reported on: `test`, or the last one."""
        return None if not self.splits else TEST if TEST in self.splits else self.splits[-1]

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
            elif types.get(name) is Path and isinstance(value, str | Path):
                bound[name] = Path(value).expanduser()
                if not bound[name].exists():
                    problems.add(f"evaluator.{name}: {value} does not exist.")
            elif name in arguments and not _is_a(value, types.get(name)):
                expected = "a path" if types[name] is Path else types[name].__name__
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
    splits: Sequence[str] = (),
    data: Sequence[str | Path] = (),
    variables: Sequence[str] = (),
) -> Callable[[Score], Score]:
    """Register a function of a state dict, and parameters, to a dictionary of numbers or to `Outcomes`.

    Args:
        name: its name in configurations, as in `evaluator.name=my_score`.
        metric: the number that a sweep is sorted by, and the objective of an optimiser. Of `Outcomes` it is
            the mean over the tasks.
        direction: `maximize` if more of `metric` is better, or `minimize`.
        fits: whether it can measure a model of these keys and shapes; any, by default.
        version: raise it when a change shows neither in the code nor in `data`, such as that of a library.
        units: of the numbers, as in `{"loss": "nats"}`.
        splits: the parts of its data, as in `("validation", "test")`; the function then has the parameter
            `split`. Points are chosen on `validation` (or the first); the chosen ones and the inputs are
            reported on `test` (or the last).
        data: the files and folders that the function reads, relative to its own file: a stored number is
            measured again when their content changes.
        variables: the environment variables that the function reads: the same for their values.

    The function's first parameter is the state dict (key to tensor), which it must not change. The others are
    set by the keys of the configuration's `evaluator`, are checked against their annotations (`int`, `float`,
    `str`, `bool`, `Path`), and have their defaults. A `Path` must exist, and its content counts like `data`.
    A parameter named `context` receives a `Context`.

    Raises:
        ConfigError: the direction is unknown, `metric` is not a name for a number, a parameter has the name
            of a setting, or `splits` and the parameter `split` do not agree.

    >>> @evaluator("sparsity", metric="zeros")
    ... def sparsity(state_dict, *, below: float = 0.0):
    ...     tensors = state_dict.values()
    ...     return {"zeros": sum(int((t.abs() <= below).sum()) for t in tensors)}
    """
    if direction not in DIRECTIONS:
        raise ConfigError(f"{name}: unknown direction '{direction}'.{did_you_mean(direction, DIRECTIONS)}")
    if problem := metric_problem(metric):
        raise ConfigError(f"{name}: the metric '{metric}' {problem}.")

    def register(score: Score) -> Score:
        folder = Path(getattr(inspect.unwrap(score), "__code__", register.__code__).co_filename).parent
        files = tuple(folder / path for path in data)
        described = (name, score, metric, direction, fits, version, dict(units or {}))
        entry = Evaluator(*described, tuple(splits), files, tuple(variables))
        _check_parameters(entry)
        _registry[name] = entry
        return score

    return register


def _check_parameters(entry: Evaluator) -> None:
    """Check that the parameters of a new evaluator have names of their own, and fit its splits."""
    settings = [p for p in entry.accepted if p in SETTINGS and p != SPLIT]
    if settings:
        raise ConfigError(
            f"{entry.name}: call the parameter '{settings[0]}' something else: it is a setting."
        )
    if entry.splits and SPLIT not in entry.accepted:
        raise ConfigError(
            f"{entry.name}: it declares splits, so its function needs a parameter `split: str`, which says "
            "which part of the data to measure."
        )
    for split in entry.splits:
        if entry.splits.count(split) > 1 or metric_problem(split) or "/" in split:
            raise ConfigError(f"{entry.name}: splits={entry.splits}: expected different words without '/'.")


def metric_problem(name: str) -> str | None:
    """What is wrong with the name of a metric; None for a good one.

    >>> metric_problem("accuracy/cats"), metric_problem("accuracy/")
    (None, "has an empty part beside a '/'")
    """
    if not name.isprintable():
        return "has a character that cannot be printed"
    if not _METRIC.fullmatch(name):
        return "has an empty part beside a '/'" if name else "is empty"
    return "has a part of dots alone" if _DOTS.search(name) else None


def all_evaluators() -> dict[str, Evaluator]:
    """All registered evaluators, by name."""
    for name in BUNDLED:
        importlib.import_module(f"mecha_exp.evaluation.{name}")
    return dict(sorted(_registry.items()))


def find_evaluator(name: str | None, shapes: Shapes) -> Evaluator | None:
    """The evaluator with this name; for `auto` the bundled one that fits the model, else None.

    Raises:
        ConfigError: no evaluator has this name, or it cannot measure this model.
    """
    if name is None:
        return None
    evaluators = all_evaluators()
    if name == AUTO:
        return next((evaluators[name] for name in BUNDLED if evaluators[name].fits(shapes)), None)
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
    """The annotations that values of a configuration are checked against: int, float, str, bool, Path."""
    try:
        hints = typing.get_type_hints(score)
    except NameError:  # a type that is imported for type checkers only
        return {}
    return {name: hint for name, hint in hints.items() if hint in (int, float, str, bool, Path)}


def _is_a(value: Any, kind: type | None) -> bool:
    if kind is None:
        return True
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
