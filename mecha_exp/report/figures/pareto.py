"""Two metrics of a sweep against each other with their Pareto front, and the volume that it dominates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mecha_exp.report.figures.style import COLOURS, SMALL, interval_note, lengths, new_figure, title
from mecha_exp.report.intervals import of_inputs, of_settings
from mecha_exp.report.pareto import front, objectives, with_direction
from mecha_exp.report.results import Results
from mecha_exp.report.search.front import front_of
from mecha_exp.report.table import distinct, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_NAMED = 12


def pareto_plot(results: Results) -> Figure | None:
    """Draw the settings over two metrics; those on the front are filled, and joined if there is no third.

    None where there is one metric alone, or no setting on the front.
    """
    directions, best = objectives(results), set(front(results))
    if not best:
        return None
    across, up = list(directions)[:2]
    points = {s.name: (s.estimate(across).mean, s.estimate(up).mean) for s in results.settings}
    points = {name: point for name, point in points.items() if all(map(math.isfinite, point))}
    figure, (axes,) = new_figure()
    others = [point for name, point in points.items() if name not in best]
    if others:
        x, y = zip(*others, strict=True)
        axes.scatter(x, y, facecolors="none", edgecolors="dimgrey", s=24)
    on_front = sorted((point, name) for name, point in points.items() if name in best)
    _whiskers(axes, results, (across, up), points)
    coordinates = [point for point, _ in on_front]
    joined = "-" if len(directions) == 2 else ""
    axes.plot(*zip(*coordinates, strict=True), marker="o", linestyle=joined, color=COLOURS[0], markersize=6)
    if len(on_front) <= MAX_NAMED:
        for point, name in zip(coordinates, distinct([name for _, name in on_front], 24), strict=True):
            axes.annotate(name, point, (4, 4), textcoords="offset points", fontsize=SMALL)
    for metric, label in ((across, axes.set_xlabel), (up, axes.set_ylabel)):
        label(with_direction(metric, directions[metric]))
    note = interval_note(results, [e for m in (across, up) for e in of_settings(results, m).values()])
    what = f"filled: the Pareto front of {len(directions)} metrics; crosses: inputs"
    title(axes, results, "\n".join(filter(None, [what, note])))
    return figure


def _whiskers(
    axes: Axes, results: Results, metrics: tuple[str, str], points: Mapping[str, tuple[float, float]]
) -> None:
    """Draw the intervals of both metrics behind the marks, and the inputs as named crosses."""
    alpha = 0.25 if len(points) > MAX_NAMED else 0.6
    bars = [lengths([of_settings(results, metric)[name] for name in points]) for metric in metrics]
    x, y = zip(*points.values(), strict=True)
    axes.errorbar(x, y, bars[1], bars[0], "none", ecolor="grey", elinewidth=0.8, alpha=alpha, zorder=0)
    right, high = (of_inputs(results, metric) for metric in metrics)
    for name in right.keys() & high.keys():
        place = right[name].mean, high[name].mean
        if all(map(math.isfinite, place)):
            width, height = lengths([right[name]]), lengths([high[name]])
            axes.errorbar(*place, yerr=height, xerr=width, fmt="x", color="dimgrey", elinewidth=0.8)
            axes.annotate(shortened(name, 20), place, (4, -9), textcoords="offset points", fontsize=SMALL)


def hypervolume(results: Results) -> Figure | None:
    """Draw the hypervolume of the objectives after each setting, in their order; None without several."""
    front = front_of(results)
    if front is None:
        return None
    figure, (axes,) = new_figure()
    axes.plot(range(len(front.volumes)), front.volumes, drawstyle="steps-post", color=COLOURS[0], linewidth=2)
    axes.set_xlabel("setting")
    axes.set_ylabel("hypervolume")
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="x", integer=True)
    at = ", ".join(f"{metric}={value:.4g}" for metric, value in front.reference.items())
    title(axes, results, f"over the reference point {at}")
    return figure
