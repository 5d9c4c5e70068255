"""Output for people: progress bars, plans, tables, errors; and JSON for programs."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from mecha_exp.checkpoint import dtype_name
from mecha_exp.engine import Plan
from mecha_exp.engine.ir.program import Program
from mecha_exp.lab.content_hash import unread_bytes
from mecha_exp.runs.record import Record, json_ready
from mecha_exp.system.progress import LOG_SECONDS, SHOWN, LoggedProgress, human_bytes

log = logging.getLogger(__name__)
QUICKLY_READ = 100_000_000
"""Fewer bytes than this are hashed without a progress bar."""
_UNLIMITED = 1 << 16
"""A width that no table reaches."""
_LONG = 10
"""Seconds that are left of a sweep that are part of a point's line."""
QUICKLY_MEASURED = 1.0
"""Seconds of a measurement that shows no progress."""
_WORTH_SAYING = 0.5
"""Seconds of measuring inputs that are part of a point's line."""

_SETTING = re.compile(
    r"(?<![\w.(])(?=(?:on_(?:extra|integers|missing|nonfinite|quantised|tied|tokens)|resize_embeddings"
    r"|running_stats|stacked_experts|memory_budget)=\w)"
)
"""The places before the settings that messages of the engine name."""


class _Console(Console):
    """A console that ends the process quietly when its reader has gone, as in `... | head`."""

    def on_broken_pipe(self) -> None:
        """End with the status that shells give to such a process; what was done is written all the same."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141)


stdout = _Console(highlight=False, emoji=False)
stderr = _Console(stderr=True, highlight=False, emoji=False)


def print_line(text: str) -> None:
    """Print a text to standard output as it is: without markup, in one line where the terminal is narrow."""
    stdout.print(text, markup=False, soft_wrap=True)


def show_error(message: str) -> None:
    """Print an error to standard error."""
    stderr.print(f"[bold red]error:[/] {escape(printable(as_typed(message)))}", soft_wrap=True)


def as_typed(message: str) -> str:
    """A message with the engine's settings as a command line has them; in Python they are keywords.

    >>> as_typed("on_tied=untie reads the one for the other")
    'engine.on_tied=untie reads the one for the other'
    """
    return _SETTING.sub("engine.", message)


def printable(text: str) -> str:
    """A text with its control characters written out, which would move the cursor or change colours.

    >>> printable("a" + chr(27) + "[31mb")
    'a\\\\x1b[31mb'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def show_point(
    record: Record, number: int, points: int, seconds_of_inputs: float = 0, seconds_left: float = 0
) -> None:
    """Print a line for a finished point of a sweep, with the time of inputs that were measured first.

    Args:
        record: of the point.
        number: of the point, from 1.
        points: of the sweep; 0 where a search decides it.
        seconds_of_inputs: how long the inputs took that were measured before it.
        seconds_left: for the points that are left.
    """
    measured = record.metrics.get(record.metric or "")
    score = f"{record.metric} {measured:.4g}" if measured is not None else record.status.lower()
    if record.dropped is not None:
        score = f"dropped {record.dropped_where}"
    seconds = (record.ended - record.started) / 1000
    total = f"/{points}" if number <= points else ""  # a searching sweeper does not know the total
    inputs = (
        f", of which {seconds_of_inputs:.1f} s for the inputs" if seconds_of_inputs >= _WORTH_SAYING else ""
    )
    left = f"; {spoken_time(seconds_left)} left" if seconds_left >= _LONG else ""
    print_line(f"[{number}{total}] {record.name}: {score}, {seconds:.1f} s{inputs}{left}")


def progress_bar(planned: Plan) -> AbstractContextManager[Callable[[str, int], None]]:
    """A progress bar for a merge."""
    return byte_bar("merging", planned.bytes_read)


@contextmanager
def byte_bar(work: str, total: int) -> Iterator[Callable[[str, int], None]]:
    """A progress bar with bytes, rate, time left and the current key; without a terminal, log lines."""
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
def examples_bar(work: str, examples: int) -> Iterator[Callable[[int], None]]:
    """Show how many examples of a trip over them are done; the bar begins anew with the next trip.

    Args:
        work: what is done, as a participle.
        examples: how many there are.

    Yields:
        a function that is told how many more are done.
    """
    if not stderr.is_terminal:
        yield lambda count: None
        return
    columns = (TextColumn(work), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True) as bar:
        task = bar.add_task("examples", total=examples)

        def advance(count: int) -> None:
            if bar.tasks[0].finished:
                bar.reset(task)
            bar.update(task, advance=count)

        yield advance


