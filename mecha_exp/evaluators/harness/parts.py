"""Some examples of tasks of lm-evaluation-harness, measured as they are among all, or refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from mecha_exp.documents import parse_json
from mecha_exp.errors import ConfigError, EvaluationError, shortened, some
from mecha_exp.evaluators.harness.summary import Report, counted_metric, have_values, samples_of
from mecha_exp.evaluators.harness.tasks import LoadedTasks

_TRIED = 8
"""The first examples of a task, which tell whether it can be measured in parts."""
LEAVE = "or leave evaluator.race out."


def check_parts(loaded: LoadedTasks, num_fewshot: int | None, gen_kwargs: Any, score: str | None) -> None:
    """Check that tasks can be measured in parts, by answers of no model to their first examples.

    The metric that counts must be the mean of a value for each example, answers must not be drawn at random,
    and the prompt of an example must not depend on those before it.

    Args:
        loaded: the tasks.
        num_fewshot: examples in the prompt; None for the task's own number.
        gen_kwargs: settings of generation.
        score: the metric that counts; None is the first one of each task.

    Raises:
        ConfigError: a task cannot.
    """
    _check(loaded, num_fewshot, json.dumps(gen_kwargs, default=str), score)


@lru_cache(maxsize=4)  # as tasks are loaded
def _check(loaded: LoadedTasks, num_fewshot: int | None, gen_kwargs: str, score: str | None) -> None:
    settings = {"num_fewshot": num_fewshot, "gen_kwargs": parse_json(gen_kwargs)}
    for name in loaded.tasks:
        try:
            whole, part = _tried(loaded, name, settings)
            metric, rule = counted_metric(name, whole, score)
        except EvaluationError as error:
            raise ConfigError(str(error)) from None
        except Exception as error:  # of a task's own code, which may need more than an answer
            cause = shortened(" ".join(f"{type(error).__name__}: {error}".split()), 300)
            raise ConfigError(
                f"the task '{name}' cannot be tried without a model: {cause}. Leave out the task, {LEAVE}"
            ) from error
        _check_metric(loaded.tasks[name], name, whole, metric, rule)
        _check_answers(name, samples_of(name, whole, rule))
        _check_prompts(name, samples_of(name, whole, rule), samples_of(name, part, rule))


def _tried(loaded: LoadedTasks, name: str, settings: Mapping[str, Any]) -> tuple[Report, Report]:
    """Reports of a task on its first examples, and on every other one of them, by a model that guesses."""
    from lm_eval import simple_evaluate
    from lm_eval.models.dummy import DummyLM

    model = DummyLM()
    model.tokenizer = None  # which it would fetch from the hub

    def report(tasks: LoadedTasks, **chosen: Any) -> Report:
        found: Report = simple_evaluate(
            model, tasks=[name], task_manager=tasks, bootstrap_iters=0, **chosen, **settings
        )
        return found

    count = min(_TRIED, len(loaded.tasks[name].eval_docs))
    whole = report(loaded.alone(name), limit=count)
    if count < 2:
        return whole, whole
    places = {name: list(range(1, count, 2))}
    return whole, report(loaded.among(places), samples=places)


def _check_metric(task: Any, name: str, report: Report, metric: str, rule: str) -> None:
    """Check that a metric is the mean of a value for each example."""
    samples = samples_of(name, report, rule)

    def is_a_mean(other: str) -> bool:
        return _aggregation(task, other) == "mean" and have_values(samples, other)

    if is_a_mean(metric):
        return
    others = [other for other in samples[0]["metrics"] if is_a_mean(other)]
    choice = f"Choose {some(others)} with evaluator.score" if others else "Leave out the task"
    raise ConfigError(
        f"the task '{name}' counts {metric}, which is computed of all examples together "
        f"({_aggregation(task, metric)}): points race by the mean of a value for each example. "
        f"{choice}, {LEAVE}"
    )


def _aggregation(task: Any, metric: str) -> str:
    """The name of what the library computes of the values of a metric, which is a mean where none is told."""
    from lm_eval.api.registry import get_aggregation

    function = task.aggregation().get(metric)
    if function is None or function is get_aggregation("mean"):
        return "mean"
    name = getattr(function, "__name__", type(function).__name__)
    return f"{name} of its own" if name == "mean" else str(name)


def _check_answers(name: str, samples: Sequence[Mapping[str, Any]]) -> None:
    """Check that answers are not drawn at random: a generator gives an example another one in a part."""
    for settings in _generation(samples):
        if settings.get("do_sample") or (settings.get("temperature") and "do_sample" not in settings):
            raise ConfigError(
                f"the task '{name}' draws its answers at random, which differ when fewer examples are asked. "
                f"Use 'evaluator.gen_kwargs={{do_sample: false, temperature: 0}}', {LEAVE}"
            )


def _generation(samples: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The settings of generation in the requests of examples."""
    for sample in samples:
        for arguments in sample["arguments"]:
            yield from (part for part in arguments if isinstance(part, Mapping))


def _check_prompts(name: str, whole: Sequence[Mapping[str, Any]], part: Sequence[Mapping[str, Any]]) -> None:
    """Check that examples are asked in the same words whichever others are there."""
    asked = {sample["doc_id"]: sample["arguments"] for sample in whole}
    for sample in part:
        if sample["arguments"] != asked[sample["doc_id"]]:
            raise ConfigError(
                f"the task '{name}' asks for its example {sample['doc_id']} in other words when others are "
                f"left out: its prompts depend on the examples before. Leave out the task, {LEAVE}"
            )
