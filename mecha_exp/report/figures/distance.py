"""The figure of the main metric against the distance of each result to its inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mecha_exp.report.figures.style import (
    COLOURS,
    MARKERS,
    ends,
    interval_note,
    is_last,
    legend,
    lengths,
    metric_label,
    new_figure,
    reference_lines,
)
from mecha_exp.report.intervals import of_settings
from mecha_exp.report.results import Results
from mecha_exp.report.settings import Estimate, Setting
from mecha_exp.report.table import shortened
from mecha_exp.runs.values import is_numeric

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PREFIX = "weights/relative_change/"
_MAX_PANELS = 4
_MAX_GROUPS = 10


def distances(results: Results) -> Figure | None:
    """Draw a panel for each input with a mark for each setting; the marks differ by a swept key."""
    inputs = [m.removeprefix(_PREFIX) for m in results.metrics if m.startswith(_PREFIX)][:_MAX_PANELS]
    if not inputs or not results.judged:
        return None
    columns = 1 if len(inputs) == 1 else 2
    rows = math.ceil(len(inputs) / columns)
    figure, panels = new_figure(7 if columns == 1 else 8.5, 1 + 3.2 * rows, rows, columns)
    key = _grouping(results)
    groups = [_scatter(axes, results, name, key) for axes, name in zip(panels, inputs, strict=False)]
    for axes, name in zip(panels, inputs, strict=False):
        axes.set_xlabel(f"distance to {shortened(name, 24)}")
        axes.grid(alpha=0.3)
        axes.locator_params(axis="x", nbins=6)
    for axes in panels[len(inputs) :]:
        axes.set_visible(False)
    for axes in panels[::columns]:
        axes.set_ylabel(metric_label(results))
    what = "distance as a fraction of the input's norm"
    note = interval_note(results, of_settings(results).values())
    lines = filter(None, [shortened(results.title, 70), what, note])
    figure.suptitle("\n".join(lines), fontsize="medium")
    if key and max(groups) > 1:
        legend(panels[groups.index(max(groups))], results.heading(key), 99)
    return figure


def _scatter(axes: Axes, results: Results, name: str, key: str | None) -> int:
    groups: dict[str, list[tuple[float, float]]] = {}
    drawn: list[tuple[float, Estimate]] = []
    estimates = of_settings(results)
    for setting in results.settings:
        point = _point(setting, results, name)
        if all(map(math.isfinite, point)):
            label = results.cell(setting, key) if key else ""
            groups.setdefault(label, []).append(point)
            drawn.append((point[0], estimates[setting.name]))
    crowded = len(results.settings) > 60
    _whiskers(axes, results, drawn, faint=crowded)
    labels = [results.cell(setting, key) if key else "" for setting in results.settings]
    numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    for label, points in groups.items():
        number = numbers[label]
        axes.scatter(
            [x for x, _ in points],
            [y for _, y in points],
            s=14 if crowded else 32,
            marker=MARKERS[number % len(MARKERS)],
            color=COLOURS[number % len(COLOURS)],
            alpha=0.6 if crowded else 0.9,
            edgecolors="black",
            linewidths=0.4,
            label=shortened(label),
        )
    if results.best_setting:
        point = _point(results.best_setting, results, name)
        axes.scatter(*point, s=170, facecolors="none", edgecolors="black", linewidths=1.5)
        axes.annotate("best", point, (0, 11), textcoords="offset points", ha="center", fontsize="small")
        axes.margins(y=0.15)
    return len(groups)


def _whiskers(axes: Axes, results: Results, drawn: Sequence[tuple[float, Estimate]], *, faint: bool) -> None:
    """Draw the intervals of settings behind their marks, and the base and the best input as lines."""
    estimates = [estimate for _, estimate in drawn]
    if bars := lengths(estimates):
        across, means = [x for x, _ in drawn], [estimate.mean for estimate in estimates]
        alpha = 0.25 if faint else 0.7
        axes.errorbar(across, means, bars, fmt="none", ecolor="grey", elinewidth=1, alpha=alpha, zorder=0)
    if drawn:
        reference_lines(axes, results, ends(estimates), named=is_last(axes))


def _point(setting: Setting, results: Results, name: str) -> tuple[float, float]:
    """The distance to an input and the main metric, each the mean over the seeds."""
    return setting.estimate(_PREFIX + name).mean, setting.estimate(results.metric).mean


def _grouping(results: Results) -> str | None:
    """The swept key that decides the marks: a key with few values, preferably words such as the method."""
    keys: list[tuple[bool, str]] = []
    for key in results.keys:
        values = results.values_of(key)
        if 1 < len(values) <= _MAX_GROUPS:
            keys.append((is_numeric(values), key))
    return min(keys, key=lambda pair: pair[0])[1] if keys else None
