"""A sweep around its points: its folder's state, and the summary when the last point has run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.markup import escape

from mecha_exp.app.display import out
from mecha_exp.app.record import FAILED, FINISHED, Record, load_all, write_json
from mecha_exp.app.report import CSV_FILE, MAIN_FILE, REPORT_FILE, Results, terminal_table, write_all
from mecha_exp.errors import ConfigError, TrackingError
from mecha_exp.tracking import Store

SWEEP_FILE = "sweep.json"


@dataclass(frozen=True)
class Tracking:
    """Where runs are logged: nowhere, if `uri` is None."""

    uri: str | None
    experiment: str


@dataclass
class Sweep:
    """What the points of a sweep share; `sweep.json` in its folder, where other processes find it.

    Attributes:
        title: what it is called.
        swept: the configuration keys that differ between the points.
        command: what was typed.
        points: how many there should be.
        parent_run: the id of its MLflow run, if it is tracked.
        tracking_error: why it is not, if it should be.
    """

    title: str
    swept: list[str]
    command: list[str]
    points: int
    parent_run: str | None = None
    tracking_error: str | None = None

    def save(self, folder: Path) -> None:
        """Write `sweep.json`."""
        write_json(folder / SWEEP_FILE, asdict(self))

    @classmethod
    def load(cls, folder: Path) -> Sweep:
        """What `save` wrote.

        Raises:
            ConfigError: the folder holds no sweep.
        """
        try:
            return cls(**json.loads((folder / SWEEP_FILE).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{folder} holds no sweep: {error}.") from None

    def results(self, folder: Path) -> Results:
        """The points so far; one that left no record has failed."""
        records = load_all(folder)
        lost = [n for n in range(self.points) if folder / str(n) not in records]
        missing = [_lost(n) for n in lost][: max(self.points - len(records), 0)]
        return Results(self.title, self.swept, [*records.values(), *missing])


def begin(sweep: Sweep, folder: Path, tracking: Tracking) -> None:
    """Write down a sweep that is about to run, and open its MLflow run."""
    if tracking.uri:
        try:
            store = Store(tracking.uri, tracking.experiment)
            sweep.parent_run = store.start(sweep.title, {"command": shlex.join(sweep.command)})
        except TrackingError as error:
            sweep.tracking_error = str(error)
    sweep.save(folder)


def finish(sweep: Sweep, folder: Path, tracking: Tracking) -> bool:
    """Show the table; write the figure and `sweep.csv`; also when points failed.

    Returns:
        whether every point finished.

    Raises:
        TrackingError: the sweep's MLflow run could not be opened or closed.
    """
    results = sweep.results(folder)
    written = write_all(results, sweep.command, folder)
    out.print(terminal_table(results, out.width))
    failed = [r for r in results.records if r.status == FAILED]
    if failed:
        out.print(f"[red]{len(failed)} of {sweep.points} points failed[/]")
        for record in failed:
            out.print(f"  {escape(record.name)}: {escape(_last_line(record.error))}", soft_wrap=True)
    out.print(f"every metric  {folder / CSV_FILE}", soft_wrap=True)
    if folder / MAIN_FILE in written:
        out.print(f"the figure    {folder / MAIN_FILE}", soft_wrap=True)
    out.print(f"the report    {folder / REPORT_FILE}", soft_wrap=True)
    if sweep.tracking_error:
        raise TrackingError(sweep.tracking_error)
    if sweep.parent_run:
        close_run(sweep, results, written, Store(str(tracking.uri), tracking.experiment))
    return not failed


def close_run(sweep: Sweep, results: Results, files: Sequence[Path], store: Store) -> None:
    """Give the sweep's MLflow run its best point and the files that say what came out."""
    best = results.best
    metrics = {f"best/{best.metric}": best.metrics[str(best.metric)]} if best else {}
    tags = {"best": best.name} if best else {}
    status = FAILED if any(r.status == FAILED for r in results.records) else FINISHED
    store.finish(str(sweep.parent_run), status, metrics, tags, files)


def _last_line(text: str | None) -> str:
    """Of a traceback what went wrong; of a message all that is on its first line."""
    lines = (text or "").strip().splitlines() or [""]
    return lines[-1] if lines[0].startswith("Traceback") else lines[0]


def _lost(number: int) -> Record:
    return Record(f"point {number}", FAILED, "it left no record: see the messages above")
