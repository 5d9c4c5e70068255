"""The figures of a sweep: choose those that suit the swept keys, and draw them, for the page or a paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mecha_exp.report.adaptive_records import GRADIENT, GREEDY_SOUP
from mecha_exp.report.figures.adaptive import learned_weights, learning_curves, soup_so_far
from mecha_exp.report.figures.blocks import block_importance, block_values, block_weights, has_block_ablation
from mecha_exp.report.figures.curves import curves, dots
from mecha_exp.report.figures.distance import distances
from mecha_exp.report.figures.forest import forest
from mecha_exp.report.figures.heat import heat_map
from mecha_exp.report.figures.landscape import contours, importance_bars, search_progress, slices
from mecha_exp.report.figures.paper import Look
from mecha_exp.report.figures.parallel import parallel_coordinates
from mecha_exp.report.figures.pareto import hypervolume, pareto_plot
from mecha_exp.report.figures.shapley import shapley_values
from mecha_exp.report.results import Results
from mecha_exp.report.search.notes import MODE as SEARCH
from mecha_exp.report.why.factors import KEYS
from mecha_exp.report.why.shapley import MODE as SHAPLEY
from mecha_exp.runs.values import is_numeric
from mecha_exp.system.atomic_write import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAIN_FILE = "sweep.png"
FOREST_FILE = "sweep-forest.png"
_DPI = 150
_MAX_LINES = 12

Draw = Callable[[Results], "Figure | None"]
Choice = tuple[str, str, Draw]
"""A figure by its name, its caption and the function that draws it."""


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


def draw_figures(
    results: Results, folder: Path, *, output: Path | None = None, look: Look | None = None
) -> list[Picture]:
    """Draw every figure that suits the sweep; the first is `sweep.png`, others are `sweep-NAME.png`.

    Nothing is drawn if no point has a metric or no key was swept.

    Args:
        results: of the sweep.
        folder: of the sweep.
        output: where the files go; the sweep's folder by default.
        look: of figures for a paper; a PNG file with a title by default.
    """
    from matplotlib import rc_context

    drawn: list[Picture] = []
    for name, caption, draw in _suitable(results, folder):
        with rc_context(look.settings if look else None):
            figure = draw(results)
            if figure is None:
                continue
            path = (output or folder) / (f"sweep-{name}.png" if drawn else MAIN_FILE)
            if look is None:
                _save(figure, path, dpi=_DPI)
            else:
                path = path.with_suffix(f".{look.form}")
                caption = "; ".join([caption, *look.apply(figure)])
                _save(figure, path, metadata=look.metadata)
        drawn.append(Picture(path, caption, name))
    return drawn


def draw_block_values(weights: Mapping[str, Mapping[str, float]], name: str, path: Path) -> None:
    """Draw the value of each block for each hyperparameter of a single run."""
    _save(block_values(weights, name), path, dpi=_DPI)


def _save(figure: Figure, path: Path, **settings: Any) -> None:
    """Write a figure in the format of its suffix; the file is old or whole at every moment."""
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format=path.suffix.removeprefix("."), **settings)


def _suitable(results: Results, folder: Path) -> list[Choice]:
    """The name, the caption and the function of each figure, the main one first."""
    metric, ablation = results.metric, has_block_ablation(results)
    if metric is None or (len(results.settings) < 2 and not ablation):
        return []
    of_mode = _of_mode(results, folder, ablation)
    keys = [] if of_mode else results.varied_keys(results.settings)
    chosen = [*of_mode, *_of_search(results), *_over_keys(results, keys)]
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


def _of_mode(results: Results, folder: Path, ablation: bool) -> list[Choice]:
    """The figures of sweeps that have figures of their own in place of those over the swept keys."""
    metric = results.metric
    chosen: list[Choice] = []
    if ablation:
        chosen.append(("blocks", f"What each block contributes to {metric}", block_importance))
    if results.mode == SHAPLEY:
        players = next((kind for key, kind in KEYS.items() if key in results.swept), "player")
        chosen.append(("shapley", f"What each {players} adds to {metric}: Shapley values", shapley_values))
    if results.mode == GRADIENT:
        what = f"The loss over the steps, and {metric} with the learned weights"
        chosen.append(("learning", what, partial(learning_curves, folder=folder)))
    if results.mode == GREEDY_SOUP:
        chosen.append(("soup", "The soup so far, expert by expert", partial(soup_so_far, folder=folder)))
    return chosen


def _of_search(results: Results) -> list[Choice]:
    """The figures of several objectives, or of a search by one."""
    metric = results.metric
    if results.objectives:
        front = f"{' and '.join(results.objectives)}: filled settings are on the Pareto front"
        volume = "The volume that settings dominate, one after another"
        return [("pareto", front, pareto_plot), ("hypervolume", volume, hypervolume)]
    if results.mode != SEARCH:
        return []
    return [
        ("search", f"The best {metric} so far, trial by trial", search_progress),
        ("importance", f"How much each key decides {metric}", importance_bars),
        ("slices", f"{metric} over each key", slices),
        ("contours", f"{metric} over the two keys that decide most", contours),
    ]


def _over_keys(results: Results, keys: Sequence[str]) -> list[Choice]:
    """The figures of the metric over the keys that vary."""
    metric = results.metric
    chosen: list[Choice] = []
    numeric = [key for key in keys if is_numeric(results.values_of(key))]
    words = [key for key in keys if key not in numeric]
    lines = [len(results.values_of(key)) for key in (*numeric[1:], *words)]
    if len(keys) == 1 and words:
        chosen.append(("dots", f"{metric} for each {words[0]}", dots))
    if numeric and len(keys) <= 2 and max(lines, default=1) <= _MAX_LINES:
        chosen.append(("curves", f"{metric} against {numeric[0]}", curves))
    if len(keys) == 2:
        chosen.append(("heat-map", f"{metric} over {keys[0]} and {keys[1]}", heat_map))
    if len(keys) > 2:
        chosen.append(("parallel", f"{metric} over all {len(keys)} swept keys", parallel_coordinates))
    if len(numeric) == 2 and len(keys) == 2:
        chosen.reverse()  # two numeric keys are clearest on a map
    return chosen
