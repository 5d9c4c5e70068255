"""The Pareto front of a sweep with several metrics: the settings that no other one beats in all of them."""

from __future__ import annotations

from mecha_exp.report.results import Results
from mecha_exp.report.settings import Setting

COLUMN = "pareto"
MARK = "^"
"""The sign of a setting on the front, in a table."""


def objectives(results: Results) -> dict[str, str]:
    """Whether more is better (`maximize`) of the objectives, or of each evaluator's main metric.

    Empty where there is one alone.
    """
    if results.chosen:
        return {}
    if results.objectives:
        return dict(results.objectives)
    declared = {metric: better for record in results.finished for metric, better in record.directions.items()}
    measured = {metric: better for metric, better in declared.items() if metric in results.metrics}
    return measured if len(measured) > 1 else {}


def with_direction(metric: str, direction: str) -> str:
    """A metric in words, with what is better: `accuracy (more is better)`."""
    return f"{metric} ({'more' if direction == 'maximize' else 'less'} is better)"


def front(results: Results) -> list[str]:
    """The names of the settings on the front; empty where there is no second metric."""
    return [setting.name for setting in front_settings(results)]


def chosen_settings(results: Results) -> list[Setting]:
    """The settings that are reported: the front of several objectives, or else the best of each method."""
    return front_settings(results) if results.objectives else results.chosen_settings


def front_settings(results: Results) -> list[Setting]:
    """The settings on the front; empty where there is no second metric.

    A setting's metrics are means over its replicates. One with a metric that is not finite is never on it,
    and neither is a trial of a greedy soup.
    """
    from mecha_exp.verdict import pareto_front

    directions = objectives(results)
    if not directions:
        return []
    settings = [setting for setting in results.settings if not setting.is_trial]
    means = {metric: [s.estimate(metric).mean for s in settings] for metric in directions}
    is_best = pareto_front(
        means, {m: "maximize" if d == "maximize" else "minimize" for m, d in directions.items()}
    )
    return [setting for setting, on_front in zip(settings, is_best, strict=True) if on_front]


def front_column(results: Results) -> list[bool] | None:
    """Whether each point's setting is on the front; None where there is none."""
    if not objectives(results):
        return None
    on_front = {id(record) for setting in front_settings(results) for record in setting.records}
    return [id(record) in on_front for record in results.records]


def front_note(results: Results) -> list[str]:
    """What the mark of the front means, where a table has it."""
    directions = objectives(results)
    if not directions:
        return []
    named = ", ".join(with_direction(m, d) for m, d in directions.items())
    return [f"{MARK} on the Pareto front of {named}: no other setting is as good in all and better in one"]
