"""Progress bars of merges, measurements and files that are hashed."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from rich.markup import escape
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

from mecha_exp.engine import Plan
from mecha_exp.lab.content_hash import unread_bytes
from mecha_exp.system.progress import LOG_SECONDS, SHOWN, LoggedProgress
from mecha_exp.terminal.console import stderr
from mecha_exp.terminal.pace import spoken_time

log = logging.getLogger(__package__)
QUICKLY_READ = 100_000_000
"""Fewer bytes than this are hashed without a progress bar."""
QUICKLY_MEASURED = 1.0
"""Seconds of a measurement that shows no progress."""


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
