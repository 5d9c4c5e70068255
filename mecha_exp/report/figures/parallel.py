"""The figure for more than two swept keys: an axis for each key, a line for each setting."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mecha_exp.report.figures.style import (
    COLOUR_MAP,
    ends,
    interval_note,
    metric_label,
    new_figure,
    title,
)
from mecha_exp.report.intervals import base_of, best_input, of_inputs, of_settings
from mecha_exp.report.results import MISSING, Results
from mecha_exp.report.settings import Estimate
from mecha_exp.report.table import shortened
from mecha_exp.runs.values import Value, as_text, is_numeric

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_TICKS = 6
_MAX_WORDS = 12
_MAX_AXES = 12
_MAX_LINES = 1000
_FOOT = 0.2  # of the height, between the points without a value and the smallest one
_ON_WHITE = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}


def parallel_coordinates(results: Results) -> Figure | None:
    """Draw each setting as a line through its values and its metric; better ones are darker and on top."""
    from matplotlib import colormaps
    from matplotlib.colors import Normalize

    ranked = [s for s in results.ranked if s.estimate(results.metric).count]
    keys = results.varied_keys(ranked)[:_MAX_AXES]
    if not ranked or len(keys) < 2:
        return None
    ranked, count = ranked[:_MAX_LINES], len(ranked)
    by_name = of_settings(results)
    estimates = [by_name[s.name] for s in ranked]
    means = [estimate.mean for estimate in estimates]
    inputs = of_inputs(results)
    near = {name: inputs[name] for name in (base_of(results), best_input(results)) if name in inputs}
    last = _Scale(ends([*estimates, *near.values()]), rounded=True)
    scales = [*(_Scale([s.values[key] for s in ranked]) for key in keys), last]
    rows = [(*(s.values[key] for key in keys), mean) for s, mean in zip(ranked, means, strict=True)]
    lines = [[scale.position(value) for scale, value in zip(scales, row, strict=True)] for row in rows]
    figure, (axes,) = new_figure(width=min(14.0, max(7.0, 1.7 * len(scales))))
    norm = Normalize(min(means), max(means))
    colours = colormaps[COLOUR_MAP if results.minimized else f"{COLOUR_MAP}_r"]
    for number in range(len(ranked) - 1, -1, -1):  # the best last, so on top
        quality = 1 - number / max(len(ranked) - 1, 1)
        axes.plot(
            range(len(scales)), lines[number], color=colours(norm(means[number])),
            linewidth=0.6 + 1.6 * quality, alpha=0.35 + 0.65 * quality,
        )  # fmt: skip
    if results.judged:
        best = shortened(f"best: {ranked[0].name} with {means[0]:.4g}", 90)
        axes.plot(range(len(scales)), lines[0], "k-o", linewidth=2.5, markerfacecolor="white", label=best)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), frameon=False, fontsize="small")
    labels = [*(shortened(key, 18) for key in keys), metric_label(results).replace(" [", "\n[")]
    _axes_of_keys(axes, labels, scales)
    _whiskers(axes, len(keys), last, estimates, near)
    shown = f"{count} settings" if count == len(ranked) else f"the best {len(ranked):,} of {count:,} settings"
    title(axes, results, "\n".join(filter(None, [shown, interval_note(results, estimates)])))
    return figure


def _whiskers(
    axes: Axes, place: int, scale: _Scale, estimates: Sequence[Estimate], inputs: Mapping[str, Estimate]
) -> None:
    """Draw intervals beside the axis of the metric: those of the settings, the best one's in black."""
    for number, estimate in reversed([*enumerate(estimates)]):
        low, high = estimate.bounds
        if low == low:
            colour, alpha, width = ("grey", 0.15, 1.0) if number else ("black", 1.0, 2.5)
            ends_of_it = [scale.position(low), scale.position(high)]
            axes.plot([place + 0.02] * 2, ends_of_it, color=colour, alpha=alpha, linewidth=width)
    for name, estimate in inputs.items():
        at = scale.position(estimate.mean)
        axes.plot([place - 0.03, place + 0.03], [at, at], color="dimgrey", linewidth=1.5)
        axes.annotate(
            shortened(name, 14), (place, at), (-6, 0), textcoords="offset points", ha="right", va="center",
            fontsize="small", color="dimgrey", bbox=_ON_WHITE,
        )  # fmt: skip


class _Scale:
    """The scale of one key: maps its values to 0 to 1, numbers by size and strings evenly."""

    def __init__(self, values: Sequence[Value], rounded: bool = False) -> None:
        distinct_values = list(dict.fromkeys(values))
        self._rounded = rounded
        self._numeric = is_numeric(distinct_values)
        self._lacks_some = (
            self._numeric and None in distinct_values
        )  # None is drawn at the foot, apart from the numbers
        numbers = [value for value in distinct_values if value is not None] if self._numeric else []
        self._values: list[Value] = [*sorted(numbers)] if self._numeric else distinct_values

    def position(self, value: Value) -> float:
        if not self._numeric:
            return self._values.index(value) / max(len(self._values) - 1, 1)
        foot = _FOOT if self._lacks_some else 0.0
        if value is None:
            return 0.0
        low, high = float(self._values[0]), float(self._values[-1])  # type: ignore[arg-type]
        return foot + (1 - foot) * (float(value) - low) / ((high - low) or 1.0)

    def ticks(self) -> list[tuple[float, str]]:
        """Positions and texts of the ticks: every value if few, else some of them or round numbers."""
        missing = [(0.0, MISSING)] if self._lacks_some else []
        if self._rounded or (self._numeric and len(self._values) > _MAX_TICKS):
            return missing + self._round_ticks()
        stride = math.ceil(len(self._values) / _MAX_WORDS)
        chosen: list[tuple[float, str]] = []
        for value in self._values[::stride]:
            if not chosen or self.position(value) - chosen[-1][0] >= 0.05:
                chosen.append((self.position(value), shortened(as_text(value) or MISSING, 16)))
        return missing + chosen

    def _round_ticks(self) -> list[tuple[float, str]]:
        from matplotlib.ticker import MaxNLocator

        low, high = float(self._values[0]), float(self._values[-1])  # type: ignore[arg-type]
        ticks = MaxNLocator(5).tick_values(low, high)
        return [(self.position(float(tick)), as_text(float(tick))) for tick in ticks if low <= tick <= high]


def _axes_of_keys(axes: Axes, names: Sequence[str], scales: Sequence[_Scale]) -> None:
    for number, scale in enumerate(scales):
        axes.axvline(number, color="black", linewidth=1, zorder=0)
        for height, text in scale.ticks():
            axes.annotate(
                text, (number, height), (6, 0), textcoords="offset points", va="center", fontsize="small",
                zorder=5, bbox=_ON_WHITE,
            )  # fmt: skip
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks([])
    axes.set_xlim(-0.1, len(names) - 1 + 0.25)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
