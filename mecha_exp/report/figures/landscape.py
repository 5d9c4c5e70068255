"""The progress and the landscape of a search: its metric over trials, each key, and two keys together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mecha_exp.errors import counted
from mecha_exp.report.figures.style import (
    COLOUR_MAP,
    COLOURS,
    SMALL,
    ends,
    interval_note,
    is_last,
    lengths,
    metric_label,
    new_figure,
    reference_lines,
    title,
    usual_width,
    value_axis,
)
from mecha_exp.report.intervals import of_settings
from mecha_exp.report.results import MISSING, Results
from mecha_exp.report.search.importance import importances_of
from mecha_exp.report.search.progress import best_so_far, trials_of
from mecha_exp.report.settings import Setting
from mecha_exp.report.table import distinct, shortened
from mecha_exp.runs.values import as_text, is_numeric

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

MAX_PANELS = 9
_FEWEST = 8  # settings of a contour
_LEVELS = 12
_LOG_RATIO, _FEW = 20, 6


def importance_bars(results: Results) -> Figure | None:
    """Draw the importance of each key, the largest on top; None where none was estimated."""
    importances = importances_of(results)
    if importances is None:
        return None
    shares = list(importances.shares.items())[: 2 * MAX_PANELS]
    figure, (axes,) = new_figure(7, 1.5 + 0.3 * len(shares))
    places = range(len(shares), 0, -1)
    axes.barh(places, [share for _, share in shares], color=COLOURS[0], height=0.6)
    axes.set_yticks(places, distinct([key for key, _ in shares], 30))
    axes.set_xlim(0, 1)
    axes.set_xlabel(f"share of {results.metric}")
    title(axes, results, importances.estimator)
    return figure


def slices(results: Results) -> Figure | None:
    """Draw each setting over each of its keys, the most important first; later settings are darker."""
    settings, keys = results.measured, _keys(results)[:MAX_PANELS]
    if not keys or len(settings) < 2:
        return None
    columns = min(3, len(keys))
    rows = math.ceil(len(keys) / columns)
    figure, panels = new_figure(3.2 * columns + 1, 2.6 * rows + 1, rows, columns)
    for axes, key in zip(panels, keys, strict=False):
        _slice(axes, results, settings, key)
    for axes in panels[len(keys) :]:
        axes.set_visible(False)
    for axes in panels[::columns]:
        axes.set_ylabel(metric_label(results), fontsize=SMALL)
    note = interval_note(results, of_settings(results).values())
    what = "; ".join(filter(None, ["the darker, the later", note]))
    figure.suptitle(f"{shortened(results.title, 70)}\n{what}", fontsize="medium")
    return figure


def _slice(axes: Axes, results: Results, settings: list[Setting], key: str) -> None:
    having = [(n, s) for n, s in enumerate(settings) if s.values[key] is not None]
    values = [s.values[key] for _, s in having]
    heights = [s.estimate(results.metric).mean for _, s in having]
    if is_numeric(values):
        across = [float(value) for value in values]  # type: ignore[arg-type]
        _scale(axes.xaxis, axes.set_xscale, across, _is_logarithmic(results, key, across))
    else:
        words = list(dict.fromkeys(values))
        across = [float(words.index(value)) for value in values]
        axes.set_xticks(
            range(len(words)), distinct([as_text(w) or MISSING for w in words], 16), fontsize=SMALL
        )
    order, by_name = [n for n, _ in having], of_settings(results)
    estimates = [by_name[s.name] for _, s in having]
    if bars := lengths(estimates):
        axes.errorbar(across, heights, bars, fmt="none", ecolor="grey", elinewidth=0.8, alpha=0.4, zorder=0)
    reference_lines(axes, results, ends(estimates), named=is_last(axes))
    axes.scatter(across, heights, s=18, c=order, cmap=f"{COLOUR_MAP}_r", edgecolors="dimgrey", linewidths=0.4)
    axes.set_xlabel(shortened(key, 28))
    axes.grid(alpha=0.3)


def contours(results: Results) -> Figure | None:
    """Draw the metric as a surface between the settings, over the two numeric keys that decide most.

    None with fewer than two such keys, or where the settings lie on a line.
    """
    from matplotlib.tri import Triangulation

    settings = results.measured
    keys = [k for k in _keys(results) if is_numeric(s.values[k] for s in settings)][:2]
    if len(keys) < 2:
        return None
    points = [s for s in settings if all(s.values[key] is not None for key in keys)]
    if len(points) < _FEWEST:
        return None
    xs, ys = ([float(s.values[key]) for s in points] for key in keys)  # type: ignore[arg-type]
    heights = [s.estimate(results.metric).mean for s in points]
    figure, (axes,) = new_figure(7.5, 5.5)
    x_log, y_log = (_is_logarithmic(results, key, v) for key, v in zip(keys, (xs, ys), strict=True))
    _scale(axes.xaxis, axes.set_xscale, xs, x_log)
    _scale(axes.yaxis, axes.set_yscale, ys, y_log)
    try:
        even = Triangulation(_even(xs, x_log), _even(ys, y_log))
        between = Triangulation(xs, ys, even.triangles)
        surface = axes.tricontourf(between, heights, levels=_LEVELS, cmap=COLOUR_MAP)
    except (ValueError, RuntimeError):  # no triangle has an area
        return None
    axes.scatter(xs, ys, s=12, facecolors="white", edgecolors="black", linewidths=0.6)
    axes.set_xlabel(keys[0])
    axes.set_ylabel(keys[1])
    figure.colorbar(surface, ax=axes, label=metric_label(results))
    width = usual_width(of_settings(results).values())
    what = "linear between the settings, whatever their other keys are"
    title(axes, results, "\n".join(filter(None, [what, width and f"{width} at each"])))
    return figure


def _is_logarithmic(results: Results, key: str, values: Sequence[float]) -> bool:
    """Whether a key was drawn by its logarithm.

    Where that is not known it is guessed: the median of the values is nearer to the geometric middle.
    """
    if results.logarithmic is not None:
        return key in results.logarithmic and min(values) > 0
    low, high = min(values), max(values)
    if low <= 0 or high / low < _LOG_RATIO:
        return False
    return statistics.median(values) < (math.sqrt(low * high) + (low + high) / 2) / 2


def _even(values: Sequence[float], logarithmic: bool) -> list[float]:
    """Values as they are spread over an axis, from 0 to 1."""
    spread = [math.log(value) for value in values] if logarithmic else list(values)
    low, high = min(spread), max(spread)
    return [(value - low) / ((high - low) or 1.0) for value in spread]


def _scale(axis: Axis, scale: Callable[[str], None], values: Sequence[float], logarithmic: bool) -> None:
    """Set the scale of an axis, and ticks at its values where they are few."""
    if logarithmic:
        scale("log")
    if logarithmic or len(set(values)) <= _FEW:
        value_axis(axis, scale, values)


def _keys(results: Results) -> list[str]:
    """The keys that vary, the most important first."""
    importances = importances_of(results)
    return [*importances.shares] if importances else results.varied_keys(results.measured)


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
