"""The figure of the main metric against the distance of each result to its inputs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mecha_exp.report.figures.style import COLOURS, MARKERS, legend, metric_label, new_figure
from mecha_exp.report.results import Results
from mecha_exp.report.settings import Setting
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
    groups = 0
    for axes, name in zip(panels, inputs, strict=False):
        groups = _scatter(axes, results, name, key)
        axes.set_xlabel(f"distance to {shortened(name, 24)}")
        axes.grid(alpha=0.3)
        axes.locator_params(axis="x", nbins=6)
    for axes in panels[len(inputs) :]:
        axes.set_visible(False)
    for axes in panels[::columns]:
        axes.set_ylabel(metric_label(results))
    what = "distance as a fraction of the input's norm" + (
        "; means over replicates" if results.has_replicates else ""
    )
    figure.suptitle(f"{shortened(results.title, 70)}\n{what}", fontsize="medium")
    if key and groups > 1:
        legend(panels[0], results.heading(key), 99)
    return figure


def _scatter(axes: Axes, results: Results, name: str, key: str | None) -> int:
    groups: dict[str, list[tuple[float, float]]] = {}
    for setting in results.settings:
        point = _point(setting, results, name)
        if all(map(math.isfinite, point)):
            label = results.cell(setting, key) if key else ""
            groups.setdefault(label, []).append(point)
    crowded = len(results.settings) > 60
    for number, (label, points) in enumerate(groups.items()):
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
