"""Normalised scores: each task's score over that of the input that is its expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mecha_exp.verdict.candidates import Direction, listed
from mecha_exp.verdict.intervals import Estimate
from mecha_exp.verdict.paired_tests import holm, paired_p_values
from mecha_exp.verdict.panel import Floats, Panel

LEVEL = 0.05


@dataclass(frozen=True)
class Normalised:
    """A setting's scores in units of the experts': 1 is as good as the expert of each task.

    Attributes:
        overall: the mean over tasks, with its interval.
        tasks: by task.
        experts: the input that is the expert of each task.
    """

    overall: Estimate
    tasks: Mapping[str, float]
    experts: Mapping[str, str]


def guess_experts(
    panel: Panel, inputs: Sequence[str], direction: Direction, *, seed: int = 0
) -> dict[str, str]:
    """The expert of each task where one input is best at it by far; a task without one is missing.

    "By far": the paired difference to the second best is significant at 5 %, after Holm over tasks and pairs.
    """
    places = [panel.index(name) for name in inputs if name in panel.names]
    if len(places) < 2:
        return {}
    leaders, p_values = [], []
    for name in panel.tasks:
        alone = panel.restricted(name)
        order = np.argsort(-alone.scores[places] if direction == "maximize" else alone.scores[places])
        first, second = places[order[0]], places[order[1]]
        leaders.append(panel.names[first])
        p_values.append(float(paired_p_values(alone, np.array([[first, second]]), seed=seed)[0]))
    pairs = len(places) * (len(places) - 1) // 2
    adjusted = holm(p_values, len(p_values) * pairs)
    return {task: leader for task, leader, p in zip(panel.tasks, leaders, adjusted, strict=True) if p < LEVEL}


def usable_experts(
    panel: Panel, experts: Mapping[str, str], direction: Direction
) -> tuple[dict[str, int], list[str]]:
    """The place of each task's expert, or nothing, and why scores are not normalised."""
    if direction == "minimize":
        return {}, [
            "Scores are not normalised, since a metric that is minimised has no share of an expert's."
        ]
    missing = [task for task in panel.tasks if task not in experts]
    if missing:
        verb = "has" if len(missing) == 1 else "have"
        sentence = (
            f"Scores are not normalised: {_tasks(missing)} {verb} no expert. Name it in `models.expert_of`."
        )
        return {}, [sentence]
    unmeasured = [experts[task] for task in panel.tasks if experts[task] not in panel.names]
    if unmeasured:
        return {}, [f"Scores are not normalised: the expert {listed(unmeasured)} was not measured."]
    places = {task: panel.index(experts[task]) for task in panel.tasks}
    columns = {
        task: slice(panel.starts[e], panel.starts[e] + len(panel.replicates[e])) for task, e in places.items()
    }
    if zero := [task for task, of_expert in columns.items() if panel.tasks[task].means[of_expert].min() <= 0]:
        return {}, [f"Scores are not normalised: the expert of {_tasks(zero)} has no score above 0."]
    return places, []


def shares_of_expert(panel: Panel, values: Floats, expert: int) -> Floats:
    """Each candidate's values over those of a task's expert, [..., candidates].

    A replicate is divided by the expert's replicate of the same label: each set of experts by its own. Where
    the expert has none of that label, it is divided by the mean of the expert's replicates.

    Args:
        panel: that has the candidates.
        values: means of the task, [..., candidates].
        expert: the place of the expert among the settings.

    Returns:
        The shares; NaN where the expert's value is not above 0.
    """
    by_label = {label: int(panel.starts[expert]) + i for i, label in enumerate(panel.replicates[expert])}
    places = [by_label.get(label, -1) for labels in panel.replicates for label in labels]
    of_expert = values[..., places]
    alone = np.array(places) < 0
    if alone.any():
        of_expert[..., alone] = panel.by_setting(values)[..., [expert]]
    shares: Floats = np.divide(values, of_expert, out=np.full(values.shape, np.nan), where=of_expert > 0)
    return shares


def _tasks(names: Sequence[str]) -> str:
    """The tasks as a subject."""
    return f"the task{'s' if len(names) > 1 else ''} {listed(names)}"
