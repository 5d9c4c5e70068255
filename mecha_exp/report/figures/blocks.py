"""Figures of blocks: their contributions in an ablation, and their weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mecha_exp.report.figures.style import COLOUR_MAP, COLOURS, lengths, new_figure, title
from mecha_exp.report.intervals import covered
from mecha_exp.report.results import Results
from mecha_exp.report.settings import Setting
from mecha_exp.report.table import distinct, shortened
from mecha_exp.report.why.ablation import MODES, block_effects

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_SETTINGS = 24


def has_block_ablation(results: Results) -> bool:
    """Whether the sweep is an ablation of several blocks."""
    return len(block_effects(results)) > 1


def block_importance(results: Results) -> Figure | None:
    """Draw the change of the main metric by merging each block, as bars; hatched where it is worse."""
    effects = block_effects(results)
    if not effects:
        return None
    names = list(effects)
    values = [effects[name].mean for name in names]
    bars = lengths([*effects.values()])
    figure, (axes,) = new_figure(height=max(2.6, 1.5 + 0.26 * len(names)))
    better = [(-v if results.minimized else v) >= 0 for v in values]
    drawn = axes.barh(
        [shortened(name, 40) for name in names],
        values,
        xerr=bars,
        capsize=2,
        color=["#9ecae1" if good else "#fdd0a2" for good in better],
        edgecolor="black",
    )
    for bar, good in zip(drawn, better, strict=True):
        bar.set_hatch("" if good else "///")
    axes.bar_label(drawn, [f"{value:+.3g}" for value in values], padding=3, fontsize="small")
    axes.margins(x=0.14)
    axes.axvline(0, color="black", linewidth=1)
    axes.invert_yaxis()
    unit = results.unit(results.metric)
    axes.set_xlabel(f"change of {results.metric}{f' [{unit}]' if unit else ''} by merging the block")
    how = f"{results.metric} {MODES.get(results.mode or '', 'by merging the block')}"
    hurts = "" if all(better) else "; hatched: it hurts"
    over = f"\n95 % intervals over {covered(results)}" if bars else ""
    title(axes, results, f"{how}{hurts}{over}")
    return figure


def block_weights(results: Results) -> Figure | None:
    """Draw the weight of each block as a map with a row for each setting."""
    import numpy as np

    weighted = [(s, s.records[0].block_weights) for s in results.ranked if s.records[0].block_weights]
    weighted = weighted[:_MAX_SETTINGS]
    parameter = next((name for _, weights in weighted for name in weights), None)
    if parameter is None:
        return None
    blocks = list(dict.fromkeys(block for _, weights in weighted for block in weights.get(parameter, {})))
    grid = np.array([[w.get(parameter, {}).get(block, np.nan) for block in blocks] for _, w in weighted])
    width = min(10.0, max(6.5, 2.5 + 0.36 * len(blocks)))
    figure, (axes,) = new_figure(width, max(2.8, 1.9 + 0.26 * len(weighted)))
    image = axes.imshow(np.ma.masked_invalid(grid), aspect="auto", cmap=COLOUR_MAP, interpolation="nearest")
    if len(blocks) <= 16:
        middle = (np.nanmin(grid) + np.nanmax(grid)) / 2
        for (row, column), value in np.ndenumerate(grid):
            shade = "black" if value > middle else "white"
            axes.text(column, row, f"{value:.2g}", ha="center", va="center", color=shade, fontsize="x-small")
    stride = math.ceil(len(blocks) / 40)
    labels = [shortened(block, 24) for block in blocks[::stride]]
    slanted = sum(map(len, labels)) > 8 * width  # more letters than fit side by side
    axes.set_xticks(range(0, len(blocks), stride), labels, fontsize="small")
    if slanted:
        axes.tick_params(axis="x", rotation=60)
    axes.set_yticks(
        range(len(weighted)), distinct([_row_name(results, s) for s, _ in weighted], 36), fontsize="small"
    )
    axes.set_xlabel("block")
    axes.set_ylabel("setting")
    figure.colorbar(image, ax=axes, label=f"{parameter} in the block")
    title(axes, results, "weight of each block" + (", the best setting first" if results.judged else ""))
    return figure


def _row_name(results: Results, setting: Setting) -> str:
    """The name of a setting; in a block ablation, the block that it leaves out or merges alone."""
    if results.mode not in MODES:
        return setting.name
    return ", ".join(f"{results.heading(key)}: {results.cell(setting, key)}" for key in results.keys)


def block_values(weights: Mapping[str, Mapping[str, float]], name: str) -> Figure:
    """Draw the value of each block in a single run, as bars in a panel for each hyperparameter."""
    blocks = list(dict.fromkeys(block for values in weights.values() for block in values))
    width = min(10.0, max(6.5, 2.5 + 0.3 * len(blocks)))
    figure, panels = new_figure(width, 1.2 + 1.8 * len(weights), rows=len(weights), sharey=False)
    positions = range(len(blocks))
    for axes, (parameter, values) in zip(panels, weights.items(), strict=True):
        axes.bar(positions, [values.get(block, math.nan) for block in blocks], color=COLOURS[0])
        axes.set_ylabel(parameter)
        axes.margins(x=0.01)
        axes.set_xticks([])
    stride = math.ceil(len(blocks) / 40)
    labels = [shortened(block, 24) for block in blocks[::stride]]
    panels[-1].set_xticks(positions[::stride], labels, rotation=60, ha="right", fontsize="small")
    panels[-1].set_xlabel("block")
    panels[0].set_title(f"{shortened(name, 70)}\nvalue of each block", fontsize="medium")
    return figure
