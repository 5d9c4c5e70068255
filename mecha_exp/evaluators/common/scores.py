"""The score of several tasks: the mean of their own, with the outcomes of those that have some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mecha_exp.evaluation.measurement import Measurement
from mecha_exp.evaluation.outcomes import Outcomes

SCORE = "score"


def scored(
    scores: Mapping[str, float],
    values: Mapping[str, Any],
    examples: Mapping[str, Any],
    metrics: Mapping[str, float],
) -> Outcomes | Measurement:
    """What was measured of several tasks, of which some have no value for each example, such as F1.

    Args:
        scores: by task.
        values: for each example, of the tasks whose score is their mean.
        examples: the names of the examples of each task.
        metrics: further numbers by name.

    Returns:
        Outcomes whose mean over tasks is `score`, where all tasks have some; else numbers, with outcomes of
        each `score/TASK` that has some.
    """
    if values.keys() == scores.keys():
        named = {task: examples[task] for task in values}
        return Outcomes(values, examples=named, metrics=metrics)
    by_task = {f"{SCORE}/{task}": score for task, score in scores.items()}
    further = {
        f"{SCORE}/{task}": Outcomes({task: listed}, examples={task: examples[task]})
        for task, listed in values.items()
    }
    overall = float(np.mean(list(scores.values())))
    return Measurement({SCORE: overall, **by_task, **metrics}, further=further)
