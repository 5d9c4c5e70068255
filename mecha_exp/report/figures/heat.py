"""Figures of the main metric over two swept keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from mecha_exp.numbers import is_number
from mecha_exp.report.figures.style import (
    COLOUR_MAP,
    ends,
    interval_note,
    metric_label,
    new_figure,
    title,
    usual_width,
    value_axis,
)
from mecha_exp.report.intervals import base_of, best_input, of_inputs, of_settings
from mecha_exp.report.results import MISSING, Results
from mecha_exp.report.settings import Estimate
from mecha_exp.report.table import distinct, estimate_text, shortened
from mecha_exp.runs.values import Value, as_text, is_numeric

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_WITH_INTERVALS = 8  # columns or rows up to which each cell shows its interval
_TINY = 5.5
_MAX_LABELLED = 14  # columns or rows up to which each cell shows its value
_SPARSE = 0.34  # below this fraction of cells with a value, points are drawn instead
_MAX_VALUES = 40  # points up to which each shows its value
_NEAR = 70, 50  # pixels within which the values of two points could cover each other
_CELL_WIDTH, _CELL_HEIGHT = 0.62, 0.42  # inches


def heat_map(results: Results) -> Figure | None:
    """Draw a cell for each setting, coloured by its mean; the best one is framed.

    Where there is room, a cell has its interval below its mean.
    """
    import numpy as np

    x_key, y_key = _two_keys(results)
    xs, ys = _values(results, x_key), _values(results, y_key)
    grid = np.full((len(ys), len(xs)), np.nan)
    cells: dict[tuple[int, int], Estimate] = {}
    estimates = of_settings(results)
    for setting in results.settings:
        place = ys.index(setting.values[y_key]), xs.index(setting.values[x_key])
        cells[place] = estimates[setting.name]
        grid[place] = cells[place].mean
    if np.isnan(grid).all():
        return None
    if len(results.settings) < _SPARSE * grid.size and all(is_number(v) for v in (*xs, *ys)):
        return _scattered(results, x_key, y_key)
    height = min(9.0, max(3.2, 1.6 + _CELL_HEIGHT * len(ys)))
    figure, (axes,) = new_figure(width=min(14.0, max(6.0, 2.4 + _CELL_WIDTH * len(xs))), height=height)
    axes.set_facecolor("white")
    image = axes.imshow(np.ma.masked_invalid(grid), aspect="auto", cmap=COLOUR_MAP)
    if is_numeric(ys):
        axes.invert_yaxis()  # numbers grow upwards, words are read downwards
    if max(grid.shape) <= _MAX_LABELLED:
        _write_values(axes, grid, cells)
    if best := results.best_setting:
        _frame(axes, xs.index(best.values[x_key]), ys.index(best.values[y_key]))
    _label(axes, x_key, y_key, xs, ys)
    _inputs_on(figure.colorbar(image, ax=axes, label=metric_label(results)), results, grid)
    title(axes, results, _width_note(results, estimates.values()))
    return figure


def _width_note(results: Results, estimates: Iterable[Estimate]) -> str:
    """How long intervals are, and over what; then the inputs that matter, with their intervals."""
    estimates = list(estimates)
    note = interval_note(results, estimates).replace("95 % intervals", usual_width(estimates), 1)
    inputs = of_inputs(results)
    names = dict.fromkeys(name for name in (base_of(results), best_input(results)) if name in inputs)
    shown = [f"{shortened(str(name), 20)} {estimate_text(inputs[str(name)])}" for name in names]
    return "\n".join(filter(None, [note, "; ".join(shown)]))


def _inputs_on(bar: Any, results: Results, grid: Any) -> None:
    """Draw the base and the best input as lines on a bar of colours, where they lie within it."""
    import numpy as np

    inputs = of_inputs(results)
    for name in dict.fromkeys((base_of(results), best_input(results))):
        if name in inputs and np.nanmin(grid) <= inputs[name].mean <= np.nanmax(grid):
            bar.ax.axhline(inputs[name].mean, color="white", linewidth=3)
            bar.ax.axhline(inputs[name].mean, color="black", linewidth=1, linestyle=(0, (2, 2)))


def _scattered(results: Results, x_key: str, y_key: str) -> Figure:
    """Draw a point for each setting at its two numbers, lighter and larger for a higher metric."""
    metric = results.metric
    points = [(s.values[x_key], s.values[y_key], s.estimate(metric).mean) for s in results.measured]
    xs, ys, means = ([float(v) for v in column] for column in zip(*points, strict=True))
    low, high = min(means), max(means)
    figure, (axes,) = new_figure(8, 5.5)
    sizes = [30 + 130 * (mean - low) / ((high - low) or 1.0) for mean in means]
    drawn = axes.scatter(xs, ys, sizes, means, cmap=COLOUR_MAP, edgecolors="black", linewidths=0.6)
    write, best = _as_digits(low, high), results.best_setting
    if best:
        best_x, best_y = float(best.values[x_key]), float(best.values[y_key])  # type: ignore[arg-type]
        axes.scatter(best_x, best_y, 330, facecolors="none", edgecolors="black", linewidths=1.8)
    value_axis(axes.xaxis, axes.set_xscale, xs)
    value_axis(axes.yaxis, axes.set_yscale, ys)
    axes.margins(0.1)
    positions = axes.transData.transform(list(zip(xs, ys, strict=True)))
    for number, (x, y, mean) in enumerate(zip(xs, ys, means, strict=True)):
        is_best = bool(best) and (x, y) == (best_x, best_y)
        if is_best or len(means) <= _MAX_VALUES:
            above = 11 if _is_crowded_below(positions, number) else -21 if is_best else -14
            _note(axes, f"best {write(mean)}" if is_best else write(mean), (x, y), above)
    axes.grid(alpha=0.3)
    axes.set_xlabel(x_key)
    axes.set_ylabel(y_key)
    _inputs_on(figure.colorbar(drawn, ax=axes, label=metric_label(results)), results, means)
    note = _width_note(results, of_settings(results).values())
    title(axes, results, "\n".join(filter(None, ["the larger the dot, the higher the value", note])))
    return figure


def _is_crowded_below(positions: Any, number: int) -> bool:
    """Whether a point has near neighbours and the nearest lies below it; positions are in pixels."""
    import numpy as np

    across, up = (positions - positions[number]).T
    near = (np.abs(across) < _NEAR[0]) & (np.abs(up) < _NEAR[1])
    near[number] = False
    return bool(near.any()) and float(up[near][np.argmin(np.abs(up[near]))]) < 0


def _note(axes: Axes, text: str, position: tuple[float, float], above: float) -> None:
    axes.annotate(text, position, (0, above), textcoords="offset points", ha="center", fontsize="x-small")


def _two_keys(results: Results) -> tuple[str, str]:
    """The two keys that vary; if only one is numeric, it comes first, for the x axis."""
    keys = results.varied_keys(results.settings)[:2]
    keys.sort(key=lambda k: not is_numeric(results.values_of(k)))
    return keys[0], keys[1]


def _values(results: Results, key: str) -> list[Value]:
    values = results.values_of(key)
    if not is_numeric(values):
        return values
    numbers = sorted(value for value in values if value is not None)
    return [*([None] if None in values else []), *numbers]


def _write_values(axes: Axes, grid: Any, cells: Mapping[tuple[int, int], Estimate]) -> None:
    import numpy as np

    low, high = np.nanmin(grid), np.nanmax(grid)
    roomy = max(grid.shape) <= _MAX_WITH_INTERVALS
    shown = ends(cells.values())
    write = _as_digits(min(shown), max(shown)) if roomy else _as_digits(low, high)
    for (row, column), value in np.ndenumerate(grid):
        if np.isnan(value):
            axes.text(column, row, "–", ha="center", va="center", color="dimgrey")
            continue
        shade = "black" if value > (low + high) / 2 else "white"
        bottom, top = cells[row, column].bounds if roomy else (math.nan, math.nan)
        align = "center" if math.isnan(bottom) else "bottom"
        axes.text(column, row, write(value), ha="center", va=align, color=shade, fontsize="small")
        if bottom == bottom:
            text = f"{write(bottom)}–{write(top)}"
            axes.text(column, row, text, ha="center", va="top", color=shade, fontsize=_TINY)


def _as_digits(low: float, high: float) -> Callable[[float], str]:
    """A formatter with enough digits to distinguish numbers between `low` and `high`."""
    if max(abs(low), abs(high)) >= 1e4:
        return lambda value: f"{value:.3g}"
    digits = 3 if high == low else max(0, min(4, 2 - math.floor(math.log10(high - low))))
    return lambda value: f"{value:.{digits}f}"


def _frame(axes: Axes, column: int, row: int) -> None:
    from matplotlib.patches import Rectangle

    for colour, width in (("white", 5), ("black", 2)):
        corner = (column - 0.5, row - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=colour, linewidth=width, clip_on=False))


def _label(axes: Axes, x_key: str, y_key: str, xs: list[Value], ys: list[Value]) -> None:
    x_texts = distinct([as_text(x) or MISSING for x in xs], 20)
    slanted = max(map(len, x_texts)) > 6
    stride = math.ceil(len(xs) / 24)
    axes.set_xticks(range(0, len(xs), stride), x_texts[::stride], rotation=40 if slanted else 0)
    if slanted:
        for text in axes.get_xticklabels():
            text.set_horizontalalignment("right")
    stride = math.ceil(len(ys) / 24)
    axes.set_yticks(range(0, len(ys), stride), distinct([as_text(y) or MISSING for y in ys], 24)[::stride])
    axes.set_xlabel(x_key)
    axes.set_ylabel(y_key)
