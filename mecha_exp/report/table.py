"""The table at the end of a sweep, on the terminal and as rows for other formats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from rich import box
from rich.table import Table
from rich.text import Text

from mecha_exp.report.results import MISSING, Estimate, Results, Setting

MAX_ROWS = 200
MAX_CELL = 32
BEST = " *"


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        kind: `point`, `failed` or `reference`.
        label: a cell for each swept key.
        estimates: of the shown metrics.
        best: whether it is the best setting.
    """

    kind: str
    label: Sequence[str]
    estimates: Sequence[Estimate]
    best: bool = False


def rows(results: Results, metrics: Sequence[str]) -> list[Row]:
    """The rows of the settings, the best first and the failed last, and then of the inputs."""
    listed = [_row(results, setting, metrics) for setting in results.ranked]
    blank = [""] * (len(_headings(results)) - 1)
    for name, measured in results.references.items():
        estimates = [Estimate.of([measured[m]] if m in measured else []) for m in metrics]
        listed.append(Row("reference", [name, *blank], estimates))
    return listed


def terminal_table(results: Results, width: int, limit: int = MAX_ROWS) -> Table:
    """A table that fits a terminal: as many metrics as there is room for, and at least the main one."""
    headings = _headings(results)
    metrics = results.shown_metrics
    listed = rows(results, metrics)
    columns = zip(*(row.label for row in listed), strict=True)
    cells = list(zip(*(distinct(column) for column in columns), strict=True))
    label_width = sum(_width([h, *(line[i] for line in cells)]) for i, h in enumerate(headings))
    hidden = len(metrics)
    metrics = metrics[: _how_many_fit(metrics, listed, width - label_width)]
    hidden -= len(metrics)
    title = Text(results.title, style="italic")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    if hidden:
        where = "sweep.csv" if results.swept else "run.json"
        table.caption = Text(f"{hidden} more column{'s' * (hidden > 1)}: {where}")
        table.caption_justify = "left"
    for heading in headings:
        table.add_column(Text(heading), no_wrap=True)
    if results.has_replicates:
        table.add_column("n", justify="right")
    for metric in metrics:
        table.add_column(Text(wrapped(metric)), justify="right")
    points = [pair for pair in zip(listed, cells, strict=True) if pair[0].kind != "reference"]
    for row, label in points[:limit]:
        table.add_row(*map(Text, label), *_cells(row, results, metrics), style=_style(row))
    if len(points) > limit:
        table.add_row(f"... {len(points) - limit} more")
    for number, (row, label) in enumerate(
        pair for pair in zip(listed, cells, strict=True) if pair not in points
    ):
        if not number:
            table.add_section()
        table.add_row(*map(Text, label), *_cells(row, results, metrics), style=_style(row))
    return table


def terminal_tables(results: Results, width: int) -> list[Table]:
    """The whole table and, if methods are compared, a table of the best setting of each method."""
    short = [] if results.best_of_each is None else [results.best_of_each]
    return [terminal_table(part, width) for part in (results, *short)]


def estimate_text(estimate: Estimate) -> str:
    """A mean as text, with its interval to two digits if there is one.

    >>> estimate_text(Estimate(0.87654, 0.0123, 3)), estimate_text(Estimate(0.87654, None, 1))
    ('0.877 ± 0.012', '0.8765')
    >>> estimate_text(Estimate.of([math.nan])), estimate_text(Estimate.of([]))
    ('nan', '–')
    """
    if not estimate.count:
        return "nan" if estimate.lost else MISSING
    if estimate.span is not None:
        return f"{estimate.mean:.4g} ({estimate.span[0]:.4g} to {estimate.span[1]:.4g})"
    if estimate.half_width is None:
        return f"{estimate.mean:.4g}"
    if not estimate.half_width:
        return f"{estimate.mean:.4g} ± 0"
    digits = 1 - math.floor(math.log10(estimate.half_width))
    if not 0 <= digits <= 6:
        return f"{estimate.mean:.4g} ± {estimate.half_width:.2g}"
    return f"{estimate.mean:.{digits}f} ± {estimate.half_width:.{digits}f}"


def shortened(text: str, limit: int = MAX_CELL) -> str:
    """A text with its middle left out if it is longer than `limit`."""
    if len(text) <= limit:
        return text
    head = (limit - 1) // 3
    return f"{text[:head]}…{text[-(limit - 1 - head) :]}"


def distinct(texts: Sequence[str], limit: int = MAX_CELL) -> list[str]:
    """Shorten texts and keep where they differ: common endings are cut first, then common beginnings.

    Different texts that would still look alike have numbers.

    >>> distinct(["/data/models/first.safetensors", "/data/models/second.safetensors"], 20)
    ['/data/models/first…', '/data/models/second…']
    """
    if len(set(texts)) < 2 or max(map(len, texts)) <= limit:
        return [shortened(text, limit) for text in texts]
    head = _common(texts)
    tail = _common([text[head:][::-1] for text in texts])
    cut = [text[: len(text) - tail] + "…" if tail > 1 else text for text in texts]
    if max(map(len, cut)) > limit and head > 1:
        cut = ["…" + text[head:] for text in cut]
    short = [shortened(text, limit) for text in cut]
    if len(set(short)) == len(set(texts)):
        return short
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts), 1)}
    return [f"{shortened(part, limit - 5)} #{numbers[text]}" for text, part in zip(texts, cut, strict=True)]


def _common(texts: Sequence[str]) -> int:
    """The length of the common beginning of all texts."""
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*texts, strict=False)))


def wrapped(name: str) -> str:
    """A long name of a metric with a line break after each slash."""
    return name.replace("/", "/\n") if len(name) > 14 else name


def _headings(results: Results) -> list[str]:
    return [results.heading(key) for key in results.keys] or [
        "run" if len(results.records) == 1 else "setting"
    ]


def _row(results: Results, setting: Setting, metrics: Sequence[str]) -> Row:
    label = [results.cell(setting, key) for key in results.keys] or [setting.name]
    kind = "point" if setting.finished else "failed"
    return Row(kind, label, [setting.estimate(m) for m in metrics], setting is results.best_setting)


def _cells(row: Row, results: Results, metrics: Sequence[str]) -> list[str]:
    estimates = row.estimates[: len(metrics)]
    count = [str(max((e.count for e in estimates), default=0))] if results.has_replicates else []
    if row.kind == "failed":
        return [*([""] if results.has_replicates else []), "failed"]
    if row.kind == "reference" and count:
        count = [""]
    cells = [estimate_text(estimate) for estimate in estimates]
    if row.best and cells:
        cells[0] += BEST
    return count + cells


def _style(row: Row) -> str | None:
    return {"failed": "red", "reference": "dim"}.get(row.kind) or ("bold" if row.best else None)


def _how_many_fit(metrics: Sequence[str], listed: Sequence[Row], room: int) -> int:
    """The number of metric columns that fit beside the labels, at least one."""
    for number, metric in enumerate(metrics):
        texts = [estimate_text(row.estimates[number]) for row in listed]
        room -= _width([*wrapped(metric).split("\n"), *texts]) + (len(BEST) if not number else 0)
        if room < 4 and number:
            return number
    return len(metrics)


def _width(texts: Sequence[str]) -> int:
    return max((len(text) for text in texts), default=0) + 1
