"""Reads the `evaluator` part of a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mecha_exp.errors import ConfigError, Problems, did_you_mean, nearest, some
from mecha_exp.evaluation.context import Context
from mecha_exp.evaluation.declaration import (
    DIRECTIONS,
    SETTINGS,
    SPLIT,
    WEIGHT_STATS,
    Evaluator,
    Shapes,
    check_types,
    metric_problem,
)
from mecha_exp.evaluation.isolation.pool import read_workers
from mecha_exp.evaluation.racing import read_fidelity, read_race
from mecha_exp.evaluation.registry import find_evaluator
from mecha_exp.evaluation.scoring import Evaluation, Scoring
from mecha_exp.numbers import is_number

AS = "as"
"""The key of an entry of `evaluator.also` that names its numbers."""


def read_scoring(
    settings: Mapping[str, Any], shapes: Shapes, plugins: Sequence[str] = (), context: Context | None = None
) -> Scoring:
    """Read the `evaluator` part of a configuration, for a model of these keys and shapes.

    Args:
        settings: the part.
        shapes: by key.
        plugins: the files that define evaluators.
        context: the inputs of the model, for evaluators that read what lies beside them.

    Raises:
        ConfigError: all problems of this part.
    """
    problems = Problems()
    check_types(settings, problems)
    problems.raise_as(ConfigError)
    parameters = {key: value for key, value in settings.items() if key not in SETTINGS}
    workers, devices = read_workers(settings.get("workers"), settings.get("devices"), problems)
    places = tuple(devices[number % len(devices)] if devices else "" for number in range(workers))
    checked = replace(context or Context(), devices=places)
    requests = _requests(settings, parameters)
    evaluations = _evaluations(requests, settings, shapes, context, checked, problems)
    metrics = _metrics(settings, evaluations, problems)
    metric, direction = next(iter(metrics.items()), (None, DIRECTIONS[1]))
    timeout = _timeout(settings, problems)
    _check_devices(evaluations, devices, problems)
    main = evaluations[0].evaluator if evaluations else None
    named = metric if len(metrics) < 2 else ",".join(metrics)
    fidelity = None if problems else read_fidelity(settings, evaluations, [*metrics], problems)
    race = None if problems or fidelity else read_race(settings, main, named, problems)
    if race is not None and not problems:
        _check_examples(evaluations[0], shapes, checked, settings["race"], problems)
    if parameters and not evaluations and not problems:
        name = next(iter(parameters))
        hint = did_you_mean(name, SETTINGS)
        problems.add(f"evaluator.{name}: no evaluator takes it.{hint}")
    _check_split(settings, evaluations, problems)
    problems.raise_as(ConfigError)
    stats = wants_weight_stats(settings)
    measured_in = (timeout, stats, tuple(plugins), workers, devices)
    objectives = metrics if len(metrics) > 1 else {}
    scoring = Scoring(tuple(evaluations), metric, direction, *measured_in, fidelity or race, objectives)
    return _with_split(scoring, settings.get(SPLIT))


def wants_weight_stats(settings: Mapping[str, Any]) -> bool:
    """Whether a configuration asks for the comparison with the inputs."""
    named = (settings.get("name"), *(settings.get("also") or ()))
    return bool(settings.get(WEIGHT_STATS)) or WEIGHT_STATS in named


def _evaluations(
    requests: Sequence[dict[str, Any]],
    settings: Mapping[str, Any],
    shapes: Shapes,
    context: Context | None,
    checked: Context,
    problems: Problems,
) -> list[Evaluation]:
    """The evaluators that are asked for, with their parameters; `problems` receives what is wrong.

    `checked` is the context that their checks receive.
    """
    evaluations: list[Evaluation] = []
    for index, request in enumerate(requests):
        with problems.collected(ConfigError):
            if request["name"] == WEIGHT_STATS:
                continue
            evaluator = find_evaluator(request.pop("name"), shapes)
            if evaluator is None:
                continue
            label = str(request.pop(AS, evaluator.name))
            evaluator = evaluator.with_splits(request)
            prefix = f"{label}/" if index else ""
            _check_label(label, prefix, evaluator, evaluations)
            bound = _bound(evaluator, request, settings)
            if evaluator.check is not None:
                evaluator.check(shapes, checked, bound)
            evaluations.append(Evaluation(evaluator, bound, prefix, context))
            _ = evaluations[-1].key  # raises if a file that it reads does not exist
    return evaluations


def _check_examples(
    main: Evaluation, shapes: Shapes, checked: Context, race: Any, problems: Problems
) -> None:
    """Check that the main evaluator can measure its examples in parts, as a race does."""
    if main.evaluator.check_examples is None:
        return
    with problems.collected(ConfigError, f"evaluator.race={str(race).lower()}: "):
        main.evaluator.check_examples(shapes, checked, main.parameters)


def _timeout(settings: Mapping[str, Any], problems: Problems) -> float | None:
    """The seconds that an evaluator may take for a model; None is unlimited."""
    timeout: float | None = settings.get("timeout")
    if timeout is not None and not (is_number(timeout) and timeout > 0):
        problems.add(f"evaluator.timeout: expected seconds above 0, or null for any time, got {timeout!r}.")
    return timeout


def _requests(settings: Mapping[str, Any], parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The main evaluator and the others, as dictionaries of `name` and parameters."""
    requests = [{"name": settings.get("name"), **parameters}]
    for other in settings.get("also") or ():
        if isinstance(other, Mapping) and "name" not in other:
            raise ConfigError(f"evaluator.also: {dict(other)} does not say which evaluator: give its `name`.")
        requests.append(dict(other) if isinstance(other, Mapping) else {"name": other})
    return [request for request in requests if request["name"] is not None]


