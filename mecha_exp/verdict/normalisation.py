"""Normalised scores: each task's score over that of the input that is its expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mecha_exp.evaluation.normalisation import find_experts
from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.verdict.candidates import Candidate, Direction, comparable, listed
from mecha_exp.verdict.intervals import Estimate
from mecha_exp.verdict.panel import Floats, Panel


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


def experts_of(
    inputs: Sequence[Candidate],
    split: str,
    base: str | None,
    named: Mapping[str, str],
    direction: Direction,
) -> dict[str, str]:
    """The input that is the expert of each task; a task without one is missing.

    It is the named one, or the one that is best by far (see `find_experts`), in each set of inputs the same.
    """
    usable, _ = comparable([candidate for candidate in inputs if split in candidate.outcomes], split)
    sets: dict[str, dict[str, Outcomes]] = {}
    for candidate in usable:
        sets.setdefault(candidate.replicate, {})[candidate.name] = candidate.outcomes[split]
    found = []
    for outcomes in sets.values():
        best = find_experts(outcomes, base, {}, minimized=direction == "minimize")
        names = {id(part): name for name, part in outcomes.items()}
        found.append({task: names[id(part)] for task, part in best.items()})
    first = found[0] if found else {}
    common = {task: name for task, name in first.items() if all(each.get(task) == name for each in found)}
    return {**common, **named}


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
