"""The Shapley values of experts, or blocks, as bars from the one that adds most."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mecha_exp.report.figures.style import COLOURS, SMALL, new_figure, title
from mecha_exp.report.results import Results
from mecha_exp.report.table import distinct
from mecha_exp.report.why.shapley import attributions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_PANELS = 4


def shapley_values(results: Results) -> Figure | None:
    """Draw a panel for each setting of the other swept keys; None where there are no values.

    Whiskers are intervals over examples, or over sampled orders where not all coalitions were measured.
    """
    shown = attributions(results)[0][:MAX_PANELS]
    if not shown:
        return None
    figure, panels = new_figure(8, 1.4 + 0.3 * len(shown[0].values) * len(shown), len(shown), sharey=False)
    for axes, attribution in zip(panels, shown, strict=True):
        for height, value in enumerate([*attribution.values.values()][::-1]):
            axes.barh(height, value.value, color=COLOURS[0 if value.value >= 0 else 1])
            if not math.isnan(value.low):
                axes.plot([value.low, value.high], [height, height], color="black", linewidth=1)
        axes.axvline(0, color="black", linewidth=1)
        names = distinct(list(attribution.values)[::-1], 40)
        axes.set_yticks(range(len(names)), names, fontsize=SMALL)
        axes.set_xlabel(
            f"Shapley value of {results.metric}{' ' * bool(attribution.setting)}{attribution.setting}"
        )
    title(panels[0], results, f"together {shown[0].full - shown[0].none:+.4g}")
    return figure
