"""The numbers of settings and inputs with their 95 % intervals, as tables and figures show them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from mecha_exp.lab.points import SEED_PATH, SET_KEY
from mecha_exp.report.results import REPLICATE_KEYS, Results
from mecha_exp.report.settings import Estimate
from mecha_exp.runs.outcomes import numbered

SEEDS_ALONE = "seeds alone: chance among the examples is not in it"
_IN_WORDS = {"seed": "seeds", SEED_PATH: "seeds", SET_KEY: "sets of experts"}

Bounds = Mapping[tuple[str, str], tuple[float, float]]
"""Both ends of an interval, by the name of a setting or an input and that of a metric."""


def prefix(results: Results, split: str) -> str:
    """The beginning of the names of metrics on a split."""
    return f"{split}/" if split in results.report_splits else ""


def intervals(results: Results) -> dict[tuple[str, str], tuple[float, float]]:
    """The 95 % intervals of the verdict, by the name of a setting or an input and that of a metric.

    Several files of one name have none: the table has one line for them, and the verdict knows each alone.
    """
    bounds = {}
    for verdict in filter(None, (results.verdict, *results.by_objective.values())):
        names = {score.point for score in verdict.scores}
        for score in verdict.scores:
            if numbered(score.point, 2) in names:
                continue
            metric = f"{prefix(results, score.split)}{verdict.metric}"
            bounds[score.point, metric] = score.overall.ci95
            for task, estimate in score.tasks.items():
                bounds[score.point, f"{metric}/{task}"] = estimate.ci95
    return {key: ends for key, ends in bounds.items() if ends[0] == ends[0]}


def of_settings(results: Results, metric: str | None = None) -> dict[str, Estimate]:
    """The mean of a metric, the main one by default, of each setting by name, with its interval."""
    metric, bounds = metric or str(results.metric), intervals(results)
    return {s.name: bounded(s.estimate(metric), s.name, metric, bounds) for s in results.settings}


def of_inputs(results: Results, metric: str | None = None) -> dict[str, Estimate]:
    """The mean of a metric, the main one by default, of each input by name, with its interval."""
    metric, bounds = metric or str(results.metric), intervals(results)
    measured = {name: numbers[metric] for name, numbers in results.references.items() if metric in numbers}
    return {name: bounded(Estimate.of([value]), name, metric, bounds) for name, value in measured.items()}


def bounded(estimate: Estimate, name: str, metric: str, bounds: Bounds) -> Estimate:
    """An estimate with the verdict's interval, where it has one."""
    return replace(estimate, ci95=bounds.get((name, metric))) if estimate.count else estimate


def base_of(results: Results) -> str | None:
    """The name of the base that all points share which have one."""
    bases = {record.base for record in results.finished if record.base}
    return bases.pop() if len(bases) == 1 else None


def best_input(results: Results) -> str | None:
    """The name of the input with the best main metric; None where none was measured."""
    measured = {name: e.mean for name, e in of_inputs(results).items() if math.isfinite(e.mean)}
    choose = min if results.minimized else max
    return choose(measured, key=measured.__getitem__) if measured else None


def covered(results: Results) -> str:
    """What the intervals are over, in words; empty where nothing gives any."""
    verdict = results.verdict or next(iter(results.by_objective.values()), None)
    if verdict and verdict.examples:
        return " and ".join(dict.fromkeys(["examples", *_varied(results)]))
    return SEEDS_ALONE if results.has_replicates else ""


def _varied(results: Results) -> list[str]:
    """What the replicates of a table's settings differ in, in words."""
    texts = {key: {results.text(record, key) for record in results.finished} for key in REPLICATE_KEYS}
    return [_IN_WORDS[key] for key, values in texts.items() if results.has_replicates and len(values) > 1]
