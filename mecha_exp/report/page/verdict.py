"""The verdict on the page: the table of methods by tasks, and what it was to choose."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from mecha_exp.report.paper.text import Numbers, caption
from mecha_exp.report.results import Results
from mecha_exp.report.settings import Estimate
from mecha_exp.report.table import estimate_text

if TYPE_CHECKING:
    from mecha_exp.verdict import Estimate as Interval
    from mecha_exp.verdict import Score, Verdict


def task_table(results: Results) -> dict[str, Any] | None:
    """Methods by tasks on the reported split, for the template: headings, rows of cells, and the caption.

    Returns:
        None where the evaluator gives one number for each model.
    """
    verdict = results.verdict
    if verdict is None or not verdict.columns:
        return None
    chosen = (verdict.chosen or {}).values()
    scores = [score for score in verdict.scores if score.split == verdict.reported_on]
    methods = [score for score in scores if score.point in chosen]
    inputs = [score for score in scores if score.recipe is None]
    tasks: list[str | None] = [*(methods[0].tasks if methods else {})]
    tasks = [None, *tasks] if len(tasks) > 1 else [None]
    rows = [(kind, s) for kind, group in (("point", methods), ("reference", inputs)) for s in group]
    return {
        "headings": ["method", *(task or str(verdict.metric) for task in tasks)],
        "rows": [
            {"kind": kind, "name": _name(s), "cells": [_cell(verdict, s, t) for t in tasks]}
            for kind, s in rows
        ],
        "caption": caption(verdict, Numbers(intervals=True)),
    }


def _name(score: Score) -> str:
    """The method with its setting, or the input."""
    return f"{score.recipe} ({score.point})" if score.recipe else score.point


def _cell(verdict: Verdict, score: Score, task: str | None) -> dict[str, Any]:
    """A number with its interval, and whether it is the best of its column or cannot be told from it."""
    estimate = score.overall if task is None else score.tasks[task]
    column = next((column for column in verdict.columns if column.task == task), None)
    return {
        "text": _estimate_text(estimate),
        "value": estimate.value,
        "best": column is not None and column.best == score.point,
        "tied": column is not None and score.point in column.tied,
    }


def _estimate_text(estimate: Interval) -> str:
    """A number of the verdict, with its interval where it has one."""
    ends = estimate.ci95 if estimate.low == estimate.low else None
    return estimate_text(Estimate(estimate.value, None, 1, ci95=ends))


def compared(results: Results) -> list[dict[str, Any]]:
    """Each comparison with the chosen setting as texts: the forest plot as a table, the nearest first."""
    return [
        {
            "name": c.point,
            "split": c.split,
            "difference": _estimate_text(c.difference),
            "value": c.difference.value,
            "p": f"{c.p:.2g}",
            "p_holm": f"{c.p_holm:.2g}",
            "told": "yes" if c.distinguishable else "no",
        }
        for c in (results.verdict.with_chosen if results.verdict else ())
    ]


def choice(results: Results) -> dict[str, str]:
    """How the points were chosen and what that costs, as terms with their meaning."""
    verdict = results.verdict
    if verdict is None or verdict.cost is None:
        return {}
    cost = verdict.cost
    same = verdict.selected_on == verdict.reported_on
    rows = {
        "chosen on": f"{verdict.selected_on}, the best of {cost.candidates} settings",
        "reported on": f"{verdict.reported_on}{', the same data' if same else ''}",
        "interval over": ", ".join(verdict.covers),
        "there, when chosen": f"{cost.selection_estimate:.4g}",
    }
    if cost.gap is not None:
        rows["more than reported by"] = f"{cost.gap:.2g}"
    if cost.cross_validated is not None:
        rows["cross-validated"] = f"{cost.cross_validated:.4g}, on examples that had no part in the choice"
    for detectable in cost.detectable:
        kind = "between settings" if detectable.against is None else f"from {detectable.against}"
        shown = f"differences of {detectable.difference:.2g} and more, in four of five sweeps"
        rows[f"detectable {kind}"] = (
            shown if math.isfinite(detectable.difference) else "hardly any difference"
        )
    return rows
