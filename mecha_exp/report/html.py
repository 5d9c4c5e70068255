"""`report.html`: a sweep in one file that needs nothing else, to be read offline or sent by mail."""

from __future__ import annotations

import base64
import html
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from string import Template

from mecha_exp.report.figures import Picture
from mecha_exp.report.results import Estimate, Results
from mecha_exp.report.table import Row, estimate_text, rows
from mecha_exp.runs.record import FAILED, Record
from mecha_exp.runs.values import as_text

REPORT_FILE = "report.html"


def write_report(results: Results, command: Sequence[str], pictures: Sequence[Picture], path: Path) -> None:
    """Write the page: the question, the table, the figures, the environment, and how to reproduce it.

    Args:
        results: of the sweep.
        command: what was typed.
        pictures: the figures, which are put into the page.
        path: of the page.
    """
    record = next(iter(results.finished), results.records[0]) if results.records else Record("")
    page = Template(_page()).substitute(
        title=_escaped(results.title),
        command=_escaped(shlex.join(command)),
        answer=_answer(results),
        best_of_each=_best_of_each(results),
        table=_table(results),
        notes="".join(f"<p>{_escaped(note)}</p>\n" for note in results.notes),
        figures="\n".join(_figure(picture) for picture in pictures),
        failures=_failures(results),
        inputs=_definitions(_inputs(record)),
        environment=_definitions(_environment(record)),
        reproduce=_reproduce(results, command, path.parent),
    )
    path.write_text(page, encoding="utf-8")


def _page() -> str:
    return resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")


def _answer(results: Results) -> str:
    """The result in a sentence or two."""
    points, failed = len(results.records), len(results.records) - len(results.finished)
    said = [f"{points} points" + (f", {failed} of them failed" if failed else "") + "."]
    if best := results.best_setting:
        unit = results.unit(results.metric)
        value = estimate_text(best.estimate(results.metric))
        said.append(
            f"Best: <strong>{_escaped(best.name)}</strong> with {_escaped(results.metric)} "
            f"<strong>{value}</strong>{f' ({_escaped(unit)})' if unit else ''}."
        )
        measured = {n: v[results.metric] for n, v in results.references.items() if results.metric in v}
        if measured:
            choose = min if results.minimized else max
            name = choose(measured, key=lambda n: measured[n])
            said.append(f"The best input, {_escaped(name)}, has {measured[name]:.4g}.")
    return " ".join(said)


def _table(results: Results) -> str:
    metrics = results.shown_metrics
    labels = [
        *([results.heading(key) for key in results.keys] or ["run"]),
        *(["n"] if results.has_replicates else []),
    ]
    head = "".join([*(_heading(label) for label in labels), *(_heading(m, "number") for m in metrics)])
    listed = rows(results, metrics)
    body = "\n".join(_table_row(row, results.has_replicates, len(metrics)) for row in listed)
    return f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>"


def _best_of_each(results: Results) -> str:
    if results.best_of_each is None:
        return ""
    title = _escaped(results.best_of_each.title.capitalize())
    table = _table(results.best_of_each)
    return f'<h2>{title}</h2>\n<div class="scroll"><table id="best">\n{table}\n</table></div>'


def _heading(text: str, kind: str = "") -> str:
    return f'<th scope="col" class="{kind}"><button type="button">{_escaped(text)}</button></th>'


def _table_row(row: Row, counted: bool, metrics: int) -> str:
    cells = [f"<td>{_escaped(text)}</td>" for text in row.label]
    if row.kind == "failed":
        cells.append(f'<td colspan="{metrics + counted}">failed</td>')
        return f'<tr class="failed">{"".join(cells)}</tr>'
    if counted:
        count = max((e.count for e in row.estimates), default=0)
        cells.append(f"<td>{count if row.kind == 'point' else ''}</td>")
    cells += [_number_cell(estimate) for estimate in row.estimates]
    if row.best:
        cells[0] = cells[0].replace("</td>", ' <span class="mark" title="best">★</span></td>')
    return f'<tr class="{row.kind}{" best" if row.best else ""}">{"".join(cells)}</tr>'


def _number_cell(estimate: Estimate) -> str:
    sort_by = "" if math.isnan(estimate.mean) else f' data-value="{estimate.mean!r}"'
    return f'<td class="number"{sort_by}>{estimate_text(estimate)}</td>'


def _figure(picture: Picture) -> str:
    data = base64.b64encode(picture.path.read_bytes()).decode()
    caption = _escaped(picture.caption)
    return (
        f'<figure><img alt="{caption}" src="data:image/png;base64,{data}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _failures(results: Results) -> str:
    failed = [record for record in results.records if record.status == FAILED]
    if not failed:
        return ""
    listed = "".join(
        f"<details><summary>{_escaped(r.name)}</summary><pre>{_escaped(r.error or '')}</pre></details>"
        for r in failed
    )
    return f"<h2>What failed</h2>\n{listed}"


def _inputs(record: Record) -> dict[str, str]:
    """The inputs with their paths and the hashes of their contents."""
    found = {}
    for key, path in record.parameters.items():
        if key.startswith("input/"):
            name = key.removeprefix("input/")
            found[name] = f"{path}\nSHA-256 {record.tags.get(f'fingerprint/{name}', 'unknown')}"
    return found


def _environment(record: Record) -> dict[str, str]:
    """Versions, commit and machine, and how the arithmetic was done."""
    shown = {key.removeprefix("version/"): v for key, v in record.tags.items() if key.startswith("version/")}
    shown |= {key: v for key, v in record.tags.items() if key.startswith(("git/", "machine/"))}
    kept = ("compute_dtype", "output_dtype")
    return {**shown, **{key: as_text(record.parameters[key]) for key in kept if key in record.parameters}}


def _reproduce(results: Results, command: Sequence[str], folder: Path) -> str:
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
    return _escaped("\n".join(lines))


def _definitions(values: Mapping[str, str]) -> str:
    return "\n".join(f"<dt>{_escaped(k)}</dt><dd>{_lines(v.splitlines())}</dd>" for k, v in values.items())


def _lines(texts: Iterable[str]) -> str:
    return "<br>".join(_escaped(text) for text in texts)


def _escaped(text: object) -> str:
    return html.escape(str(text))
