"""Normalised scores: how near a merge comes to the experts, task by task."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from mecha_exp.errors import EvaluationError, did_you_mean
from mecha_exp.evaluation.outcomes import Outcomes, Values

FAR = 3.0
"""Standard errors by which the expert of a task leads the other inputs, where no one names it."""


def normalised(outcomes: Outcomes, experts: Mapping[str, Outcomes]) -> float | None:
    """The mean over tasks of the score divided by that of the task's expert; 1 is as good as the experts.

    Args:
        outcomes: of a model.
        experts: the outcomes of the expert of each task, by task.

    Returns:
        None if a task has no expert, or one whose score is 0 or not finite.
    """
    ratios = []
    for task, values in outcomes.values.items():
        score = float(experts[task].values[task].mean()) if task in experts else 0.0
        if not score or not math.isfinite(score):
            return None
        ratios.append(float(values.mean()) / score)
    return float(np.mean(ratios))


def find_experts(
    inputs: Mapping[str, Outcomes], base: str | None, named: Mapping[str, Outcomes], *, minimized: bool
) -> dict[str, Outcomes]:
    """The outcomes of the expert of each task: the named one, or the input that is best by far.

    An input is best by far if it leads each of the others by three standard errors of the paired difference.
    The base, which may be nearly as good, need only not be better, unless it is the only other input.

    Args:
        inputs: the outcomes of each input, by its name.
        base: the name of the base, if it is an input.
        named: outcomes of experts that a configuration names, by task.
        minimized: whether less is better.

    Raises:
        EvaluationError: an expert is named for a task that was not measured.
    """
    measured = next(iter((*inputs.values(), *named.values())), None)
    tasks = list(measured.values) if measured else []
    for task in named:
        if task not in tasks:
            hint = did_you_mean(task, tasks)
            raise EvaluationError(f"models.expert_of.{task}: the evaluator measures no such task.{hint}")
    experts = dict(named)
    for task in tasks:
        sign = -1 if minimized else 1
        scores = {name: sign * o.values[task] for name, o in inputs.items() if task in o.values}
        best = None if task in named else _best_by_far(scores, base)
        if best is not None:
            experts[task] = inputs[best]
    return experts


def _best_by_far(scores: Mapping[str, Values], base: str | None) -> str | None:
    """The name of the input that leads the others; None if none does."""
    candidates = [name for name in scores if name != base]
    if not candidates:
        return None
    best = max(candidates, key=lambda name: float(scores[name].mean()))
    others = [name for name in candidates if name != best] or [name for name in scores if name == base]
    if base is not None and base in scores and scores[base].mean() > scores[best].mean():
        return None
    return best if others and all(_leads(scores[best], scores[other]) for other in others) else None


def _leads(first: Values, second: Values) -> bool:
    """Whether the mean of paired differences is more than `FAR` of its standard errors above 0."""
    if len(first) != len(second):
        return False
    if len(first) < 2 or not (np.isfinite(first).all() and np.isfinite(second).all()):
        return False
    difference = first - second
    error = float(difference.std(ddof=1)) / math.sqrt(len(difference))
    return float(difference.mean()) > FAR * error
