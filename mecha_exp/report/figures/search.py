"""The figure of a search: its trials in their order, and the best so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mecha_exp.errors import counted
from mecha_exp.report.figures.style import (
    COLOURS,
    ends,
    lengths,
    metric_label,
    new_figure,
    reference_lines,
    title,
)
from mecha_exp.report.intervals import of_settings
from mecha_exp.report.results import Results
from mecha_exp.report.search.progress import best_so_far, trials_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def search_progress(results: Results) -> Figure | None:
    """Draw each trial over its number, and the best so far with its 95 % interval where there is one."""
    trials = trials_of(results)
    if not trials or not results.judged:
        return None
    best = best_so_far(results, trials)
    numbers, heights = [n for n, _, _ in trials], [value for _, _, value in best]
    figure, (axes,) = new_figure()
    by_name = of_settings(results)
    estimates = [by_name[name] for _, name, _ in trials]
    if bars := lengths(estimates):
        means = [value for _, _, value in trials]
        axes.errorbar(numbers, means, bars, fmt="none", ecolor="grey", elinewidth=0.7, alpha=0.35, zorder=0)
    axes.scatter(numbers, [value for _, _, value in trials], s=16, facecolors="none", edgecolors="dimgrey")
    axes.plot(numbers, heights, drawstyle="steps-post", color=COLOURS[0], linewidth=2, label="best so far")
    bounds = [by_name[name].bounds for _, name, _ in best]
    if any(low == low for low, _ in bounds):
        low, high = zip(*bounds, strict=True)
        axes.fill_between(
            numbers, low, high, step="post", color=COLOURS[0], alpha=0.15, label="its 95 % interval"
        )
    reference_lines(axes, results, ends(estimates))
    axes.set_xlabel("trial")
    axes.set_ylabel(metric_label(results))
    axes.locator_params(axis="x", integer=True)
    axes.legend(loc="best", frameon=False, fontsize="small")
    title(
        axes,
        results,
        f"{counted(len(trials), 'trial')}; the interval is not corrected for having chosen the best",
    )
    return figure
