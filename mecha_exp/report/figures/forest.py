"""The forest plot of a verdict: how far each setting lies from the chosen one, with 95 % intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mecha_exp.report.figures.style import COLOURS, SMALL, new_figure, title
from mecha_exp.report.results import Results
from mecha_exp.report.table import distinct

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mecha_exp.verdict import Comparison, Verdict

MAX_ROWS = 40
"""Comparisons that are drawn: those nearest to the best, whose order matters most."""


def forest(results: Results) -> Figure | None:
    """Draw the differences to the chosen setting; None where nothing was compared.

    A hollow mark cannot be told from the chosen setting; a filled one can. The grey band is narrower than
    what comparisons of settings show with 80 % power. Intervals are each setting's own, marks are corrected.
    """
    verdict = results.verdict
    compared = verdict.with_chosen[:MAX_ROWS] if verdict else []
    if verdict is None or verdict.selected is None or not compared:
        return None
    figure, (axes,) = new_figure(8, 1.9 + 0.28 * len(compared))
    smallest = verdict.cost.detectable_between_settings if verdict.cost else None
    if smallest:
        axes.axvspan(-smallest, smallest, color="grey", alpha=0.15, linewidth=0)
    axes.axvline(0, color="black", linewidth=1)
    for height, comparison in enumerate(reversed(compared)):
        value, (low, high) = comparison.difference.value, comparison.difference.ci95
        colour = COLOURS[0] if comparison.distinguishable else "dimgrey"
        axes.plot([low, high], [height, height], color=colour, linewidth=1.5)
        face = colour if comparison.distinguishable else "white"
        axes.plot([value], [height], marker="o", color=colour, markerfacecolor=face, markersize=6)
    axes.set_yticks(range(len(compared)), _labels(verdict, compared), fontsize=SMALL)
    axes.set_ylim(-0.7, len(compared) - 0.3)
    better = "left" if results.minimized else "right"
    [chosen] = distinct([verdict.selected.point], 40)
    axes.set_xlabel(f"difference in {verdict.metric}; better: {better}\n0: {chosen}")
    title(
        axes,
        results,
        "hollow: no difference shown, corrected for all\nintervals: by themselves; grey band: often missed",
    )
    return figure


def _labels(verdict: Verdict, compared: Sequence[Comparison]) -> list[str]:
    """The names of the settings from the bottom up, with their splits where these differ."""
    names = distinct([comparison.point for comparison in compared], 40)
    differ = len({comparison.split for comparison in compared}) > 1
    splits = [f" ({comparison.split})" if differ else "" for comparison in compared]
    return [f"{name}{split}" for name, split in zip(names, splits, strict=True)][::-1]
