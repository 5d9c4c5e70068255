"""The table at the end of a sweep, on the terminal and as rows for other formats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from rich import box
from rich.table import Table
from rich.text import Text

from mecha_exp.report.intervals import Bounds, bounded, intervals
from mecha_exp.report.pareto import MARK, front, front_note
from mecha_exp.report.results import MISSING, Results
from mecha_exp.report.search.notes import search_notes
from mecha_exp.report.settings import Estimate, Setting
from mecha_exp.report.verdict import BEST, ELSEWHERE, TIED, conclusion, footnotes
from mecha_exp.report.why.factors import factor_notes
from mecha_exp.report.why.shapley import shapley_notes

_SHORT = 12
"""Settings of several methods that are shown without being asked for; of more, the best of each method."""
MAX_ROWS = 200
_SHORT = 12
"""Settings of several methods that are shown without being asked for; of more, the best of each method."""
MAX_CELL = 32
EDGES = 1
"""The columns of a terminal that a table needs beside those of its cells."""


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        kind: `point`, `dropped`, `failed` or `reference`.
        label: a cell for each swept key.
        estimates: of the shown metrics.
        best: whether it is the best setting.
        tied: whether the data cannot tell it from the best.
        elsewhere: whether it was made with another torch or processor than this process has.
        on_front: whether it is on the Pareto front of several metrics.
    """

    kind: str
    label: Sequence[str]
    estimates: Sequence[Estimate]
    best: bool = False
    tied: bool = False
    elsewhere: bool = False
    on_front: bool = False

    @property
    def mark(self) -> str:
        """The signs beside the main metric: of the best, of what ties with it, of the front, of elsewhere."""
        rank = BEST if self.best else TIED if self.tied else ""
        front = MARK if self.on_front else ""
        return " ".join(filter(None, [rank + front, ELSEWHERE if self.elsewhere else ""]))


def rows(results: Results, metrics: Sequence[str], limit: int | None = None) -> list[Row]:
    """The rows of the settings, the best first and the failed last, and then of the inputs.

    Args:
        results: of a sweep.
        metrics: to show.
        limit: the most settings; None for all.
    """
    bounds, tied = intervals(results), set(results.verdict.tied if results.verdict else ())
    best, ranked = set(front(results)), results.ranked[:limit]
    listed = [_row(results, setting, metrics, bounds, tied) for setting in ranked]
    listed = [
        replace(row, on_front=setting.name in best) for row, setting in zip(listed, ranked, strict=True)
    ]
    blank = [""] * (len(_headings(results)) - 1)
    for name, measured in results.references.items():
        estimates = [Estimate.of([measured[m]] if m in measured else []) for m in metrics]
        estimates = [bounded(e, name, m, bounds) for e, m in zip(estimates, metrics, strict=True)]
        listed.append(Row("reference", [name, *blank], estimates))
    return listed


@dataclass(frozen=True)
class _Layout:
    """What of a table fits a terminal.

    Attributes:
        headings: of the swept keys that are shown.
        metrics: that are shown.
        hidden: how many keys and metrics are not.
        rows: with their labels, shortened.
    """

    headings: Sequence[str]
    metrics: Sequence[str]
    hidden: int
    rows: Sequence[tuple[Row, Sequence[str]]]

    @classmethod
    def of(cls, results: Results, width: int) -> _Layout:
        """As many metrics as there is room for, of the best `MAX_ROWS` settings.

        The main one has a column in any case: the last keys make way for it, all but one.
        """
        headings, metrics = _headings(results), results.shown_metrics
        listed = rows(results, metrics, MAX_ROWS)
        columns = zip(*(row.label for row in listed), strict=True)
        cells = list(zip(*(distinct(column) for column in columns), strict=True))
        widths = [_width([h, *(line[i] for line in cells)]) for i, h in enumerate(headings)]
        room = width - EDGES - (_width(["n"]) if results.has_replicates else 0)
        keys = _how_many_keys(widths, room - _narrowest(metrics[:1], listed))
        listed = _with_room(results, listed, metrics, room - sum(widths[:keys]))
        count = _how_many_fit(metrics, listed, room - sum(widths[:keys]))
        hidden = len(metrics) - count + len(headings) - keys
        labels = [line[:keys] for line in cells]
        return cls(headings[:keys], metrics[:count], hidden, list(zip(listed, labels, strict=True)))

    @property
    def estimates(self) -> list[Estimate]:
        """What is shown, row by row."""
        return [e for row, _ in self.rows for e in row.estimates[: len(self.metrics)]]


