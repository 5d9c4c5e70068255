"""What an evaluator declares: its function, its parameters, and what decides its numbers."""

from __future__ import annotations

import inspect
import re
import typing
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, TypeAlias

from mecha_exp.errors import ConfigError, Problems, brief, did_you_mean
from mecha_exp.evaluation.context import Context
from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.numbers import is_number

if TYPE_CHECKING:
    from mecha_exp.evaluation.measurement import Measurement

Shapes = Mapping[str, tuple[int, ...]]
Options = Mapping[str, Any]
Score: TypeAlias = "Callable[..., Mapping[str, float] | Outcomes | Measurement]"
Check = Callable[[Shapes, Context, Options], None]
Depends = Callable[[Context, Options], Any]
BestOutcome = Callable[[Context, Options], float | None]

DIRECTIONS = ("maximize", "minimize")
WEIGHT_STATS = "weight_stats"
"""The name of the comparison with the inputs, which is measured during the merge, without a state dict."""
SPLIT, CONTEXT, EXAMPLES = "split", "context", "examples"
"""The parameters of an evaluator that no configuration sets: the part of its data, the point, examples."""
RACE = ("race", "race_alpha", "race_seed", "race_looks", "race_best", "fidelity")
_VALUE = float | str | Sequence[Any] | bool | None
_TYPES = {
    "name": Any,  # which the registry checks
    "also": Sequence[str | Mapping[str, Any]] | None,
    **dict.fromkeys(("metric", "direction"), str | Sequence[str] | None),
    **dict.fromkeys(("timeout", "workers", "devices", "sheet", *RACE), _VALUE),
    SPLIT: str | None,
    WEIGHT_STATS: bool | None,
}
SETTINGS = tuple(_TYPES)
"""Keys of the configuration's `evaluator` that are not parameters of an evaluator."""
MERGE_PREFIXES = ("time/", "io/", "memory/", "weights/", "adapter/", "nonfinite")
"""The beginnings of the names of metrics that come from the merge, and not from an evaluator."""
RACE_PREFIX = "race/"
"""The beginning of the names of what a race measured of a point on some of the examples."""
VALIDATION, TEST = "validation", "test"
_NOT_OFFERED = {
    "batched": " Several points in one forward pass (torch.func.vmap) gain nothing on a CPU, and on an H200 "
    "eight transformers took 1.5 to 2 times as long as one by one. Use evaluator.workers=2 to measure points "
    "side by side."
}
"""What parameters that a reader may look for would do, and what to use in their place."""
_EXPECTED: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    Path: "a path",
    NoneType: "null",
    **dict.fromkeys((list, tuple, Sequence), "a list"),
    **dict.fromkeys((dict, Mapping), "a mapping"),
}
_PLURAL: dict[Any, str] = {int: "whole numbers", float: "numbers", str: "texts", Path: "paths"}
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
        libraries: the modules of other projects that it imports; their versions count.
        extra: of mecha_exp, which installs them; empty for a user's evaluator.
        check: raises a `ConfigError` for what is wrong before anything is merged.
        depends: what decides its numbers beside code, parameters and data.
        takes_examples: whether it can measure some of its examples alone.
        fidelities: parameters of which less costs less and says less.
        check_examples: raises a `ConfigError` where its examples cannot be measured alone after all.
        best_outcome: the best value that an example can have; None where that is not known.
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
    libraries: tuple[str, ...] = ()
    extra: str = ""
    check: Check | None = None
    depends: Depends | None = None
    takes_examples: bool = False
    fidelities: tuple[str, ...] = ()
    check_examples: Check | None = None
    best_outcome: BestOutcome | None = None

    @property
    def accepted(self) -> dict[str, inspect.Parameter]:
        """The parameters of the function beside the state dict, by name."""
        listed = list(inspect.signature(self.score).parameters.values())[1:]
        return {p.name: p for p in listed if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The parameters that a configuration sets, by name."""
        reserved = {
            CONTEXT,
            *((SPLIT,) if self.splits else ()),
            *((EXAMPLES,) if self.takes_examples else ()),
        }
        return {name: parameter for name, parameter in self.accepted.items() if name not in reserved}

    @property
    def selection_split(self) -> str | None:
        """The split that points are sorted and chosen by: `validation`, or the first one."""
        return None if not self.splits else VALIDATION if VALIDATION in self.splits else self.splits[0]

    @property
    def report_split(self) -> str | None:
        """The split that chosen points are reported on: `test`, or the last one."""
        return None if not self.splits else TEST if TEST in self.splits else self.splits[-1]

    def with_splits(self, arguments: Mapping[str, Any]) -> Evaluator:
        """The evaluator; without splits where the parameter named like the last one (`test`) is not set."""
        parameter = self.parameters.get(self.report_split or "")
        if parameter is None or arguments.get(parameter.name, parameter.default) not in (None, False):
            return self
        return replace(self, splits=())

    def bind(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The values of all parameters, defaults included.

        Raises:
            ConfigError: all arguments that are unknown, missing, or not of the annotated type.
        """
        problems, parameters = Problems(), self.parameters
        for name in arguments:
            if name not in parameters:
                hint = _NOT_OFFERED.get(name) or did_you_mean(name, [*parameters, *SETTINGS])
                problems.add(f"evaluator.{name}: the evaluator '{self.name}' has no such parameter.{hint}")
        bound: dict[str, Any] = {}
        types = _annotations(self.score)
        for name, parameter in parameters.items():
            value = bound[name] = arguments.get(name, parameter.default)
            if value is inspect.Parameter.empty:
                problems.add(f"evaluator.{name}: the evaluator '{self.name}' needs a value for it.")
            elif name in arguments and value is not parameter.default and not _is_a(value, types[name]):
                problems.add(f"evaluator.{name}: expected {_described(types[name])}, got {brief(value)}.")
            elif Path in (kind := _kinds(types[name])) and isinstance(value, str | Path):
                bound[name] = Path(value).expanduser()
                if not bound[name].exists():
                    problems.add(_lost(name, str(value)))
            elif any(Path in typing.get_args(each) for each in kind) and isinstance(value, list | tuple):
                bound[name] = [Path(part).expanduser() for part in value]
                missing = [str(part) for part in bound[name] if not part.exists()]
                problems.add_all(_lost(name, part) for part in missing)
        problems.raise_as(ConfigError)
        return bound

    def check_parameters(self) -> None:
        """Check that the parameters have names of their own, and fit the splits.

        Raises:
            ConfigError: they do not.
        """
        settings = [p for p in self.accepted if p in SETTINGS and p != SPLIT]
        if settings:
            raise ConfigError(
                f"{self.name}: call the parameter '{settings[0]}' something else: it is a setting."
            )
        if self.splits and SPLIT not in self.accepted:
            raise ConfigError(
                f"{self.name}: it declares splits, so its function needs a parameter `split: str`, which "
                "says which part of the data to measure."
            )
        if self.takes_examples and getattr(self.accepted.get(EXAMPLES), "default", "") is not None:
            raise ConfigError(
                f"{self.name}: it declares takes_examples=True, so its function needs a parameter "
                "`examples=None`, which has the positions by task of the examples to measure."
            )
        for name in self.fidelities:
            if name not in self.parameters:
                raise ConfigError(
                    f"{self.name}: fidelities={self.fidelities}: its function has no parameter '{name}'."
                )
        for split in self.splits:
            if self.splits.count(split) > 1 or metric_problem(f"{split}/{self.metric}") or "/" in split:
                raise ConfigError(f"{self.name}: splits={self.splits}: expected different words without '/'.")


def check_types(settings: Mapping[str, Any], problems: Problems) -> None:
    """Check the types of the settings that all evaluators have."""
    for name in settings.keys() & _TYPES.keys():
        if not _is_a(settings[name], kind := _TYPES[name]):
            expected = "a value" if kind is _VALUE else _described(kind)  # whose reader says more
            problems.add(f"evaluator.{name}: expected {expected}, got {brief(settings[name])}.")


def metric_problem(name: str) -> str | None:
    """What is wrong with the name of a metric; None for a good one.

    >>> metric_problem("accuracy/cats"), metric_problem("accuracy/")
    (None, "has an empty part beside a '/'")
    """
    if not name.isprintable():
        return "has a character that cannot be printed"
    if not _METRIC.fullmatch(name):
        return "has an empty part beside a '/'" if name else "is empty"
    if name.startswith((*MERGE_PREFIXES, RACE_PREFIX)):
        return "begins as the names of numbers of the merge itself do"
    return "has a part of dots alone" if _DOTS.search(name) else None


def _lost(name: str, path: str) -> str:
    """The error of a path that does not exist; null in a reference such as `${data.dir}/test` is `None`."""
    hint = " The folder is not set: name it, as with data.dir=PATH." if path.startswith("None/") else ""
    return f"evaluator.{name}: {path} does not exist.{hint}"


def _annotations(score: Score) -> Mapping[str, Any]:
    """The annotations by name; those that are missing, and all that cannot be read, are `Any`."""
    try:
        return defaultdict(lambda: Any, typing.get_type_hints(score))
    except NameError:  # a type that is imported for type checkers only
        return defaultdict(lambda: Any)


def _kinds(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or one type."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, UnionType) else (hint,)


def _is_a(value: Any, hint: Any) -> bool:
    """Whether a value of a configuration is of an annotated type; of types that it cannot have, any is."""
    return any(_is_of_kind(value, kind) for kind in _kinds(hint))


def _is_of_kind(value: Any, kind: Any) -> bool:
    origin, parts = typing.get_origin(kind) or kind, typing.get_args(kind) or (Any,)
    if origin in (list, tuple, Sequence):
        return isinstance(value, list | tuple) and all(_is_a(item, parts[0]) for item in value)
    if origin in (dict, Mapping):
        return isinstance(value, Mapping) and all(_is_a(item, parts[-1]) for item in value.values())
    if kind is float:
        return is_number(value)
    if kind in (int, str, Path):
        given = (str, Path) if kind is Path else kind
        return isinstance(value, given) and not isinstance(value, bool)
    return isinstance(value, kind) if kind in (bool, NoneType) else True


def _described(hint: Any) -> str:
    """The words for an annotated type."""
    return " or ".join(dict.fromkeys(map(_described_kind, _kinds(hint))))


def _described_kind(kind: Any) -> str:
    origin = typing.get_origin(kind)
    if origin in (list, tuple, Sequence):
        items = (_PLURAL.get(each, "values") for each in _kinds((typing.get_args(kind) or (Any,))[0]))
        return f"a list of {' or '.join(items)}"
    return _EXPECTED.get(origin or kind) or str(getattr(kind, "__name__", kind))
