"""What a person sees on the terminal: progress, plans, results, errors."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from mecha_exp.engine import Plan
from mecha_exp.engine.ir.program import Program
from mecha_exp.lab.content_hash import unread_bytes
from mecha_exp.runs.record import Record
from mecha_exp.system.progress import SHOWN, LoggedProgress, human_bytes

log = logging.getLogger(__name__)
QUICKLY_READ = 100_000_000
"""Bytes that are hashed before anybody looks."""

stdout = Console(highlight=False)
stderr = Console(stderr=True, highlight=False)


def show_error(message: str) -> None:
    """An error, on standard error."""
    stderr.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)


def show_point(record: Record, number: int, points: int) -> None:
    """A line for a point of a sweep that is done."""
    measured = record.metrics.get(record.metric or "")
    score = f"{record.metric} {measured:.4g}" if measured is not None else record.status.lower()
    took = (record.ended - record.started) / 1000
    of = f"/{points}" if number <= points else ""  # a sweeper that searches says not how many
    stdout.print(f"[{number}{of}] {record.name}: {score}, {took:.1f} s", markup=False, soft_wrap=True)


def progress_bar(planned: Plan) -> AbstractContextManager[Callable[[str, int], None]]:
    """The progress of a merge."""
    return byte_bar("merging", planned.bytes_read)


@contextmanager
def byte_bar(work: str, total: int) -> Iterator[Callable[[str, int], None]]:
    """A bar with bytes, rate, time left and the current key on a terminal; elsewhere lines in the log."""
    if not sys.stderr.isatty():
        yield LoggedProgress(total)
        return
    columns = (
        TextColumn(work),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[key]}"),
    )
    with Progress(*columns, console=stderr, transient=True) as bar:
        task = bar.add_task(work, total=total, key="")
        yield lambda key, nbytes: bar.update(task, advance=nbytes, key=key[-SHOWN:])


@contextmanager
def hashing_bar(files: Iterable[Path]) -> Iterator[Callable[[int], None]]:
    """A bar while files are read for their hashes; nothing where they are remembered."""
    total = unread_bytes(files)
    if total < QUICKLY_READ or not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    columns = (TextColumn("reading the inputs"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=stderr, transient=True) as bar:
        task = bar.add_task("hash", total=total)
        yield lambda nbytes: bar.update(task, advance=nbytes)


def show_plan(
    planned: Plan,
    names: Sequence[str],
    hyperparameters: dict[str, Any],
    how_to_merge: str = "Leave out debug=plan to do it.",
) -> None:
    """What a merge would do."""
    inputs = make_table("input", "keys", "bytes", "file")
    for name, source in zip(names, planned.inputs.values(), strict=True):
        size = sum(source.info(key).nbytes for key in source.keys())
        inputs.add_row(name, str(len(source.keys())), human_bytes(size), source.name)
    settings = make_table("hyperparameter", "value")
    for name, value in hyperparameters.items():
        settings.add_row(name, str(value))
    work = make_table("keys", "stages", "passes over the data", "whole tensors, at most")
    amounts: dict[tuple[int, int], list[int]] = {}
    for key in planned.keys:
        amounts.setdefault(_amount_of_work(key.program), []).append(planned.whole_bytes_of(key))
    for (stages, passes), whole in amounts.items():
        work.add_row(
            str(len(whole)), str(stages), str(passes), human_bytes(max(whole)) if any(whole) else "-"
        )
    ways = make_table("elements", "each pass over them is run")
    for way, elements in planned.fused.items():
        ways.add_row(f"{elements:,}", way)
    for table in (inputs, settings, *_value_tables(planned), work, ways):
        stdout.print(table)
    for job, layout in zip(planned.jobs, planned.layouts, strict=True):
        target = "kept in memory" if isinstance(job.output, dict) else str(job.output)
        dtypes = ", ".join(f"{count} {d}" for d, count in Counter(d for d, _ in layout.values()).items())
        stdout.print(f" output   {len(layout)} keys ({dtypes}): {escape(target)}", soft_wrap=True)
    stdout.print(f" reads    {human_bytes(planned.bytes_read)}")
    stdout.print(f" writes   {human_bytes(planned.bytes_written)}")
    stdout.print(
        f" memory   about {human_bytes(planned.memory)} of buffers for {planned.options.threads} workers"
    )
    for warning in planned.warnings:
        stdout.print(f" warning  {escape(warning)}", soft_wrap=True)
    stdout.print(f" Nothing was merged. {how_to_merge}", markup=False)


def _value_tables(planned: Plan) -> Iterator[Table]:
    """The value of each block, for every hyperparameter that has several."""
    for name, values in planned.effective_values().items():
        table = make_table("block", name, "keys", "component")
        for value in values:
            said = " ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in value.values)
            table.add_row(value.block, said, str(value.keys), value.component)
        yield table


def make_table(*headings: str) -> Table:
    """An empty table in our style."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def print_json(value: Any) -> None:
    """Data for other programs, on standard output; what JSON lacks, such as NaN, is null."""
    sys.stdout.write(json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, float | int | bool | str | None) else str(value)


def _amount_of_work(program: Program | None) -> tuple[int, int]:
    """Stages, and passes over the data; a key that is copied takes one pass."""
    return (len(program.stages), sum(len(stage.passes) for stage in program.stages)) if program else (0, 1)
