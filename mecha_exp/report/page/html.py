"""`report.html`: a sweep in one file that needs nothing else, to be read offline or sent by mail."""

from __future__ import annotations

import base64
import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from mecha_exp.report.figures import FOREST_FILE, Picture
from mecha_exp.report.intervals import best_input, of_inputs
from mecha_exp.report.page.data import has_curves, page_data, plotly_packed
from mecha_exp.report.page.links import links_to_files
from mecha_exp.report.page.verdict import choice, compared, task_table
from mecha_exp.report.results import Results
from mecha_exp.report.table import Row, estimate_text, notes_of, page_footnotes, rows
from mecha_exp.report.verdict import conclusion
from mecha_exp.runs.record import FAILED, Record
from mecha_exp.runs.values import as_text
from mecha_exp.system.atomic_write import replace_text

REPORT_FILE = "report.html"
MOST_SETTINGS = 1000
"""Settings in the tables and the interactive figures of a page: browsers open and sort that many at once."""
_EMBEDDED_BYTES = 1_500_000  # of one figure: pages stay small enough to be mailed
_ARITHMETIC = ("compute_dtype", "output_dtype")


def write_report(results: Results, command: Sequence[str], pictures: Sequence[Picture], path: Path) -> None:
    """Write the page: the verdict, the figures, the table, the environment, and how to reproduce it.

    Figures are pictures; where plotly is installed, scripts replace them by interactive ones. Of more than
    `MOST_SETTINGS` settings the page has the best, and says so; `sweep.csv` and `sweep.parquet` have all.

    Args:
        results: of the sweep.
        command: what was typed.
        pictures: the figures, which are embedded in the page.
        path: of the page.
    """
    record = next(iter(results.finished), results.records[0]) if results.records else Record("")
    library = plotly_packed()
    shown = _best_part(results)
    data = page_data(shown) if library else None
    page = _render(
        results=results,
        data=data,
        library=library if data else None,
        notes=notes_of(results),
        command=shlex.join(command),
        points=len(results.records),
        best=_best_setting(shown),
        unit=results.unit(results.metric),
        best_input=_best_input(results),
        best_of_each=_table(results.best_of_each) if results.best_of_each is not None else None,
        all_settings=_table(shown),
        left_out=len(results.settings) - len(shown.settings),
        marks=page_footnotes(shown),
        conclusion=conclusion(results),
        choice=choice(results),
        tasks=task_table(results),
        compared=compared(results),
        forest=[_embedded(picture) for picture in pictures if picture.path.name == FOREST_FILE],
        figures=_figures([p for p in pictures if p.path.name != FOREST_FILE], results, data),
        files=links_to_files(path.parent),
        failures=[failed for failed in results.records if failed.status == FAILED],
        inputs=_inputs(record),
        environment=_environment(record),
        reproduce=_reproduce(results, command, path.parent),
        commands=_commands(shown),
    )
    replace_text(path, page)


def _best_part(results: Results) -> Results:
    """The results of the settings that the page shows: all, or the best."""
    if len(results.settings) <= MOST_SETTINGS:
        return results
    return replace(
        results, records=[r for setting in results.ranked[:MOST_SETTINGS] for r in setting.records]
    )


def _render(**values: Any) -> str:
    """Fill `page.html`; every value is escaped."""
    import jinja2  # only here: most starts write no page

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_part),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(
        estimate_text=estimate_text, is_nan=math.isnan, point_count=_point_count, six_digits="{:.6g}".format
    )
    return environment.get_template("page.html").render(values)


def _part(name: str) -> str:
    """The text of one of the page's own files, for the template to include."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _table(results: Results) -> dict[str, Any]:
    """The headings and rows of a table, for the template's macro `table`."""
    labels = [results.heading(key) for key in results.keys] or ["run"]
    counted = results.has_replicates
    metrics = results.shown_metrics
    return {
        "labels": [*labels, "n"] if counted else labels,
        "metrics": metrics,
        "counted": counted,
        "rows": rows(results, metrics),
    }


def _point_count(row: Row) -> int | str:
    """The number of points of a row; empty for an input."""
    return max((e.count for e in row.estimates), default=0) if row.kind == "point" else ""


def _best_setting(results: Results) -> dict[str, str] | None:
    """The name of the best setting, and its main metric with the interval that the table has."""
    if results.best_setting is None or results.metric is None:
        return None
    row = next(row for row in rows(results, [results.metric]) if row.best)
    return {"name": results.best_setting.name, "value": estimate_text(row.estimates[0])}


def _best_input(results: Results) -> dict[str, str] | None:
    """The name and the value of the input with the best main metric, if one was measured."""
    name = best_input(results)
    return None if name is None else {"name": name, "value": estimate_text(of_inputs(results)[name])}


def _embedded(picture: Picture) -> dict[str, str]:
    """A figure as the template embeds it; a large one has an address in place of its data."""
    content = picture.path.read_bytes()
    is_small = len(content) <= _EMBEDDED_BYTES
    data = base64.b64encode(content).decode() if is_small else ""
    address = "" if is_small else picture.path.name
    return {"caption": picture.caption, "data": data, "kind": picture.kind, "address": address}


def _figures(
    pictures: Sequence[Picture], results: Results, data: dict[str, Any] | None
) -> list[dict[str, str]]:
    """The figures after the forest plot; those that scripts alone can draw have no `data`."""
    figures = [_embedded(picture) for picture in pictures]
    drawn = {figure["kind"] for figure in figures}
    if data and "curves" not in drawn and has_curves(data):
        figures.insert(0, _drawn_by_script(f"{results.metric} against a swept key", "curves"))
    if data and "parallel" not in drawn:
        figures.append(_drawn_by_script("The swept keys and the metrics", "parallel"))
    return figures


def _drawn_by_script(caption: str, kind: str) -> dict[str, str]:
    return {"caption": caption, "data": "", "kind": kind, "address": ""}


def _inputs(record: Record) -> dict[str, str]:
    """The inputs with their paths and the hashes of their contents."""
    return {
        name: f"{path}\nSHA-256 {record.tags.get(f'fingerprint/{name}', 'unknown')}"
        for name, path in record.inputs.items()
    }


def _environment(record: Record) -> dict[str, str]:
    """Versions, commit and machine, and the dtypes of the arithmetic."""
    shown = {key.removeprefix("version/"): v for key, v in record.tags.items() if key.startswith("version/")}
    shown |= {key: v for key, v in record.tags.items() if key.startswith(("git/", "machine/"))}
    return shown | {key: as_text(record.parameters[key]) for key in _ARITHMETIC if key in record.parameters}


def _reproduce(results: Results, command: Sequence[str], folder: Path) -> str:
    """The commands that make the sweep, its best point and its table again."""
    lines = ["# the whole sweep again; what is stored already is not computed", shlex.join(command)]
    if best := results.best:
        signature = best.tags.get("signature", "")[:12]
        lines += [
            "",
            f"# the best point ({best.name}) made again from its record, and its bytes compared",
            f"python -m mecha_exp reproduce {signature or shlex.quote(str(folder))}",
        ]
    lines += [
        "",
        "# this table in another shape",
        f"python -m mecha_exp table {shlex.quote(str(folder))} --json",
    ]
    return "\n".join(lines)


def _commands(results: Results) -> list[tuple[str, str]]:
    """The name of each point with the command that makes it again."""
    signed = [(record.name, record.tags.get("signature", "")[:12]) for record in results.finished]
    return [(name, f"python -m mecha_exp reproduce {signature}") for name, signature in signed if signature]