def terminal_table(results: Results, width: int) -> Table:
    """A table that fits a terminal: as many metrics as there is room for, and at least the main one."""
    return _drawn(results, _Layout.of(results, width))


def _drawn(results: Results, layout: _Layout) -> Table:
    title = Text(results.title, style="italic")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    if layout.hidden:
        where = "sweep.csv" if results.swept else "run.json"
        table.caption = Text(f"{layout.hidden} more column{'s' * (layout.hidden > 1)}: {where}")
        table.caption_justify = "left"
    for heading in layout.headings:
        table.add_column(Text(heading), no_wrap=True)
    if results.has_replicates:
        table.add_column("n", justify="right")
    for metric in layout.metrics:
        table.add_column(Text(wrapped(metric)), justify="right")
    points = [pair for pair in layout.rows if pair[0].kind != "reference"]
    for row, label in points:
        table.add_row(*map(Text, label), *_cells(row, results, layout.metrics), style=_style(row))
    if left_out := len(results.settings) - len(points):
        table.add_row(f"... {left_out} more")
    for number, (row, label) in enumerate(pair for pair in layout.rows if pair[0].kind == "reference"):
        if not number:
            table.add_section()
        table.add_row(*map(Text, label), *_cells(row, results, layout.metrics), style=_style(row))
    return table


def terminal_tables(results: Results, width: int, *, is_whole: bool = False) -> list[Table | Text]:
    """The table of a sweep, what its marks mean, and the verdict.

    Args:
        results: of the sweep.
        width: of the terminal.
        is_whole: whether every setting is shown; of many settings of several methods the best of each
            method are shown otherwise.
    """
    short = None if is_whole or len(results.settings) <= _SHORT else results.best_of_each
    layout = _Layout.of(short or results, width)
    notes = [*_footnotes(results, layout.estimates), *conclusion(results)]
    more = [] if short is None else [f"all {len(results.settings)} settings: python -m mecha_exp table"]
    return [_drawn(short or results, layout), *map(Text, [*more, *notes])]


def _footnotes(results: Results, estimates: Sequence[Estimate]) -> list[str]:
    """What the marks and intervals of the shown estimates mean."""
    has_spreads = any(e.ci95 is None and e.span is None and e.half_width is not None for e in estimates)
    lines = footnotes(results, has_intervals=any(e.ci95 for e in estimates), has_spreads=has_spreads)
    return [*lines, *front_note(results)]


def page_footnotes(results: Results) -> list[str]:
    """What the marks and intervals of a table with all shown metrics mean."""
    metrics = results.shown_metrics
    return _footnotes(results, [e for row in rows(results, metrics) for e in row.estimates])


def estimate_text(estimate: Estimate) -> str:
    """A mean as text, with its interval to two digits if there is one.

    >>> estimate_text(Estimate(0.87654, 0.0123, 3)), estimate_text(Estimate(0.87654, None, 1))
    ('0.877 ± 0.012', '0.8765')
    >>> estimate_text(Estimate(10500.0, None, 1))
    '10,500'
    >>> estimate_text(Estimate.of([math.nan])), estimate_text(Estimate.of([]))
    ('nan', '–')
    >>> estimate_text(Estimate(0.87654, None, 1, ci95=(0.85, 0.9)))
    '0.8765 [0.850, 0.900]'
    >>> estimate_text(Estimate(0.86, None, 1)), estimate_text(Estimate(1.0, None, 1))
    ('0.8600', '1')
    """
    if not estimate.count:
        return "nan" if estimate.lost else MISSING
    if estimate.span is not None:
        return f"{estimate.mean:.4g} ({estimate.span[0]:.4g} to {estimate.span[1]:.4g})"
    if estimate.ci95 is not None:
        low, high = estimate.ci95
        digits = min(max(1 - math.floor(math.log10(high - low)), 0), 6) if high > low else 4
        return f"{_four_digits(estimate.mean)} [{low:.{digits}f}, {high:.{digits}f}]"
    if estimate.half_width is None:
        is_count = estimate.mean.is_integer() and 1000 <= abs(estimate.mean) < 1e9
        return f"{estimate.mean:,.0f}" if is_count else _four_digits(estimate.mean)
    if not estimate.half_width:
        return f"{_four_digits(estimate.mean)} ± 0"
    digits = 1 - math.floor(math.log10(estimate.half_width))
    if not 0 <= digits <= 6:
        return f"{estimate.mean:.4g} ± {estimate.half_width:.2g}"
    return f"{estimate.mean:.{digits}f} ± {estimate.half_width:.{digits}f}"


