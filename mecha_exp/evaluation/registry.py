"""The decorator that registers evaluators, and the registry in which configurations look them up.

@evaluator("my_score", metric="score", direction="maximize")
def my_score(state_dict, *, images: int = 100):
    return {"score": ...}
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
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

DEMOS = ("digits", "mini8")
"""The evaluators of the bundled models, among which `auto` chooses."""
BUNDLED = (
    *DEMOS,
    "clip_zero_shot",
    "forward",
    "image_classification",
    "images",
    "lm_eval",
    "perplexity",
    "text_classification",
)
"""The evaluators that come along, each in a module of its name in `mecha_exp.evaluators`."""
DIRECTIONS = ("maximize", "minimize")
AUTO = "auto"
WEIGHT_STATS = "weight_stats"
"""The name of the comparison with the inputs, which is measured during the merge, without a state dict."""
SPLIT, CONTEXT, EXAMPLES = "split", "context", "examples"
"""The parameters of an evaluator that no configuration sets: the part of its data, the point, examples."""
RACE = ("race", "race_alpha", "race_seed", "race_looks", "fidelity")
SETTINGS = (
    *("name", "also", "metric", "direction", "timeout", "workers", "devices", "sheet"),
    *RACE,
    SPLIT,
    WEIGHT_STATS,
)
"""Keys of the configuration's `evaluator` that are not parameters of an evaluator."""
VALIDATION, TEST = "validation", "test"
PATHS = list
"""What stands for a list of paths among the types of parameters."""
_NOT_OFFERED = {
    "batched": " Several points in one forward pass (torch.func.vmap) gain nothing on a CPU, and no GPU has "
    "measured it. Use evaluator.workers=2 to measure points side by side."
}
"""What parameters that a reader may look for would do, and what to use in their place."""
_EXPECTED: dict[type, str] = {Path: "a path", PATHS: "a list of paths"}
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
        if parameter is None or arguments.get(parameter.name, parameter.default) is not None:
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
            elif types.get(name) is Path and isinstance(value, str | Path):
                bound[name] = Path(value).expanduser()
                if not bound[name].exists():
                    problems.add(f"evaluator.{name}: {value} does not exist.")
            elif types.get(name) is PATHS and _is_list_of_texts(value):
                bound[name] = [Path(part).expanduser() for part in value]
                missing = [str(part) for part in bound[name] if not part.exists()]
                problems.add_all(f"evaluator.{name}: {part} does not exist." for part in missing)
            elif name in arguments and not (value is parameter.default or _is_a(value, types.get(name))):
                expected = _EXPECTED.get(types[name]) or types[name].__name__
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
    libraries: Sequence[str] = (),
    extra: str = "",
    check: Check | None = None,
    depends: Depends | None = None,
    takes_examples: bool = False,
    fidelities: Sequence[str] = (),
    check_examples: Check | None = None,
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
            reported on `test` (or the last). Where the function also has a parameter of the last one's name,
            which is a file, there are no splits until it is set.
        data: the files and folders that the function reads, relative to its own file: a stored number is
            measured again when their content changes.
        variables: the environment variables that the function reads: the same for their values.
        libraries: the modules that the function imports, as in `("transformers",)`: a missing one is an error
            before anything is merged, and a stored number is measured again with another version of one of
            them, or of torch.
        extra: of mecha_exp, which brings the libraries.
        check: a function of shapes by key, a `Context` and the parameters by name, which raises a
            `ConfigError` for what headers and configurations tell. It runs before anything is merged.
        depends: a function of a `Context` and the parameters to what else decides the numbers, such as the
            tokenizer beside an input: anything that JSON holds, a `Path` by the content of its file, a
            function by its code.
        takes_examples: whether it can measure some of its examples alone, so that points can race. The
            function then has the parameter `examples=None`: the positions of those to measure by task, as a
            list in ascending order among all that it measures otherwise; tasks without any are left out.
            It returns their outcomes under the names that they have when all are measured.
        fidelities: parameters that are whole numbers, of which less costs less and says less, as in
            `("limit",)`: a search can stop bad trials at a ninth or a third of one (`sweep.fidelity=limit`).
        check_examples: a function like `check` that runs where points race, and raises a `ConfigError` where
            with these parameters an example has no value, or another one in a part than in the whole.

    The function's first parameter is the state dict (key to tensor), which it must not change. The others are
    set by the keys of the configuration's `evaluator`, are checked against their annotations (`int`, `float`,
    `str`, `bool`, `Path`, `list[Path]`, or one of them `| None`), and have their defaults. A `Path` must
    exist, and its content counts like `data`; so does that of a text that is the name of a file. A parameter
    named `context` receives a `Context`.

    Raises:
        ConfigError: the direction is unknown, `metric` is not a name for a number, a parameter has the name
            of a setting, another module has an evaluator of that name, `splits` and the parameter `split`
            do not agree, or `takes_examples` and the parameter `examples`, or `fidelities` has another name
            than a parameter.

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
        hooks = (tuple(libraries), extra, check, depends, takes_examples, tuple(fidelities), check_examples)
        entry = Evaluator(*described, tuple(splits), files, tuple(variables), *hooks)
        _check_parameters(entry)
        _check_name(entry)
        _registry[name] = entry
        return score

    return register


