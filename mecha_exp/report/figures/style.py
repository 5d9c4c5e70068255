"""The style of all figures: readable without colour, with metrics and units as labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from mecha_exp.report.results import Results
from mecha_exp.report.table import shortened
from mecha_exp.runs.values import as_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "osD^vP*X<>"
DASHES: list[Any] = ["-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (3, 1))]
# Okabe and Ito's colours, which most people with a colour vision deficiency can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
COLOUR_MAP = "cividis"  # even in lightness, so that it reads in grey
SMALL = "small"
_REFERENCE_REACH = 0.6  # inputs are drawn up to this far beyond the data, as a fraction of their height
_LOG_RATIO = 20  # between the largest and the smallest value, from which on an axis is logarithmic


def new_figure(
    width: float = 7, height: float = 4.5, rows: int = 1, columns: int = 1, sharey: bool = True
) -> tuple[Figure, list[Axes]]:
    """A figure without a window, and its panels, which share their y axis by default."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, sharey=sharey, squeeze=False)
    return figure, list(axes.flat)


def line_style(number: int) -> dict[str, Any]:
    """The style of a line; the first thirty lines differ, also without colour."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": DASHES[number % len(DASHES)],
        "marker": MARKERS[number % len(MARKERS)],
        "markersize": 5,
    }


def metric_label(results: Results) -> str:
    """The label of the main metric: its name, its unit, and whether more is better."""
    unit = results.unit(results.metric)
    named = f"{results.metric} [{unit}]" if unit else str(results.metric)
    return f"{named}\n{'less' if results.minimized else 'more'} is better" if results.judged else named


def title(axes: Axes, results: Results, what: str = "") -> None:
    """Set the title: the sweep's name, and below it what the figure shows."""
    axes.set_title("\n".join(filter(None, [shortened(results.title, 70), what])), fontsize="medium")


def value_axis(axis: Any, scale: Any, values: Sequence[float]) -> None:
    """Set ticks at the values if they are few, and a logarithmic scale if they span a wide range."""
    tried = sorted(set(values))
    if tried[0] > 0 and tried[-1] / tried[0] >= _LOG_RATIO:
        scale("log")
        axis.set_minor_locator(_no_ticks())
    positions = [math.log(value) for value in tried] if axis.get_scale() == "log" else tried
    closest = min((b - a for a, b in pairwise(positions)), default=1.0)
    if len(tried) <= 12 and closest >= (positions[-1] - positions[0]) / 14:
        axis.set_ticks(tried, [as_text(float(value)) for value in tried])


def reference_lines(axes: Axes, results: Results, values: Sequence[float]) -> None:
    """Draw the inputs as dotted lines with their names; inputs that are too far off become a note."""
    low, high = min(values), max(values)
    reach = _REFERENCE_REACH * ((high - low) or abs(high) or 1.0)
    near, far = [], []
    for name, measured in results.references.items():
        value = measured.get(str(results.metric), math.nan)
        if low - reach <= value <= high + reach:
            axes.axhline(value, color="grey", linewidth=1, linestyle=(0, (2, 3)), zorder=1)
            near.append((value, shortened(name, 20)))
        elif not math.isnan(value):
            far.append(f"{shortened(name, 20)} {value:.3g}")
    _names_beside(axes, near)
    if far:
        text = f"outside the picture: {', '.join(far)}"
        axes.annotate(
            text,
            (0, 0),
            (0, -34),
            xycoords="axes fraction",
            textcoords="offset points",
            va="top",
            fontsize="x-small",
            color="dimgrey",
        )


def _names_beside(axes: Axes, near: list[tuple[float, str]]) -> None:
    """Write names at the right edge, pushed apart where their lines are close."""
    axes.autoscale_view()
    low, high = axes.get_ylim()
    gap = (high - low) * 0.045
    height = -math.inf
    for value, name in sorted(near):
        height = max(value, height + gap)
        axes.annotate(
            f" {name}",
            (1, height),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=SMALL,
            color="dimgrey",
            annotation_clip=False,
        )


def legend(axes: Axes, heading: str, entries: int) -> None:
    """Draw a legend: inside the axes if it is short, else beside them."""
    if entries <= 3:
        axes.legend(title=heading, fontsize=SMALL, framealpha=0.8)
    else:
        handles, labels = axes.get_legend_handles_labels()
        axes.figure.legend(handles, labels, title=heading, fontsize=SMALL, loc="outside right upper")


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()
