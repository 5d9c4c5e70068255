"""Begins a sweep in its folder, and writes its summary when the last point has run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from mecha_exp.app.outputs.cards import note_results
from mecha_exp.app.tracking import close_run, log_missing, mend_parent, mend_points
from mecha_exp.errors import ConfigError, TrackingError, counted
from mecha_exp.report import (
    CSV_FILE,
    MAIN_FILE,
    REPORT_FILE,
    VERDICT_FILE,
    Results,
    terminal_tables,
    write_all,
)
from mecha_exp.report.adaptive_records import FILES as ADAPTIVE_FILES
from mecha_exp.report.conclusion import concluded_results
from mecha_exp.report.table import notes_of
from mecha_exp.report.verdict import conclusion
from mecha_exp.runs.outcomes import OUTCOMES_FILE, collect_outcomes
from mecha_exp.runs.record import FAILED, FINISHED, Record
from mecha_exp.runs.sweep import FOLDER_TAG, Sweep, Tracking, finished_points
from mecha_exp.terminal.console import print_line, printable, show_error, stdout
from mecha_exp.tracking import Store

_SHOWN = {
    "every metric": CSV_FILE,
    "the verdict": VERDICT_FILE,
    "the figure": MAIN_FILE,
    "the report": REPORT_FILE,
}
"""The files of a sweep that its summary names."""
_MOST_NAMED = 4
"""How many points that failed alike are named."""


def begin(sweep: Sweep, folder: Path, tracking: Tracking) -> bool:
    """Write the state of a sweep before it runs and open its MLflow run, or continue an earlier start.

    Returns:
        whether an earlier start may have left runs of points that are to be mended; see `mend`.
    """
    before = Sweep.find(folder)
    sweep.tracked_in = tracking.place
    goes_on = False
    is_known = before is not None and before.tracked_in == sweep.tracked_in and not tracking.is_gone
    is_alike = before is not None and (before.points, before.sheet) == (sweep.points, sweep.sheet)
    if before and before.complete and is_alike and is_known:
        sweep.parent_run, sweep.input_runs, sweep.complete = before.parent_run, before.input_runs, True
    elif tracking.uri:
        try:
            store = Store(tracking.uri, tracking.experiment)
            if before:
                sweep.parent_run, sweep.input_runs = before.parent_run, before.input_runs
            mend_parent(sweep, folder, store)
            goes_on = before is not None and sweep.parent_run is not None
            if sweep.parent_run is None:
                mend_points(sweep, folder, store)  # the store has none of them
                tags = {"command": shlex.join(sweep.command), FOLDER_TAG: str(folder.absolute())}
                sweep.parent_run = store.start(sweep.title, tags)
        except TrackingError as error:
            sweep.tracking_error = str(error)
    sweep.underway = not sweep.complete
    sweep.save(folder)
    return goes_on


def mend(sweep: Sweep, folder: Path, tracking: Tracking) -> None:
    """Bring the runs of a sweep that went on in line with its points: a kill may have come in between.

    It waits for the last point, since a server takes long to tell the runs of thousands of points.
    """
    try:
        mend_points(sweep, folder, Store(str(tracking.uri), tracking.experiment))
    except TrackingError as error:
        sweep.tracking_error = str(error)


def reopen(sweep: Sweep, folder: Path) -> None:
    """Mark a sweep as incomplete while one of its points runs again."""
    if sweep.complete:
        sweep.complete, sweep.underway = False, True
        sweep.save(folder)


def finish(sweep: Sweep, folder: Path, tracking: Tracking, *, ended: bool = True) -> bool:
    """Show the table, and write it with the figures and the report; also when points failed.

    Args:
        sweep: the data that its points share.
        folder: of the sweep.
        tracking: where it is logged.
        ended: whether every point has run, so that one without a record has failed.

    Returns:
        whether every point finished, and all their outcomes can be read.

    Raises:
        TrackingError: the sweep's MLflow run could not be opened or closed.
    """
    sweep.complete = Sweep.load(folder).complete  # not if a point ran again; see `reopen`
    sweep.underway = not ended
    is_collected = _collect(sweep, folder)
    results = concluded_results(sweep, folder, ended=ended)
    stdout.print(*terminal_tables(results, stdout.width), sep="\n")
    if results.protocol:
        print_line(results.protocol)
    if sweep.complete and _is_as_before(results, folder):
        print_line(f"nothing to do: every point is in {folder}")
        return True
    return _summarise(sweep, folder, tracking, results) and is_collected


def _collect(sweep: Sweep, folder: Path) -> bool:
    """Write the outcomes of all points into one file; returns whether all of them could be read."""
    if sweep.complete and (folder / CSV_FILE).is_file():
        return True
    try:
        collect_outcomes(finished_points(sweep.records(folder)), folder / OUTCOMES_FILE)
    except ConfigError as error:  # the table does not need them
        show_error(str(error))
        return False
    return True


def _is_as_before(results: Results, folder: Path) -> bool:
    """Whether no point was written after the table."""
    try:
        written = (folder / CSV_FILE).stat().st_mtime * 1000
    except OSError:
        return False
    return all(r.status == FINISHED and r.ended <= written for r in results.records)


def _summarise(sweep: Sweep, folder: Path, tracking: Tracking, results: Results) -> bool:
    """Write the results of a sweep, say where they are, and end its MLflow run; whether no point failed."""
    written = write_all(results, sweep.command, folder)
    written += filter(Path.is_file, map(folder.joinpath, (*ADAPTIVE_FILES, OUTCOMES_FILE)))
    records = sweep.records(folder)
    failed = [r for r in results.records if r.status == FAILED]
    if failed:
        stdout.print(f"[red]{len(failed)} of {counted(len(results.records), 'point')} failed[/]")
    for error, names in _by_error(failed).items():
        print_line(f"  {names}: {printable(error)}")
    for path, record in records.items():
        if record.model and Path(record.model).is_relative_to(path.absolute()):
            note_results(record, conclusion(results))
    for note in notes_of(results):
        print_line(note)
    if (number := results.numbers.get(id(results.best))) is not None:
        print_line(f"the best model {_model_of(results.best, folder / str(number))}")
    for title, name in _SHOWN.items():
        if folder / name in written:
            print_line(f"{title:<15}{folder / name}")
    if sweep.tracking_error:
        raise TrackingError(sweep.tracking_error)
    if sweep.parent_run:
        store = Store(str(tracking.uri), tracking.experiment)
        if not sweep.underway:  # else the same command logs them when it goes on
            log_missing(sweep, records, store)
        close_run(sweep, results, folder, written, store)
    sweep.complete = not failed and not sweep.underway
    sweep.save(folder)
    return sweep.complete


def _model_of(record: Record | None, folder: Path) -> str:
    """Where the model of a point lies, or the command that makes it."""
    if record is not None and record.model and Path(record.model).exists():
        return str(record.model)
    return f"python -m mecha_exp reproduce {shlex.quote(str(folder))} --output best"


def _by_error(failed: Sequence[Record]) -> dict[str, str]:
    """The names of the failed points by what went wrong, which is often the same for all of them."""
    by_error: dict[str, list[str]] = {}
    for record in failed:
        by_error.setdefault(_last_line(record.error), []).append(record.name)
    return {error: _named(names) for error, names in by_error.items()}


def _named(names: Sequence[str]) -> str:
    """Some names, or the first ones and how many others there are."""
    others = len(names) - _MOST_NAMED
    return ", ".join(names) if others <= 1 else f"{', '.join(names[:_MOST_NAMED])} and {others} others"


def _last_line(text: str | None) -> str:
    """The last line of a traceback, or the first line of another message."""
    lines = (text or "").strip().splitlines() or [""]
    return lines[-1] if lines[0].startswith("Traceback") else lines[0]