def _check_name(entry: Evaluator) -> None:
    """Check that no other module has registered an evaluator of that name: the later one would win."""
    other = _registry.get(entry.name)
    if other is not None and _module_of(other) != _module_of(entry):
        raise ConfigError(
            f"two evaluators are named '{entry.name}': that of {_file_of(other)} and that of "
            f"{_file_of(entry)}. Give one of them another name, or load one of the plugins alone."
        )


def _module_of(entry: Evaluator) -> str | None:
    return getattr(inspect.unwrap(entry.score), "__module__", None)


def _file_of(entry: Evaluator) -> str:
    """The file that an evaluator is defined in, or else its module."""
    code = getattr(inspect.unwrap(entry.score), "__code__", None)
    return code.co_filename if code else str(_module_of(entry))


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
    if entry.takes_examples and getattr(entry.accepted.get(EXAMPLES), "default", "") is not None:
        raise ConfigError(
            f"{entry.name}: it declares takes_examples=True, so its function needs a parameter "
            "`examples=None`, which has the positions by task of the examples to measure."
        )
    for name in entry.fidelities:
        if name not in entry.parameters:
            raise ConfigError(
                f"{entry.name}: fidelities={entry.fidelities}: its function has no parameter '{name}'."
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
    """All registered evaluators, by name; the libraries that they use are not imported."""
    for name in BUNDLED:
        _import(name)
    return dict(sorted(_registry.items()))


def _import(name: str) -> Evaluator:
    """Import an evaluator that comes along."""
    importlib.import_module(f"mecha_exp.evaluators.{name}")
    return _registry[name]


def named_evaluator(name: str) -> Evaluator | None:
    """The evaluator of this name; None where no plugin of this process defines it. Imports no other one."""
    return _import(name) if name in BUNDLED else _registry.get(name)


def find_evaluator(name: Any, shapes: Shapes) -> Evaluator | None:
    """The evaluator with this name; for `auto` the bundled one that fits the model, else None.

    Raises:
        ConfigError: it is not a name, no evaluator has it, or that one cannot measure this model.
    """
    if name is None:
        return None
    if not isinstance(name, str):
        raise ConfigError(f"evaluator.name: expected a name as in evaluator.name=digits, got {name!r}.")
    if name == AUTO:
        return next((demo for demo in map(_import, DEMOS) if demo.fits(shapes)), None)
    if name == "none":
        raise ConfigError("evaluator.name=none: no evaluator is evaluator=none.")
    chosen = named_evaluator(name)
    if chosen is None:
        hint = did_you_mean(name, [*all_evaluators(), AUTO, WEIGHT_STATS])
        raise ConfigError(
            f"unknown evaluator '{name}'.{hint} One of yours is known when its file is among the `plugins`."
        )
    if not chosen.fits(shapes):
        raise ConfigError(
            f"evaluator={name} cannot measure this model: its keys or shapes do not match its network. "
            "Use evaluator=none, or an evaluator of your own."
        )
    _check_libraries(chosen)
    return chosen


def _check_libraries(chosen: Evaluator) -> None:
    """Check that the libraries of an evaluator are installed, without importing them."""
    missing = [name for name in chosen.libraries if importlib.util.find_spec(name) is None]
    if missing:
        what = f"'mecha_exp[{chosen.extra}]'" if chosen.extra else " ".join(missing)
        raise ConfigError(
            f"evaluator={chosen.name} needs {', '.join(missing)}, which is not installed: pip install {what}"
        )


def _annotations(score: Score) -> dict[str, type]:
    """What values of a configuration are checked against: int, float, str, bool, Path, or None beside it."""
    try:
        hints = typing.get_type_hints(score)
    except NameError:  # a type that is imported for type checkers only
        return {}
    plain = {name: _not_none(hint) for name, hint in hints.items()}
    paths = dict.fromkeys((name for name, hint in plain.items() if _are_paths(hint)), PATHS)
    return {name: hint for name, hint in plain.items() if hint in (int, float, str, bool, Path)} | paths


def _are_paths(hint: Any) -> bool:
    """Whether a type is a list, a tuple or another sequence of paths."""
    return typing.get_origin(hint) in (list, tuple, Sequence) and Path in typing.get_args(hint)


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(part, str | Path) for part in value)


def _not_none(hint: Any) -> Any:
    """The type of `int | None` beside None."""
    rest = [part for part in typing.get_args(hint) if part is not type(None)]
    return rest[0] if len(rest) == 1 and type(None) in typing.get_args(hint) else hint


def _is_a(value: Any, kind: type | None) -> bool:
    if kind is None:
        return True
    if kind is float:
        return is_number(value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
