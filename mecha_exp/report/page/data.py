"""The numbers behind the page's interactive figures, and the library that draws them."""

from __future__ import annotations

import base64
import gzip
import math
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

from mecha_exp.report.figures.forest import MAX_ROWS
from mecha_exp.report.figures.style import COLOURS, COLOURS_ON_BLACK
from mecha_exp.report.intervals import base_of, best_input, of_inputs, of_settings
from mecha_exp.report.results import METHOD_KEYS, Results
from mecha_exp.report.settings import Estimate, Setting
from mecha_exp.report.table import distinct
from mecha_exp.runs.values import Value, as_text, is_numeric

_MAX_COLUMNS = 24
_PACKING = 4  # of gzip's levels: 4 % larger than the smallest, in half of the time


def page_data(results: Results) -> dict[str, Any] | None:
    """What the figures show, as JSON has it; settings are numbered as the rows of the table are.

    Returns:
        `metric`, `unit`, `better` ("more", "less" or null), `names`, `points` (name and signature of each), a
        column for each swept key and each shown metric (with its `intervals`), `forest` (null without a
        verdict), the `inputs` and the colours of lines. None where there are not two settings
        with a value to compare.
    """
    settings = results.ranked
    if len(results.measured) < 2:
        return None
    better = "less" if results.minimized else "more"
    return {
        "metric": results.metric,
        "unit": results.unit(results.metric),
        "better": better if results.judged else None,
        "names": [setting.name for setting in settings],
        "points": [_points(setting) for setting in settings],
        "keys": [_key(results, key, settings) for key in results.keys],
        "method": next((n for n, key in enumerate(results.keys) if key in METHOD_KEYS), None),
        "metrics": [_metric(results, metric, settings) for metric in _columns(results)],
        "forest": _forest(results),
        "inputs": _inputs(results),
        "colours": COLOURS,
        "coloursOnBlack": COLOURS_ON_BLACK,
    }


def has_curves(data: dict[str, Any]) -> bool:
    """Whether a numeric key was swept, against which a metric can be drawn."""
    return any(key["numeric"] for key in data["keys"])


@cache
def plotly_packed() -> str | None:
    """The text of plotly.js, gzip in base64; None where the package plotly is not installed."""
    try:
        script = (resources.files("plotly") / "package_data" / "plotly.min.js").read_bytes()
    except (ImportError, OSError):
        return None
    return base64.b64encode(gzip.compress(script, _PACKING, mtime=0)).decode()


def _columns(results: Results) -> list[str]:
    """The main metric, then the others that the table shows."""
    names = dict.fromkeys([str(results.metric), *results.shown_metrics])
    return [*names][:_MAX_COLUMNS]


def _points(setting: Setting) -> list[list[str]]:
    """The name of each finished point of a setting, and the beginning of its signature."""
    return [[r.name, r.tags.get("signature", "")[:12]] for r in setting.finished]


def _key(results: Results, key: str, settings: Sequence[Setting]) -> dict[str, Any]:
    """The values of a swept key: numbers, or else texts; null where a setting has none."""
    values = [setting.values[key] for setting in settings]
    numeric = is_numeric(values) and len({*values} - {None}) > 1
    return {"name": results.heading(key), "numeric": numeric, "values": [_cell(v, numeric) for v in values]}


def _cell(value: Value, numeric: bool) -> float | str | None:
    if numeric:
        return _number(value) if isinstance(value, int | float) else None
    return None if value is None else as_text(value)


def _metric(results: Results, metric: str, settings: Sequence[Setting]) -> dict[str, Any]:
    """The values of a metric, and its intervals where some setting has one."""
    by_name = of_settings(results, metric)
    estimates = [by_name[setting.name] for setting in settings]
    column = {"name": metric, "values": [_number(estimate.mean) for estimate in estimates]}
    bounds = [_interval(estimate) for estimate in estimates]
    return {**column, "intervals": bounds} if any(bounds) else column


def _interval(estimate: Estimate) -> list[float | None] | None:
    """The ends of a 95 % interval; null without one."""
    low, high = estimate.bounds
    return [_number(low), _number(high)] if math.isfinite(low) else None


def _inputs(results: Results) -> list[dict[str, Any]]:
    """The inputs with the main metric; the base and the best one are `always` drawn."""
    always = {base_of(results), best_input(results)}
    return [
        {"name": name, "value": _number(e.mean), "interval": _interval(e), "always": name in always}
        for name, e in of_inputs(results).items()
    ]


def _forest(results: Results) -> dict[str, Any] | None:
    """The comparisons with the chosen setting, the nearest first, as columns; None where there are none."""
    verdict = results.verdict
    if verdict is None or verdict.selected is None:
        return None
    numbers = {setting.name: number for number, setting in enumerate(results.ranked)}
    compared = [c for c in verdict.with_chosen if c.point in numbers]
    if not compared:
        return None
    smallest = verdict.cost.detectable_between_settings if verdict.cost else None
    return {
        "against": verdict.selected.point,
        "detectable": None if smallest is None else _number(smallest),
        "labels": distinct([comparison.point for comparison in compared[:MAX_ROWS]], 36),
        "rows": [
            {
                "setting": numbers[c.point],
                "difference": _number(c.difference.value),
                "low": _number(c.difference.low),
                "high": _number(c.difference.high),
                "p": _number(c.p),
                "pHolm": _number(c.p_holm),
                "told": c.distinguishable,
                "split": c.split,
            }
            for c in compared
        ],
    }


def _number(value: float) -> float | None:
    """A finite number with six digits; JSON has nothing for others."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
