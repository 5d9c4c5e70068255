"""The results of a sweep: a table on the terminal, `sweep.csv`, and a figure."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from mecha_exp.app.record import FAILED, Record

CSV_FILE = "sweep.csv"
FIGURE_FILE = "sweep.png"
SHOWN_METRICS = 6
HIDDEN_PREFIXES = ("time/", "io/", "memory/", "weights/", "nonfinite")


@dataclass(frozen=True)
class Results:
    """The points of a sweep, and what was varied.

    Attributes:
        title: of the sweep.
        swept: the configuration keys that differ between the points.
        records: one for each point, in their order.
    """

    title: str
    swept: Sequence[str]
    records: Sequence[Record]

    @property
    def metric(self) -> str | None:
        """The main metric: the evaluator's, or else how far the result is from its first input."""
        finished = [r for r in self.records if r.status != FAILED]
        named = next((r.metric for r in finished if r.metric), None)
        if named or not finished:
            return named
        return next((m for m in finished[0].metrics if m.startswith("weights/relative_change/")), None)

    @property
    def direction(self) -> str:
        """Whether more of the main metric is better."""
        return next((r.direction for r in self.records if r.metric), "minimize")

    @property
    def best(self) -> Record | None:
        """The point with the best main metric, where an evaluator says which way is better."""
        judged = [r for r in self.records if r.metric and _is_number(r.metrics.get(r.metric))]
        if not judged:
            return None
        sign = 1 if self.direction == "maximize" else -1
        return max(judged, key=lambda r: sign * r.metrics[str(r.metric)])

    @property
    def references(self) -> dict[str, dict[str, float]]:
        """The metrics of the inputs, by name."""
        return {name: values for r in self.records for name, values in r.references.items()}

    def setting(self, record: Record, key: str) -> str:
        """What a point's value of a swept key is, as it was typed."""
        return next((o.partition("=")[2] for o in record.overrides if o.partition("=")[0] == key), "")

    def write_csv(self, path: Path) -> None:
        """One row a point, then one a reference; every metric is a column."""
        metrics = list(dict.fromkeys(m for r in self.records for m in r.metrics))
        with path.open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(["point", "name", "status", *self.swept, *metrics, "error"])
            for number, r in enumerate(self.records):
                settings = [self.setting(r, key) for key in self.swept]
                values = [r.metrics.get(m, "") for m in metrics]
                rows.writerow([number, r.name, r.status, *settings, *values, r.error or ""])
            for name, measured in self.references.items():
                blank = [""] * len(self.swept)
                rows.writerow(["", name, "REFERENCE", *blank, *[measured.get(m, "") for m in metrics], ""])

    def table(self) -> Table:
        """The points sorted by the main metric, the best one marked, then the inputs for comparison."""
        metric, best = self.metric, self.best
        shown = self._shown_metrics()
        table = Table(title=self.title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for heading in self.swept or ["run"]:
            table.add_column(heading, no_wrap=True)
        for heading in shown:
            table.add_column(heading, justify="right", overflow="fold")
        for record in sorted(self.records, key=lambda r: self._rank(r, metric)):
            settings = [self.setting(record, key) for key in self.swept] or [record.name]
            if record.status == FAILED:
                table.add_row(*settings, "failed", style="red")
                continue
            mark = " *" if record is best else ""
            values = [_number(record.metrics.get(m)) + (mark if m == metric else "") for m in shown]
            table.add_row(*settings, *values, style="bold" if record is best else None)
        for number, (name, measured) in enumerate(self.references.items()):
            if not number:
                table.add_section()
            blank = [""] * (max(len(self.swept), 1) - 1)
            table.add_row(name, *blank, *[_number(measured.get(m)) for m in shown], style="dim")
        return table

    def _shown_metrics(self) -> list[str]:
        names = dict.fromkeys(m for r in self.records for m in r.metrics)
        shown = [m for m in names if not m.startswith(HIDDEN_PREFIXES)]
        if not shown:
            shown = [m for m in names if m.startswith(("weights/relative_change", "weights/cosine"))]
        return shown[:SHOWN_METRICS]

    def _rank(self, record: Record, metric: str | None) -> tuple[bool, float]:
        value = record.metrics.get(metric or "", math.nan)
        if record.status == FAILED or not _is_number(value):
            return True, 0.0
        return False, -value if self.direction == "maximize" else value


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)