def _metrics(
    settings: Mapping[str, Any], evaluations: Sequence[Evaluation], problems: Problems
) -> dict[str, str]:
    """The metrics that points are chosen by, with directions: the named ones, or the evaluator's own."""
    named, directions = settings.get("metric"), settings.get("direction")
    for direction in _listed(directions):
        if direction is not None and direction not in DIRECTIONS:
            hint = did_you_mean(str(direction), DIRECTIONS)
            problems.add(f"evaluator.direction: unknown direction '{direction}'.{hint}")
    if named is None and not evaluations:
        return {}
    metrics = [evaluations[0].evaluator.metric] if named is None else _listed(named)
    given = _listed(directions) if isinstance(directions, list | tuple) else [directions] * len(metrics)
    if not metrics or len(set(map(str, metrics))) < len(metrics):
        problems.add(f"evaluator.metric={named}: expected the names of different metrics, as in [a,b].")
        return {}
    if len(given) != len(metrics):
        problems.add(
            f"evaluator.direction={directions}: expected a direction for each of "
            f"{', '.join(map(str, metrics))}."
        )
        return {}
    pairs = zip(metrics, given, strict=True)
    return {str(metric): _direction(str(metric), given, evaluations, problems) for metric, given in pairs}


def _listed(value: Any) -> list[Any]:
    """The values of a list, or one alone."""
    return list(value) if isinstance(value, list | tuple) else [value]


def _direction(metric: str, given: Any, evaluations: Sequence[Evaluation], problems: Problems) -> str:
    """Whether more of a metric is better: as the configuration says, or its evaluator, or its mean's."""
    owners = {e.prefix + e.evaluator.metric: e.evaluator.direction for e in evaluations}
    known = next((d for owner, d in owners.items() if f"{metric}/".startswith(f"{owner}/")), None)
    if given is None and known is None:
        near = f" Did you mean '{nearest(metric, owners)[0]}'?" if nearest(metric, owners) else ""
        problems.add(
            f"evaluator.metric={metric}: say whether more of it is better: evaluator.direction=maximize or "
            f"minimize.{near} The main metrics are {some(owners) or 'none'}."
        )
    return str(given or known or DIRECTIONS[0])


def _bound(evaluator: Evaluator, request: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The values of all parameters, and the split by which points are chosen."""
    if evaluator.splits:
        return {**evaluator.bind(request), SPLIT: evaluator.selection_split}
    if SPLIT in evaluator.parameters and settings.get(SPLIT) is not None:  # a parameter like any other
        request = {SPLIT: settings[SPLIT], **request}
    return evaluator.bind(request)


def _check_label(label: str, prefix: str, evaluator: Evaluator, others: Sequence[Evaluation]) -> None:
    """Check that the numbers of an evaluator have names of their own."""
    if problem := metric_problem(f"{label}/{evaluator.metric}"):
        raise ConfigError(f"evaluator.also: {AS}: {label!r} {problem}.")
    if label in {split for e in (evaluator, *(o.evaluator for o in others)) for split in e.splits}:
        raise ConfigError(f"evaluator.also: '{label}' is the name of a split: give another one with `{AS}`.")
    if prefix in {other.prefix for other in others}:
        raise ConfigError(
            f"evaluator.also: '{label}' is there twice, and the numbers of both would have one name. Name "
            f"them with `{AS}`: {{name: {evaluator.name}, {AS}: {label}_2, ...}}."
        )


def _check_devices(evaluations: Sequence[Evaluation], devices: Sequence[str], problems: Problems) -> None:
    """Check that no evaluator asks for a GPU that its worker does not see: each sees its own alone."""
    for evaluation in evaluations if devices else ():
        device = str(evaluation.parameters.get("device"))
        has_gpu = all(name.startswith("cuda") for name in devices)
        if device.startswith("cuda") and not (has_gpu and device == "cuda"):
            problems.add(
                f"evaluator.device={device} with evaluator.devices=[{','.join(devices)}]: each worker sees "
                "its own of these alone. Leave evaluator.device out, or set it to auto."
            )


def _check_split(settings: Mapping[str, Any], evaluations: Sequence[Evaluation], problems: Problems) -> None:
    """Check that the main evaluator, or a parameter, takes the split that is asked for."""
    split = settings.get(SPLIT)
    if split is None or not evaluations or SPLIT in evaluations[0].evaluator.parameters:
        return
    main = evaluations[0].evaluator
    if not main.splits:
        problems.add(f"evaluator.{SPLIT}={split}: the evaluator '{main.name}' declares no splits.")
    elif split not in main.splits:
        hint = did_you_mean(str(split), main.splits)
        problems.add(f"evaluator.{SPLIT}={split}: '{main.name}' has no such split.{hint}")


def _with_split(scoring: Scoring, split: Any) -> Scoring:
    """The measurements, and the same on another split if it is asked for."""
    if split is None or scoring.selection_split is None:
        return scoring
    return replace(scoring, evaluations=(*scoring.evaluations, *scoring.on(split).evaluations))
