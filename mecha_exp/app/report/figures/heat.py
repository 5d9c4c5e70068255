"""The main metric over two swept keys."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from mecha_exp.app.report.figures.style import COLOUR_MAP, metric_label, new_figure, title
from mecha_exp.app.report.results import Results, Value, as_text, is_number
from mecha_exp.app.report.table import distinct

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_LABELLED = 14  # columns or rows up to which each cell has its value written in it
_CELL_WIDTH, _CELL_HEIGHT = 0.62, 0.42  # inches


def heat_map(results: Results) -> Figure | None:
    """A cell for each setting with its mean, the best one framed."""
    import numpy as np

    x_key, y_key = _two_keys(results)
    xs, ys = _values(results, x_key), _values(results, y_key)
    grid = np.full((len(ys), len(xs)), np.nan)
    for setting in results.settings:
        mean = setting.estimate(results.metric).mean
        grid[ys.index(setting.values[y_key]), xs.index(setting.values[x_key])] = mean
    if np.isnan(grid).all():
        return None
    height = min(9.0, max(3.2, 1.6 + _CELL_HEIGHT * len(ys)))
    figure, (axes,) = new_figure(width=min(14.0, max(6.0, 2.4 + _CELL_WIDTH * len(xs))), height=height)
    axes.set_facecolor("white")
    image = axes.imshow(np.ma.masked_invalid(grid), aspect="auto", cmap=COLOUR_MAP)
    if all(is_number(y) for y in ys):
        axes.invert_yaxis()  # numbers grow upwards, words are read downwards
    if max(grid.shape) <= _MAX_LABELLED:
        _write_values(axes, grid)
    if best := results.best_setting:
        _frame(axes, xs.index(best.values[x_key]), ys.index(best.values[y_key]))
    _label(axes, x_key, y_key, xs, ys)
    figure.colorbar(image, ax=axes, label=metric_label(results))
    title(axes, results, "mean over seeds" if results.has_replicates else "")
    return figure


def _two_keys(results: Results) -> tuple[str, str]:
    """The keys that vary, numbers along x where only one of them is numeric."""
    keys = [k for k in results.keys if len({s.values[k] for s in results.settings}) > 1][:2]
    keys.sort(key=lambda k: not all(is_number(s.values[k]) for s in results.settings))
    return keys[0], keys[1]


def _values(results: Results, key: str) -> list[Value]:
    found = list(dict.fromkeys(setting.values[key] for setting in results.settings))
    return sorted(found) if all(is_number(v) for v in found) else found  # type: ignore[type-var]


def _write_values(axes: Axes, grid: Any) -> None:
    import numpy as np

    low, high = np.nanmin(grid), np.nanmax(grid)
    digits = 3 if high == low else max(0, min(4, 2 - math.floor(math.log10(high - low))))
    large = max(abs(low), abs(high)) >= 1e4
    for (row, column), value in np.ndenumerate(grid):
        if np.isnan(value):
            axes.text(column, row, "–", ha="center", va="center", color="dimgrey")
            continue
        shade = "black" if value > (low + high) / 2 else "white"
        text = f"{value:.3g}" if large else f"{value:.{digits}f}"
        axes.text(column, row, text, ha="center", va="center", color=shade, fontsize="small")


def _frame(axes: Axes, column: int, row: int) -> None:
    from matplotlib.patches import Rectangle

    for colour, width in (("white", 5), ("black", 2)):
        corner = (column - 0.5, row - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=colour, linewidth=width, clip_on=False))


def _label(axes: Axes, x_key: str, y_key: str, xs: list[Value], ys: list[Value]) -> None:
    x_texts = distinct([as_text(x) for x in xs], 20)
    slanted = max(map(len, x_texts)) > 6
    stride = math.ceil(len(xs) / 24)
    axes.set_xticks(range(0, len(xs), stride), x_texts[::stride], rotation=40 if slanted else 0)
    if slanted:
        for text in axes.get_xticklabels():
            text.set_horizontalalignment("right")
    stride = math.ceil(len(ys) / 24)
    axes.set_yticks(range(0, len(ys), stride), distinct([as_text(y) for y in ys], 24)[::stride])
    axes.set_xlabel(x_key)
    axes.set_ylabel(y_key)
