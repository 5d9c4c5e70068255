"""The style of all figures: readable without colour, with metrics and units as labels."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from mecha_exp.report.intervals import base_of, best_input, covered, of_inputs
from mecha_exp.report.results import Results
from mecha_exp.report.settings import Estimate
from mecha_exp.report.table import shortened
from mecha_exp.runs.values import as_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "osD^vP*X<>"
DASHES: list[Any] = ["-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (3, 1))]
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
COLOURS = (*_COLOURS, "#332288", "#882255", "#000000")
"""Okabe and Ito's colours, and two of Paul Tol's: people with a colour vision deficiency tell them apart."""
COLOURS_ON_BLACK = (*_COLOURS, "#F0E442", "#9C7CFF", "#FFFFFF")
COLOUR_MAP = "cividis"  # even in lightness, so that it reads in grey
SMALL = "small"
NOTE = "note"
"""The mark of texts that belong to the caption where a figure is part of a paper."""
_TITLE_PAD = 24  # points, for a line of names below the title
_REFERENCE_REACH = 0.6  # inputs are drawn up to this far beyond the data, as a fraction of their height
_LETTER_WIDTH = (
    0.58  # of small letters, as a share of the size of ordinary ones; two are as wide as a line is high
)
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


def title(axes: Axes, results: Results, what: str = "", *, above: bool = False) -> None:
    """Set the title: the sweep's name, and below it what the figure shows; above names of upright lines."""
    text = "\n".join(filter(None, [shortened(results.title, 70), what]))
    axes.set_title(text, fontsize="medium", pad=_TITLE_PAD if above else None)


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


def lengths(estimates: Sequence[Estimate]) -> tuple[list[float], list[float]] | None:
    """How far 95 % intervals reach below and above their estimates; None where no estimate has one."""
    bounds = [estimate.bounds for estimate in estimates]
    if all(math.isnan(low) for low, _ in bounds):
        return None
    pairs = list(zip(estimates, bounds, strict=True))
    below = [max(0.0, e.mean - low) if low == low else 0.0 for e, (low, _) in pairs]
    return below, [max(0.0, high - e.mean) if high == high else 0.0 for e, (_, high) in pairs]


def ends(estimates: Iterable[Estimate]) -> list[float]:
    """The finite ones of means and of both ends of their intervals: what an axis has to contain."""
    values = [value for estimate in estimates for value in (estimate.mean, *estimate.bounds)]
    return [value for value in values if math.isfinite(value)]


def interval_note(results: Results, estimates: Iterable[Estimate]) -> str:
    """The explanation of error bars; an empty string if no estimate has an interval."""
    has_some = any(low == low for low, _ in (estimate.bounds for estimate in estimates))
    return f"95 % intervals over {covered(results)}" if has_some and covered(results) else ""


def usual_width(estimates: Iterable[Estimate]) -> str:
    """The median half of the intervals' lengths in words, for figures that have no place for each."""
    halves = [(high - low) / 2 for low, high in (e.bounds for e in estimates) if low == low]
    return f"95 % interval about ±{statistics.median(halves):.2g}" if halves else ""


def reference_lines(
    axes: Axes, results: Results, values: Sequence[float], *, upright: bool = False, named: bool = True
) -> None:
    """Draw the inputs as dotted lines with their names, and the intervals of the base and the best as bands.

    The base and the best input are always within the axes. Others that are too far off become a note.

    Args:
        axes: where more than inputs is drawn.
        results: of the sweep.
        values: what else the axis of the metric has to contain.
        upright: whether the metric lies on the x axis.
        named: whether there is room for names at the ends of the lines, and for the note.
    """
    low, high = min(values), max(values)
    reach = _REFERENCE_REACH * ((high - low) or abs(high) or 1.0)
    always = {base_of(results), best_input(results)}
    line, band = (axes.axvline, axes.axvspan) if upright else (axes.axhline, axes.axhspan)
    near, far = [], []
    for name, estimate in of_inputs(results).items():
        value = estimate.mean
        if (name in always and math.isfinite(value)) or low - reach <= value <= high + reach:
            line(value, color="grey", linewidth=1, linestyle=(0, (2, 3)), zorder=1)
            if name in always and estimate.bounds[0] == estimate.bounds[0]:
                band(*estimate.bounds, color="grey", alpha=0.12, linewidth=0, zorder=0)
            near.append((value, shortened(name, 20)))
        elif not math.isnan(value):
            far.append(f"{shortened(name, 20)} {value:.3g}")
    if named:
        _names_beside(axes, near, upright=upright)
    if named and far and axes.figure.axes == [axes]:
        _note_below(axes, f"outside the picture: {', '.join(far)}")


def is_last(axes: Axes) -> bool:
    """Whether axes are the last of their row, so that there is room beside them."""
    place = axes.get_subplotspec()
    return place is None or place.is_last_col()


def _note_below(axes: Axes, text: str) -> None:
    """Write a small note below the label of the x axis."""
    axes.annotate(
        text,
        (0, 0),
        (0, -34),
        xycoords="axes fraction",
        textcoords="offset points",
        va="top",
        fontsize="x-small",
        color="dimgrey",
        gid=NOTE,
    )


def _names_beside(axes: Axes, near: Sequence[tuple[float, str]], *, upright: bool) -> None:
    """Write names at the ends of their lines; where lines are close, each name is tied to its line."""
    axes.autoscale_view()
    ordered = sorted(near)
    scale, box = (axes.transData, axes.bbox)
    index, size = (0, box.width) if upright else (1, box.height)
    at = [float(scale.transform((v, v))[index] - (box.x0 if upright else box.y0)) / size for v, _ in ordered]
    letters = max((len(name) for _, name in near), default=0) if upright else 2
    gap = _LETTER_WIDTH * letters * float(axes.xaxis.label.get_fontsize()) * axes.figure.dpi / 72 / size
    coordinates = ("data", "axes fraction") if upright else ("axes fraction", "data")
    for place, label, (value, name) in zip(at, apart(at, gap), ordered, strict=True):
        moved = (label - place) * size * 72 / axes.figure.dpi
        axes.annotate(
            name,
            (value, 1) if upright else (1, value),
            xytext=(moved, 8) if upright else (10, moved),
            textcoords="offset points",
            xycoords=coordinates,
            va="bottom" if upright else "center",
            ha="center" if upright else "left",
            fontsize=SMALL,
            color="dimgrey",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": "grey", "linewidth": 0.6, "shrinkA": 1, "shrinkB": 0},
        )


def apart(places: Sequence[float], gap: float) -> list[float]:
    """Places in order, moved as little as it takes to lie a gap from each other.

    >>> apart([0.1, 0.5, 0.52], 0.1)
    [0.1, 0.46, 0.56]
    """
    groups: list[list[float]] = []
    for place in places:
        groups.append([place])
        while len(groups) > 1 and _last(groups[-2], gap) + gap > _first(groups[-1], gap):
            groups[-2:] = [groups[-2] + groups[-1]]
    return [round(_first(group, gap) + gap * n, 9) for group in groups for n in range(len(group))]


def _first(group: Sequence[float], gap: float) -> float:
    """The place of the first of a group that is spread about its middle."""
    return sum(group) / len(group) - gap * (len(group) - 1) / 2


def _last(group: Sequence[float], gap: float) -> float:
    """The place of the last one."""
    return _first(group, gap) + gap * (len(group) - 1)


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
