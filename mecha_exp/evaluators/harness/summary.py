"""The numbers of a report of lm-evaluation-harness, and the values by example behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mecha_exp.errors import EvaluationError, did_you_mean
from mecha_exp.evaluation.measurement import Measurement, is_near
from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.evaluators.common.scores import scored

Report = Mapping[str, Any]
"""What `lm_eval.simple_evaluate` returns."""


def summary_of(report: Report, score: str | None) -> Outcomes | Measurement:
    """The library's numbers, and the values by example where their mean is the library's number.

    Args:
        report: the library's.
        score: the metric that counts for each task; None is the first one.
    """
    numbers: dict[str, float] = {}
    for task, results in report["results"].items():
        for name, value in results.items():
            if isinstance(value, int | float) and "," in name:
                metric, _, rule = name.partition(",")
                numbers[f"{task}/{metric}" if rule == "none" else f"{task}/{metric}/{rule}"] = float(value)
    scores: dict[str, float] = {}
    values: dict[str, list[float]] = {}
    examples: dict[str, list[str]] = {}
    for task in report["samples"]:
        metric, rule = counted_metric(task, report, score)
        sign = 1 if report["higher_is_better"].get(task, {}).get(metric, True) is not False else -1
        scores[task] = sign * float(report["results"][task][f"{metric},{rule}"])
        chosen = samples_of(task, report, rule)
        if have_values(chosen, metric):
            values[task] = [sign * float(sample[metric]) for sample in chosen]
            examples[task] = [str(sample["doc_id"]) for sample in chosen]
    seen = {task: listed for task, listed in values.items() if is_near(float(np.mean(listed)), scores[task])}
    return scored(scores, seen, examples, numbers)


def counted_metric(task: str, report: Report, score: str | None) -> tuple[str, str]:
    """The metric that counts for a task, and its filter.

    Raises:
        EvaluationError: the task has no metric of this name.
    """
    results = report["results"][task]
    names = [n for n, v in results.items() if "," in n and "_stderr," not in n and not isinstance(v, str)]
    name = names[0] if score is None else next((n for n in names if score in (n, n.partition(",")[0])), None)
    if name is None:
        raise EvaluationError(
            f"evaluator.score={score}: the task {task} has no such metric.{did_you_mean(str(score), names)}"
        )
    metric, _, rule = name.partition(",")
    return metric, rule


def samples_of(task: str, report: Report, rule: str) -> list[Mapping[str, Any]]:
    """The examples of a task as a filter gives them."""
    return [sample for sample in report["samples"][task] if sample["filter"] == rule]


def have_values(samples: Sequence[Mapping[str, Any]], metric: str) -> bool:
    """Whether each example has a number for a metric."""
    return all(isinstance(sample.get(metric), int | float | np.number) for sample in samples)
