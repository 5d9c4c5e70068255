"""The figure of a sweep: curves against one hyperparameter, or a heat map of two."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mecha_exp.app.record import FAILED, Record
from mecha_exp.app.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Told apart without colour: every line has a marker and a dash pattern of its own.
_MARKERS = "osD^vP*X<>"
_DASHES = ("-", "--", "-.", ":")
_REFERENCE_REACH = 2.0  # how far beyond the curves an input is still drawn, in heights of the curves
_REFERENCE_REACH = 2.0  # how far beyond the curves an input is still drawn, in heights of the curves


def draw_sweep(results: Results, path: Path) -> bool:
    """Write the figure that suits what was swept.

    One numeric hyperparameter gives a curve, a second key of words one curve for each of its values, two
    numeric ones a heat map. Dashed lines are the inputs.

    Returns:
        whether there was anything to draw: a metric, and a swept hyperparameter.
    """
    finished = [r for r in results.records if r.status != FAILED and results.metric in r.metrics]
    numeric = [key for key in results.swept if all(_value(results, r, key) is not None for r in finished)]
    words = [key for key in results.swept if key not in numeric]
    if not finished or not results.swept or len(numeric) + len(words) > 3:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    if len(numeric) == 2 and not words:
        _heat_map(axes, results, finished, numeric)
    elif len(numeric) == 0:
        _bars(axes, results, finished)
    else:
        _curves(axes, results, finished, numeric[0], [*numeric[1:], *words])
    axes.set_title(results.title)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True


def _curves(axes: Axes, results: Results, records: list[Record], key: str, others: list[str]) -> None:
    """The main metric against one hyperparameter, a line for each setting of the other keys."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        label = ", ".join(results.setting(record, other) for other in others)
        point = (_value(results, record, key) or 0.0, record.metrics[str(results.metric)])
        lines.setdefault(label, []).append(point)
    for number, (label, points) in enumerate(lines.items()):
        x, y = zip(*sorted(points), strict=True)
        style = _DASHES[number % len(_DASHES)] + _MARKERS[number % len(_MARKERS)]
        axes.plot(x, y, style, label=label)
    _reference_lines(axes, results)
    axes.set_xlabel(key)
    axes.set_ylabel(_axis_label(results))
    axes.grid(alpha=0.3)
    if others:
        axes.legend(title=", ".join(others), fontsize="small")


def _reference_lines(axes: Axes, results: Results) -> None:
    """The inputs as dotted lines; those that would flatten the curves as a note."""
    low, high = axes.get_ylim()
    reach = _REFERENCE_REACH * (high - low)
    far = []
    for name, measured in results.references.items():
        value = measured.get(str(results.metric))
        if value is None:
            continue
        if low - reach <= value <= high + reach:
            axes.axhline(value, color="grey", linewidth=1, linestyle=(0, (2, 3)))
            _note(axes, f" {name}", (1, value), ("axes fraction", "data"), "center")
        else:
            far.append(f"{name} {value:.3g}")
    if far:
        _note(axes, f"outside: {', '.join(far)}", (0.01, 0.01), "axes fraction", "bottom")


def _note(axes: Axes, text: str, place: tuple[float, float], units: Any, va: str) -> None:
    axes.annotate(text, place, xycoords=units, va=va, fontsize="small", color="dimgrey")


def _heat_map(axes: Axes, results: Results, records: list[Record], keys: list[str]) -> None:
    """The main metric over two hyperparameters, every cell with its value."""
    import numpy as np

    x_key, y_key = keys
    xs = sorted({_value(results, r, x_key) or 0.0 for r in records})
    ys = sorted({_value(results, r, y_key) or 0.0 for r in records})
    grid = np.full((len(ys), len(xs)), np.nan)
    for record in records:
        row, column = (
            ys.index(_value(results, record, y_key) or 0.0),
            xs.index(_value(results, record, x_key) or 0.0),
        )
        grid[row, column] = record.metrics[str(results.metric)]
    image = axes.imshow(grid, origin="lower", aspect="auto", cmap="cividis")
    middle = (np.nanmin(grid) + np.nanmax(grid)) / 2
    for (row, column), value in np.ndenumerate(grid):
        if not np.isnan(value):
            shade = "black" if value > middle else "white"
            axes.text(column, row, f"{value:.3f}", ha="center", va="center", color=shade, fontsize="small")
    axes.set_xticks(range(len(xs)), [f"{x:g}" for x in xs])
    axes.set_yticks(range(len(ys)), [f"{y:g}" for y in ys])
    axes.set_xlabel(x_key)
    axes.set_ylabel(y_key)
    axes.figure.colorbar(image, ax=axes, label=_axis_label(results))


def _bars(axes: Axes, results: Results, records: list[Record]) -> None:
    """The main metric of settings that are words."""
    labels = [record.name for record in records]
    axes.bar(labels, [r.metrics[str(results.metric)] for r in records], color="lightgrey", edgecolor="black")
    _reference_lines(axes, results)
    axes.set_ylabel(_axis_label(results))
    axes.tick_params(axis="x", rotation=30)


def _axis_label(results: Results) -> str:
    judged = any(r.metric for r in results.records)
    better = {"maximize": "more is better", "minimize": "less is better"}[results.direction]
    return f"{results.metric} ({better})" if judged else str(results.metric)


def _value(results: Results, record: Record, key: str) -> float | None:
    try:
        return float(results.setting(record, key))
    except ValueError:
        return None