def _four_digits(value: float) -> str:
    """Four digits, with zeros at the end so that columns are easy to read; a whole number as it is."""
    return f"{value:.4g}" if value.is_integer() else f"{value:#.4g}".rstrip(".")


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


def _row(results: Results, setting: Setting, metrics: Sequence[str], bounds: Bounds, tied: set[str]) -> Row:
    label = [results.cell(setting, key) for key in results.keys] or [setting.name]
    kind = "failed" if not setting.finished else "dropped" if setting.dropped else "point"
    estimates = [bounded(setting.estimate(m), setting.name, m, bounds) for m in metrics]
    is_best = setting is results.best_setting
    is_tied = setting.name in tied and not is_best
    return Row(kind, label, estimates, is_best, is_tied, bool(setting.made_with))


def _cells(row: Row, results: Results, metrics: Sequence[str]) -> list[str]:
    estimates = row.estimates[: len(metrics)]
    count = [str(max((e.count for e in estimates), default=0))] if results.has_replicates else []
    if row.kind == "failed":
        return [*([""] if results.has_replicates else []), "failed"]
    if row.kind == "reference" and count:
        count = [""]
    cells = [estimate_text(estimate) for estimate in estimates]
    if row.kind == "dropped":
        cells[:1] = ["dropped"]
    if row.mark and cells:
        cells[0] += f" {row.mark}"
    return count + cells


def _style(row: Row) -> str | None:
    return {"failed": "red", "reference": "dim", "dropped": "dim"}.get(row.kind) or (
        "bold" if row.best else None
    )


def _with_room(results: Results, listed: Sequence[Row], metrics: Sequence[str], room: int) -> list[Row]:
    """The rows with intervals beside the main metrics, on each split, or as many as fit."""
    main = [*results.objectives] or [str(results.metric)]

    def limited(row: Row, names: Sequence[str]) -> Row:
        estimates = [
            e if metric in names else replace(e, ci95=None)
            for metric, e in zip(metrics, row.estimates, strict=True)
        ]
        return replace(row, estimates=estimates)

    for named in dict.fromkeys((tuple(main), (main[0],))):
        shown = [m for m in metrics if any(f"/{m}".endswith(f"/{metric}") for metric in named)]
        wide = [limited(row, shown) for row in listed]
        columns = [number for number, metric in enumerate(metrics) if metric in shown]
        needed = sum(_width([estimate_text(row.estimates[n]) for row in wide]) for n in columns) + 2
        if needed <= room:
            return wide
    return [limited(row, []) for row in listed]


def _narrowest(metrics: Sequence[str], listed: Sequence[Row]) -> int:
    """The width that the column of the main metric needs without intervals, with its mark."""
    texts = [estimate_text(replace(e, ci95=None)) for row in listed for e in row.estimates[:1]]
    return _width([part for metric in metrics for part in wrapped(metric).split("\n")] + texts) + 2


def _how_many_keys(widths: Sequence[int], room: int) -> int:
    """The number of columns of keys that leave room for the main metric, at least one."""
    count = len(widths)
    while count > 1 and sum(widths[:count]) > room:
        count -= 1
    return count


def _how_many_fit(metrics: Sequence[str], listed: Sequence[Row], room: int) -> int:
    """The number of metric columns that fit beside the labels, at least one."""
    for number, metric in enumerate(metrics):
        texts = [estimate_text(row.estimates[number]) for row in listed]
        texts += [row.kind for row in listed if row.kind == "dropped" and not number]
        room -= _width([*wrapped(metric).split("\n"), *texts]) + (2 if not number else 0)
        if room < 0 and number:
            return number
    return len(metrics)


def _width(texts: Sequence[str]) -> int:
    """The columns of a terminal that texts need, with those between them and the next ones."""
    return max((len(text) for text in texts), default=0) + 2


def notes_of(results: Results) -> list[str]:
    """What the experts, the blocks and the trials of a sweep show, then the remarks on it and its points."""
    return [*factor_notes(results), *shapley_notes(results), *search_notes(results), *results.notes]
