"""Figures of the main metric against one hyperparameter, numeric or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mecha_exp.report.figures.style import (
    legend,
    line_style,
    metric_label,
    new_figure,
    reference_lines,
    title,
    value_axis,
)
from mecha_exp.report.results import Results
from mecha_exp.report.settings import Estimate
from mecha_exp.report.table import distinct, shortened
from mecha_exp.runs.values import as_text, is_numeric

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BAR_GAP = 0.007  # between the intervals of two lines, as a fraction of the axis


def curves(results: Results) -> Figure | None:
    """Draw a line for each value of the second key; bars are 95 % intervals over replicates."""
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
        widths = [estimate.half_width or 0.0 for _, estimate in points]
        shown = {"yerr": widths, "capsize": 3, "elinewidth": 1} if any(widths) else {}
        if any(widths):  # otherwise the bars would cover each other
            x = _beside(x, number - (len(lines) - 1) / 2, tried, axes.get_xscale() == "log")
        axes.errorbar(x, y, label=label, **line_style(number), **shown)  # type: ignore[arg-type]
    for number, (label, level) in enumerate(levels.items(), len(lines)):
        axes.axhline(level, label=shortened(label), **{**line_style(number), "marker": ""})
    estimates = [estimate for points in lines.values() for _, estimate in points]
    ends = [e.mean + sign * (e.half_width or 0) for e in estimates for sign in (-1, 1)]
    reference_lines(axes, results, [*levels.values(), *ends])
    axes.set_xlabel(key)
    axes.set_ylabel(metric_label(results))
    axes.grid(alpha=0.3)
    title(axes, results, interval_note(results))
    if others:
        legend(axes, ", ".join(others), len(lines) + len(levels))
    return figure


def _series(
    results: Results, key: str, others: Sequence[str]
) -> tuple[dict[str, list[tuple[float, Estimate]]], dict[str, float]]:
    """The points of each line by its label, and the means of settings without a number of the key.

    Such a setting is a method without alpha, for instance.
    """
    lines: dict[str, list[tuple[float, Estimate]]] = {}
    levels: dict[str, float] = {}
    for setting in results.measured:
        label = ", ".join(as_text(setting.values[other]) for other in others)
        value, estimate = setting.values[key], setting.estimate(results.metric)
        if isinstance(value, int | float):
            lines.setdefault(label, []).append((float(value), estimate))
        else:
            levels[label] = estimate.mean
    return lines, levels


def _beside(x: Sequence[float], steps: float, tried: Sequence[float], logarithmic: bool) -> list[float]:
    """Positions shifted sideways by the same distance on a linear or a logarithmic axis."""
    low, high = min(tried), max(tried)
    if logarithmic:
        return [value * (high / low) ** (steps * _BAR_GAP) for value in x]
    return [value + (high - low) * steps * _BAR_GAP for value in x]


def dots(results: Results) -> Figure | None:
    """Draw a dot for each setting, the best on top; whiskers are 95 % intervals over replicates."""
    ranked = [s for s in results.ranked if s.estimate(results.metric).count]
    if not ranked:
        return None
    estimates = [setting.estimate(results.metric) for setting in ranked]
    labels = distinct([setting.name.partition("=")[2] or setting.name for setting in ranked], 40)
    figure, (axes,) = new_figure(height=max(2.5, 1.4 + 0.3 * len(ranked)))
    positions = range(len(ranked))
    means, widths = [e.mean for e in estimates], [e.half_width or 0.0 for e in estimates]
    axes.errorbar(means, positions, xerr=widths if any(widths) else None, fmt="o", color="black", capsize=3)
    for position, estimate in enumerate(estimates):
        end = estimate.mean + (estimate.half_width or 0.0)
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
    title(axes, results, interval_note(results))
    return figure


def interval_note(results: Results) -> str:
    """The explanation of the error bars; an empty string if there are none."""
    return "mean and 95 % interval over replicates alone" if results.has_replicates else ""
