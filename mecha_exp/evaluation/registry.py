"""The decorator that registers evaluators, and the registry in which configurations look them up.

@evaluator("my_score", metric="score", direction="maximize")
def my_score(state_dict, *, images: int = 100):
    return {"score": ...}
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mecha_exp.entry_points import announced, load
from mecha_exp.errors import ConfigError, did_you_mean
from mecha_exp.evaluation.declaration import (
    DIRECTIONS,
    WEIGHT_STATS,
    BestOutcome,
    Check,
    Depends,
    Evaluator,
    Score,
    Shapes,
    metric_problem,
)

DEMOS = ("digits", "mini8")
"""The evaluators of the bundled models, among which `auto` chooses."""
GROUP = "mecha_exp.evaluators"
"""The entry points by which packages announce evaluators: the name of each, and its module."""
AUTO = "auto"

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
    best_outcome: BestOutcome | None = None,
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
        best_outcome: a function of a `Context` and the parameters to the best value that an example can have,
            where nothing bounds the worst, so that points can race: the most, or with `minimize` the least.
            None, or no function, is 0 with `minimize`, and values from 0 to 1 with `maximize`.

    The function's first parameter is the state dict (key to tensor), which it must not change. The others are
    set by the keys of the configuration's `evaluator`, are checked against their annotations (`int`, `float`,
    `str`, `bool`, `Path`, lists and mappings of them, unions and None), and have their defaults. A `Path`
    must exist, and its content counts like `data`; so does that of a text that is the name of a file. A
    parameter named `context` receives a `Context`.

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
        entry = Evaluator(*described, tuple(splits), files, tuple(variables), *hooks, best_outcome)
        entry.check_parameters()
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


def all_evaluators() -> dict[str, Evaluator]:
    """All registered evaluators, by name; the libraries that they use are not imported."""
    for name in announced(GROUP):
        _import(name)
    return dict(sorted(_registry.items()))


@contextmanager
def isolated() -> Iterator[None]:
    """Forget at the end which evaluators the block has registered, but for those of mecha_exp."""
    before = dict(_registry)
    try:
        yield
    finally:
        ours = {n: entry for n, entry in _registry.items() if str(_module_of(entry)).startswith("mecha_exp.")}
        _registry.clear()
        _registry.update(ours | before)


def _import(name: str) -> Evaluator:
    """Import an evaluator that an installed package announces.

    Raises:
        ConfigError: its module cannot be imported, or defines none of this name.
    """
    entry = announced(GROUP)[name]
    load(entry)
    if name not in _registry:
        raise ConfigError(f"{entry.value}, an entry point of {GROUP}, defines no evaluator '{name}'.")
    return _registry[name]


def named_evaluator(name: str) -> Evaluator | None:
    """The evaluator of this name; None where no package and no plugin defines it. Imports no other one."""
    return _import(name) if name in announced(GROUP) else _registry.get(name)


def _demos() -> list[str]:
    return [name for name in DEMOS if name in announced(GROUP)]


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
        return next((demo for demo in map(_import, _demos()) if demo.fits(shapes)), None)
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
