"""The figures of adaptive sweeps: losses over steps, learned weights, and what became of a greedy soup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mecha_exp.lab.points import LEARNED_KEY, STEP_KEY
from mecha_exp.report.adaptive_records import NOTHING, choices, losses_by_step, weights_at
from mecha_exp.report.figures.style import (
    COLOUR_MAP,
    COLOURS,
    SMALL,
    ends,
    interval_note,
    lengths,
    line_style,
    metric_label,
    new_figure,
    reference_lines,
    title,
)
from mecha_exp.report.intervals import of_inputs, of_settings
from mecha_exp.report.results import Results
from mecha_exp.report.settings import Estimate
from mecha_exp.report.table import shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WINDOWS = 25
"""The loss is drawn as means of so many parts of the steps, since each step has other examples."""


def learning_curves(results: Results, folder: Path) -> Figure | None:
    """Draw the loss of each descent over its steps, and beside it the metric of the kept weights.

    The losses are those of `learning.csv` in the sweep's folder; None where there are none.
    """
    losses = losses_by_step(folder)
    if not losses:
        return None
    figure, (left, right) = new_figure(width=10, columns=2, sharey=False)
    for number, (name, values) in enumerate(losses.items()):
        _loss_line(left, name, values, number)
        _metric_line(right, results, name, number)
    estimates = of_settings(results)
    _level_of_the_rest(right, results, estimates)
    reference_lines(right, results, ends(estimates.values()))
    left.set_ylabel("loss on validation, over its first value")
    right.set_ylabel(metric_label(results))
    for axes in (left, right):
        axes.set_xlabel("step")
    right.legend(loc="best", frameon=False, fontsize=SMALL)
    title(left, results, "what is minimised")
    title(right, results, "kept weights, with 95 % intervals over examples")
    return figure


def _bounds(inputs: Mapping[str, Estimate], row: Mapping[str, str]) -> tuple[float, float] | None:
    """The interval of the expert of a row, where the verdict has one."""
    return inputs[row["expert"]].ci95 if row["expert"] in inputs else None


def _level_of_the_rest(axes: Axes, results: Results, estimates: Mapping[str, Estimate]) -> None:
    """Draw the best of what was not learned as a line, with a band for its interval."""
    rest = [estimates[s.name] for s in results.settings if s.values.get(LEARNED_KEY) == NOTHING]
    rest = [estimate for estimate in rest if estimate.count]
    if not rest:
        return
    choose = min if results.minimized else max
    best = choose(rest, key=lambda estimate: estimate.mean)
    axes.axhline(best.mean, color=COLOURS[-1], linestyle=":", label="best of what was not learned")
    if best.bounds[0] == best.bounds[0]:
        axes.axhspan(*best.bounds, color=COLOURS[-1], alpha=0.08, linewidth=0, zorder=0)


def learned_weights(results: Results, folder: Path) -> Figure | None:
    """Draw the weights of the best setting that was learned: a map of the model's parts by experts.

    They are those of `learned_weights.csv` in the sweep's folder; None where nothing was learned.
    """
    ranked = [s for s in results.ranked if s.values.get(LEARNED_KEY) not in (None, NOTHING)]
    if not ranked:
        return None
    name, step = str(ranked[0].values[LEARNED_KEY]), ranked[0].values.get(STEP_KEY)
    weights = weights_at(folder, name, step if isinstance(step, int) else 0)
    if not weights:
        return None
    experts = list(next(iter(weights.values())))
    rows = [[by_expert[expert] for expert in experts] for by_expert in weights.values()]
    figure, (axes,) = new_figure(max(5.0, 2.5 + 0.6 * len(experts)), max(2.6, 1.8 + 0.2 * len(rows)))
    image = axes.imshow(rows, aspect="auto", cmap=COLOUR_MAP, interpolation="nearest")
    axes.set_xticks(range(len(experts)), [shortened(e, 18) for e in experts], rotation=45, ha="right")
    stride = -(-len(rows) // 40)
    parts = [shortened(part, 32) for part in weights]
    axes.set_yticks(range(0, len(rows), stride), parts[::stride], fontsize=SMALL)
    figure.colorbar(image, ax=axes, label="weight of the task vector")
    title(axes, results, f"the best that was learned: {name}, step {step}")
    return figure


def soup_so_far(results: Results, folder: Path) -> Figure | None:
    """Draw the score of a greedy soup with each expert that was tried; hollow where it was not kept.

    The scores are those of `greedy_soup.csv` in the sweep's folder; None where nothing was tried.
    """
    rows = choices(folder)
    if not rows:
        return None
    figure, (axes,) = new_figure(width=max(6.0, 2.5 + 0.6 * len(rows)))
    tried = [float(row["tried"]) for row in rows]
    kept = [row["kept"] == "true" for row in rows]
    soup = [float(r["tried"] if is_kept else r["soup"]) for r, is_kept in zip(rows, kept, strict=True)]
    places = range(len(rows))
    axes.plot(places, soup, drawstyle="steps-post", color=COLOURS[0], linewidth=2, label="the soup so far")
    alone = [float(row["alone"]) for row in rows]
    inputs = of_inputs(results)
    bars = lengths(
        [replace(Estimate.of([a]), ci95=_bounds(inputs, r)) for a, r in zip(alone, rows, strict=True)]
    )
    axes.errorbar(
        places, alone, bars, fmt="x", color="dimgrey", capsize=2, elinewidth=1, label="the expert alone"
    )
    if best := results.best_setting:
        final = of_settings(results)[best.name]
        axes.errorbar([places[-1]], [final.mean], lengths([final]), fmt="none", ecolor=COLOURS[0], capsize=3)
    for place, row in zip(places, rows, strict=True):
        if row["p"]:
            text = f"p = {float(row['p']):.1g}"
            axes.annotate(
                text, (place, tried[place]), (-5, 6), textcoords="offset points", ha="right", fontsize=SMALL
            )
    for is_kept, label in ((True, "with it: kept"), (False, "with it: not kept")):
        chosen = [(place, tried[place]) for place in places if kept[place] == is_kept]
        colour = COLOURS[0] if is_kept else "none"
        if chosen:
            x, y = zip(*chosen, strict=True)
            axes.scatter(x, y, s=36, color=colour, edgecolors="black", label=label, zorder=3)
    axes.set_xticks(places, [shortened(row["expert"], 18) for row in rows], rotation=45, ha="right")
    axes.set_ylabel(metric_label(results))
    axes.legend(loc="best", frameon=False, fontsize=SMALL)
    note = interval_note(results, [*inputs.values(), *of_settings(results).values()])
    what = "experts in the order of their own scores; p: of the paired test of the step"
    title(axes, results, "\n".join(filter(None, [what, note])))
    return figure


def _loss_line(axes: Axes, name: str, values: Sequence[float], number: int) -> None:
    """Draw a loss as means of neighbouring steps, over the magnitude of its first mean."""
    size = max(1, len(values) // _WINDOWS)
    parts = [values[start : start + size] for start in range(0, len(values) - size + 1, size)]
    means = [sum(part) / len(part) for part in parts]
    places = [start * size + size / 2 for start in range(len(means))]
    first = abs(means[0]) or 1.0
    axes.plot(places, [mean / first for mean in means], color=COLOURS[number % len(COLOURS)], label=name)


def _metric_line(axes: Axes, results: Results, name: str, number: int) -> None:
    """Draw the metric of a descent's kept weights over their steps."""
    estimates, points = of_settings(results), []
    for setting in results.settings:
        step, estimate = setting.values.get(STEP_KEY), estimates[setting.name]
        if setting.values.get(LEARNED_KEY) == name and isinstance(step, int) and estimate.count:
            points.append((step, estimate))
    if not points:
        return
    steps, drawn = zip(*sorted(points, key=lambda point: point[0]), strict=True)
    means, bars = [estimate.mean for estimate in drawn], lengths(drawn)
    axes.errorbar(steps, means, bars, label=name, capsize=2, elinewidth=1, **line_style(number))
