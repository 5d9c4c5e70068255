"""The main metric against how far each result is from its inputs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mecha_exp.app.report.figures.style import (
    COLOURS,
    MARKERS,
    legend,
    metric_label,
    new_figure,
)
from mecha_exp.app.report.results import Results, as_text, is_number
from mecha_exp.app.report.table import shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PREFIX = "weights/relative_change/"
_MAX_PANELS = 4
_MAX_GROUPS = 10


def distances(results: Results) -> Figure | None:
    """A panel for each input, a mark for each point; what is swept in words has marks of its own."""
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
    for axes in panels[len(inputs) :]:
        axes.set_visible(False)
    for axes in panels[::columns]:
        axes.set_ylabel(metric_label(results))
    figure.suptitle(
        f"{shortened(results.title, 70)}\ndistance as a fraction of the input's norm", fontsize="medium"
    )
    if key and groups > 1:
        legend(panels[0], key, 99)
    return figure


def _scatter(axes: Axes, results: Results, name: str, key: str | None) -> int:
    groups: dict[str, list[tuple[float, float]]] = {}
    for record in results.finished:
        x = record.metrics.get(_PREFIX + name, math.nan)
        y = record.metrics.get(str(results.metric), math.nan)
        if math.isfinite(x) and math.isfinite(y):
            label = as_text(results.value(record, key)) if key else ""
            groups.setdefault(label, []).append((x, y))
    crowded = len(results.finished) > 60
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
    best = results.best
    if best and _PREFIX + name in best.metrics:
        place = (best.metrics[_PREFIX + name], best.metrics[str(results.metric)])
        axes.scatter(*place, s=170, facecolors="none", edgecolors="black", linewidths=1.5)
        axes.annotate("best", place, (0, 11), textcoords="offset points", ha="center", fontsize="small")
        axes.margins(y=0.12)
    return len(groups)


def _grouping(results: Results) -> str | None:
    """The swept key that marks are told apart by: words, such as the method, not too many."""
    for key in results.keys:
        values = {s.values[key] for s in results.settings}
        if 1 < len(values) <= _MAX_GROUPS and not all(is_number(v) for v in values):
            return key
    return None
