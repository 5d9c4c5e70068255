"""Figures of the main metric against one hyperparameter, numeric or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mecha_exp.report.figures.style import (
    ends,
    interval_note,
    legend,
    lengths,
    line_style,
    metric_label,
    new_figure,
    reference_lines,
    title,
    value_axis,
)
from mecha_exp.report.intervals import of_settings
from mecha_exp.report.results import Results
from mecha_exp.report.settings import Estimate
from mecha_exp.report.table import distinct, shortened
from mecha_exp.runs.values import as_text, is_numeric

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BAR_GAP = 0.007  # between the intervals of two lines, as a fraction of the axis


def curves(results: Results) -> Figure | None:
    """Draw a line for each value of the second key; bars are 95 % intervals."""
    keys = results.varied_keys(results.settings)
    numeric = [k for k in keys if is_numeric(results.values_of(k))]
    key = max(numeric, key=lambda k: len(results.values_of(k)))
    others = [k for k in keys if k != key]
    lines, levels = _series(results, key, others)
    if not lines:
        return None
    figure, (axes,) = new_figure(width=7 if len(lines) <= 3 else 8)
    labels = distinct(list(lines))
    tried = [x for points in lines.values() for x, _ in points]
    value_axis(axes.xaxis, axes.set_xscale, tried)
    for number, (label, points) in enumerate(zip(labels, lines.values(), strict=True)):
        points.sort(key=lambda point: point[0])
        x = [value for value, _ in points]
        y = [estimate.mean for _, estimate in points]
        bars = lengths([estimate for _, estimate in points])
        if bars:  # otherwise the bars would cover each other
            x = _beside(x, number - (len(lines) - 1) / 2, tried, axes.get_xscale() == "log")
        axes.errorbar(x, y, bars, label=label, capsize=3, elinewidth=1, **line_style(number))
    for number, (label, level) in enumerate(levels.items(), len(lines)):
        _level_line(axes, shortened(label), level, number)
    estimates = [*(estimate for points in lines.values() for _, estimate in points), *levels.values()]
    reference_lines(axes, results, ends(estimates))
    axes.set_xlabel(key)
    axes.set_ylabel(metric_label(results))
    axes.grid(alpha=0.3)
    title(axes, results, interval_note(results, estimates))
    if others:
        legend(axes, ", ".join(others), len(lines) + len(levels))
    return figure


def _series(
    results: Results, key: str, others: Sequence[str]
) -> tuple[dict[str, list[tuple[float, Estimate]]], dict[str, Estimate]]:
    """The points of each line by its label, and the estimates of settings without a number of the key.

    Such a setting is a method without alpha, for instance.
    """
    lines: dict[str, list[tuple[float, Estimate]]] = {}
    levels: dict[str, Estimate] = {}
    estimates = of_settings(results)
    for setting in results.measured:
        label = ", ".join(as_text(setting.values[other]) for other in others)
        value, estimate = setting.values[key], estimates[setting.name]
        if isinstance(value, int | float):
            lines.setdefault(label, []).append((float(value), estimate))
        else:
            levels[label] = estimate
    return lines, levels


def _level_line(axes: Axes, label: str, level: Estimate, number: int) -> None:
    """Draw a method without the key as a line with a band for its interval."""
    style = line_style(number)
    axes.axhline(level.mean, label=label, **{**style, "marker": ""})
    if level.bounds[0] == level.bounds[0]:
        axes.axhspan(*level.bounds, color=style["color"], alpha=0.1, linewidth=0, zorder=0)


def _beside(x: Sequence[float], steps: float, tried: Sequence[float], logarithmic: bool) -> list[float]:
    """Positions shifted sideways by the same distance on a linear or a logarithmic axis."""
    low, high = min(tried), max(tried)
    if logarithmic:
        return [value * (high / low) ** (steps * _BAR_GAP) for value in x]
    return [value + (high - low) * steps * _BAR_GAP for value in x]


def dots(results: Results) -> Figure | None:
    """Draw a dot for each setting, the best on top; whiskers are 95 % intervals."""
    ranked = [s for s in results.ranked if s.estimate(results.metric).count]
    if not ranked:
        return None
    by_name = of_settings(results)
    estimates = [by_name[setting.name] for setting in ranked]
    labels = distinct([setting.name.partition("=")[2] or setting.name for setting in ranked], 40)
    figure, (axes,) = new_figure(height=max(2.5, 1.4 + 0.3 * len(ranked)))
    positions = range(len(ranked))
    means = [e.mean for e in estimates]
    axes.errorbar(means, positions, xerr=lengths(estimates), fmt="o", color="black", capsize=3)
    for position, estimate in enumerate(estimates):
        end = max(ends([estimate]))
        axes.annotate(
            f"{estimate.mean:.4g}", (end, position), (7, 0), textcoords="offset points", va="center",
            fontsize="small",
        )  # fmt: skip
    axes.set_yticks(positions, labels)
    axes.invert_yaxis()
    axes.margins(x=0.18, y=0.5 / len(ranked))
    axes.grid(alpha=0.3)
    axes.set_xlabel(metric_label(results).replace("\n", ", "))
    axes.set_ylabel(results.keys[0])
    reference_lines(axes, results, ends(estimates), upright=True)
    title(axes, results, interval_note(results, estimates), above=True)
    return figure