class MeasuringBars:
    """The progress of measurements: bars on a terminal, else a line in the log every few seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._began: dict[tuple[str, str], tuple[float, int]] = {}
        self._logged = 0.0

    def show(self, name: str, work: str, done: int, total: int) -> None:
        """Show how many examples of a point or an input are measured; the first call for it starts its time.

        Args:
            name: of the point or the input.
            work: what is counted, such as `documents`.
            done, total: how many are measured, and how many there are.
        """
        with self._lock:
            now = time.monotonic()
            began, at_first = self._began.setdefault((name, work), (now, done))
            if now - began < QUICKLY_MEASURED:
                return
            if sys.stderr.isatty():
                self._draw(name, work, done, total)
            elif done > at_first and now - self._logged >= LOG_SECONDS:
                self._logged = now
                left = (now - began) / (done - at_first) * (total - done)
                log.info("%s: %d of %d %s, %s left", name, done, total, work, spoken_time(left))

    def end(self, name: str) -> None:
        """Take away what is shown of a point or an input."""
        with self._lock:
            self._began = {key: began for key, began in self._began.items() if key[0] != name}
            if self._progress is not None and name in self._tasks:
                self._progress.remove_task(self._tasks.pop(name))
                if not self._tasks:
                    self._progress.stop()
                    self._progress = None

    def _draw(self, name: str, work: str, done: int, total: int) -> None:
        if self._progress is None:
            text, count = TextColumn("{task.description}"), MofNCompleteColumn()
            columns = (text, BarColumn(), count, TimeRemainingColumn())
            self._progress = Progress(*columns, console=stderr, transient=True)
            self._progress.start()
        what = escape(f"measuring {name[-SHOWN:]}, {work}")
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(what, completed=done, total=total)
        self._progress.update(self._tasks[name], description=what, completed=done, total=total)


class Pace:
    """How long the points of a sweep that are left will take, from those that this start has made."""

    def __init__(self) -> None:
        self._began, self._made = time.monotonic(), 0

    def begin(self) -> None:
        """Note that points are about to be made: imports, checks and hashes took the time until now."""
        if not self._made:
            self._began = time.monotonic()

    def note(self, left: int, seconds_of_inputs: float = 0, *, is_known: bool = False) -> float:
        """Note that one more point is made; returns the seconds for so many others, 0 where nothing tells.

        Args:
            left: the points that are left.
            seconds_of_inputs: how long the inputs took that were measured with it, once for all points.
            is_known: whether the store had the point, which so took no time.
        """
        self._began += seconds_of_inputs
        self._made += not is_known
        return (time.monotonic() - self._began) / self._made * left if self._made else 0


def spoken_time(seconds: float) -> str:
    """A time for people.

    >>> spoken_time(42), spoken_time(1000), spoken_time(20000)
    ('42 s', '17 min', '5.6 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


@contextmanager
def hashing_bar(files: Iterable[Path]) -> Iterator[Callable[[int], None]]:
    """A progress bar while files are hashed; none where the hashes are cached."""
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
    """Print what a merge would do: inputs, hyperparameters, work, outputs, bytes, memory, warnings."""
    settings = make_table("hyperparameter", "value")
    for name, value in hyperparameters.items():
        settings.add_row(name, str(value))
    ways = make_table("elements", "each pass over them is run")
    for way, elements in planned.fused.items():
        ways.add_row(f"{elements:,}", way)
    print_table(_input_table(planned, names))
    for table in (settings, *_value_tables(planned), _work_table(planned), ways):
        stdout.print(table)
    for job, layout in zip(planned.jobs, planned.layouts, strict=True):
        target = "kept in memory" if isinstance(job.output, dict) else str(job.output)
        dtypes = ", ".join(f"{count} {d}" for d, count in Counter(d for d, _ in layout.values()).items())
        stdout.print(f" output   {len(layout)} keys ({dtypes}): {escape(target)}", soft_wrap=True)
        if choices := planned.choices(planned.jobs.index(job)):
            stdout.print(f" keys     {', '.join(f'{count} {name}' for name, count in choices.items())}")
    stdout.print(f" reads    {human_bytes(planned.bytes_read)}")
    for trip in planned.trips:
        names = ", ".join(dict.fromkeys(value.method.identifier for value in trip.values))
        count = len(trip.keys)
        words = f" before   one more trip over {count} keys, for the numbers of the whole model: {names}"
        stdout.print(words, soft_wrap=True)
    stdout.print(f" writes   {human_bytes(planned.bytes_written)}")
    arithmetic = ", ".join(f"{n} keys in {dtype_name(d)}" for d, n in planned.arithmetic.items())
    stdout.print(f" computes {arithmetic or 'nothing'}")
    stdout.print(
        f" memory   about {human_bytes(planned.memory)} of buffers for {planned.options.threads} workers"
    )
    for warning in planned.warnings:
        stdout.print(f" warning  {escape(as_typed(warning))}", soft_wrap=True)
    stdout.print(f" Nothing was merged. {how_to_merge}", markup=False)


def _input_table(planned: Plan, names: Sequence[str]) -> Table:
    table = make_table("input", "keys", "bytes", "file")
    for name, source in zip(names, planned.inputs.values(), strict=True):
        infos = source.infos()
        size = sum(info.nbytes for info in infos.values())
        table.add_row(name, str(len(infos)), human_bytes(size), PathCell(source.name))
    return table


def _work_table(planned: Plan) -> Table:
    """The keys by how much work they need."""
    table = make_table("keys", "stages", "passes over the data", "whole tensors, at most")
    amounts = {program: _amount_of_work(program) for program in {key.program for key in planned.keys}}
    whole_bytes: dict[tuple[int, int], list[int]] = {}
    for key in planned.keys:
        whole_bytes.setdefault(amounts[key.program], []).append(planned.whole_bytes_of(key))
    for (stages, passes), sizes in whole_bytes.items():
        largest = human_bytes(max(sizes)) if any(sizes) else "-"
        table.add_row(str(len(sizes)), str(stages), str(passes), largest)
    return table


def _value_tables(planned: Plan) -> Iterator[Table]:
    """A table of values by block for every hyperparameter that has several values."""
    for name, values in planned.effective_values().items():
        table = make_table("block", name, "keys", "component")
        for value in values:
            numbers = " ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in value.values)
            table.add_row(value.block, numbers, str(value.keys), value.component)
        yield table


def make_table(*headings: str) -> Table:
    """An empty table in our style."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def print_table(table: Table) -> None:
    """Print a table; where standard output is not a terminal, with no path shortened or folded."""
    if not stdout.is_terminal:
        natural = Measurement.get(stdout, stdout.options.update(max_width=_UNLIMITED), table).maximum
        table.width = natural if natural > stdout.width else None
    stdout.print(table, crop=False, no_wrap=True)


class PathCell:
    """A path in a table, shortened in its middle to the width of its column."""

    def __init__(self, path: object) -> None:
        self._path = str(path)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(shortened_path(self._path, options.max_width), overflow="fold", no_wrap=False)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(len(self._path), options.max_width), len(self._path))


def shortened_path(path: str, width: int) -> str:
    """A path with its middle left out where it is longer than `width`; the file's name stays whole.

    >>> shortened_path("/data/models/of/last/year/base.safetensors", 30)
    '/data/mod…ear/base.safetensors'
    >>> shortened_path("/data/models/of/last/year/base.safetensors", 10)
    '…/base.safetensors'
    """
    if len(path) <= width:
        return path
    tail = max(width - 1 - (width - 1) // 3, len(Path(path).name) + 1)
    head = max(width - 1 - tail, 0)
    return f"{path[:head]}…{path[-tail:]}" if head + tail + 1 < len(path) else path


def print_json(value: Any) -> None:
    """Print data for other programs to standard output; NaN and infinities, which JSON lacks, become null."""
    data = json_ready(value, lambda number: None)
    sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _amount_of_work(program: Program | None) -> tuple[int, int]:
    """The number of stages and of passes over the data; a copied key takes one pass."""
    return (len(program.stages), sum(len(stage.passes) for stage in program.stages)) if program else (0, 1)
