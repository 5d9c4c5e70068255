"""The figures of a sweep: choose those that suit the swept keys, and draw them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mecha_exp.report.adaptive import GRADIENT, GREEDY_SOUP
from mecha_exp.report.factors import KEYS
from mecha_exp.report.figures.adaptive import learned_weights, learning_curves, soup_so_far
from mecha_exp.report.figures.blocks import block_importance, block_values, block_weights, has_block_ablation
from mecha_exp.report.figures.curves import curves, dots
from mecha_exp.report.figures.distance import distances
from mecha_exp.report.figures.forest import forest
from mecha_exp.report.figures.heat import heat_map
from mecha_exp.report.figures.landscape import contours, importance_bars, slices
from mecha_exp.report.figures.parallel import parallel_coordinates
from mecha_exp.report.figures.pareto import hypervolume, pareto_plot
from mecha_exp.report.figures.search import search_progress
from mecha_exp.report.figures.shapley import shapley_values
from mecha_exp.report.results import Results
from mecha_exp.report.search.notes import MODE as SEARCH
from mecha_exp.report.shapley import MODE as SHAPLEY
from mecha_exp.runs.values import Value, is_numeric

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAIN_FILE = "sweep.png"
FOREST_FILE = "sweep-forest.png"
_DPI = 150
_MAX_LINES = 12

Draw = Callable[[Results], "Figure | None"]


@dataclass(frozen=True)
class Picture:
    """A figure on disk.

    Attributes:
        path: of the PNG file.
        caption: of the figure.
        kind: such as `curves`; empty for a figure that has no interactive form.
    """

    path: Path
    caption: str
    kind: str = ""


def draw_figures(results: Results, folder: Path) -> list[Picture]:
    """Draw every figure that suits the sweep; the first is `sweep.png`, others are `sweep-NAME.png`.

    Nothing is drawn if no point has a metric or no key was swept.
    """
    drawn: list[Picture] = []
    for name, caption, draw in _suitable(results, folder):
        figure = draw(results)
        if figure is None:
            continue
        path = folder / (f"sweep-{name}.png" if drawn else MAIN_FILE)
        figure.savefig(path, dpi=_DPI)
        drawn.append(Picture(path, caption, name))
    return drawn


def draw_block_values(weights: Mapping[str, Mapping[str, float]], name: str, path: Path) -> None:
    """Draw the value of each block for each hyperparameter of a single run."""
    block_values(weights, name).savefig(path, dpi=_DPI)


def _suitable(results: Results, folder: Path) -> list[tuple[str, str, Draw]]:
    """The name, the caption and the function of each figure, the main one first."""
    keys = [key for key in results.keys if len(_values(results, key)) > 1]
    metric, ablation = results.metric, has_block_ablation(results)
    if metric is None or (len(results.settings) < 2 and not ablation):
        return []
    chosen: list[tuple[str, str, Draw]] = []
    if ablation:
        chosen.append(("blocks", f"What each block contributes to {metric}", block_importance))
        keys = []
    if results.mode == SHAPLEY:
        chosen.append(
            ("shapley", f"What each {_players(results)} adds to {metric}: Shapley values", shapley_values)
        )
        keys = []
    if results.mode == GRADIENT:
        what = f"The loss over the steps, and {metric} with the learned weights"
        chosen.append(("learning", what, partial(learning_curves, folder=folder)))
        keys = []
    if results.mode == GREEDY_SOUP:
        chosen.append(("soup", "The soup so far, expert by expert", partial(soup_so_far, folder=folder)))
        keys = []
    if results.objectives:
        front = f"{' and '.join(results.objectives)}: filled settings are on the Pareto front"
        chosen += [("pareto", front, pareto_plot)]
        chosen.append(("hypervolume", "The volume that settings dominate, one after another", hypervolume))
    elif results.mode == SEARCH:
        chosen.append(("search", f"The best {metric} so far, trial by trial", search_progress))
        chosen.append(("importance", f"How much each key decides {metric}", importance_bars))
        chosen.append(("slices", f"{metric} over each key", slices))
        chosen.append(("contours", f"{metric} over the two keys that decide most", contours))
    first = len(chosen)
    numeric = [key for key in keys if is_numeric(_values(results, key))]
    words = [key for key in keys if key not in numeric]
    if len(keys) == 1 and words:
        chosen.append(("dots", f"{metric} for each {words[0]}", dots))
    if numeric and len(keys) <= 2 and _lines(results, numeric, words) <= _MAX_LINES:
        chosen.append(("curves", f"{metric} against {numeric[0]}", curves))
    if len(keys) == 2:
        chosen.append(("heat-map", f"{metric} over {keys[0]} and {keys[1]}", heat_map))
    if len(keys) > 2:
        chosen.append(("parallel", f"{metric} over all {len(keys)} swept keys", parallel_coordinates))
    if len(numeric) == 2 and len(keys) == 2:
        chosen[first:] = reversed(chosen[first:])  # two numeric keys are clearest on a map
    chosen.append(("forest", "How far the settings lie from the best, with 95 % intervals", forest))
    if not results.objectives:
        chosen.append(("pareto", "The metrics against each other, with their Pareto front", pareto_plot))
    if results.mode == GRADIENT:
        drawn = partial(learned_weights, folder=folder)
        chosen.append(("weights", "The learned weight of each expert in each part", drawn))
    else:
        chosen.append(("block-weights", "The weight that each block got", block_weights))
    chosen.append(("distance", f"{metric} against how far the result is from its inputs", distances))
    return chosen


def _players(results: Results) -> str:
    """What the players of a sweep of coalitions are."""
    return next((kind for key, kind in KEYS.items() if key in results.swept), "player")


def _lines(results: Results, numeric: Sequence[str], words: Sequence[str]) -> int:
    others = [*numeric[1:], *words]
    return len(_values(results, others[0])) if others else 1


def _values(results: Results, key: str) -> list[Value]:
    return list(dict.fromkeys(setting.values[key] for setting in results.settings))
