"""Begins a sweep in its folder, and writes its summary when the last point has run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from rich.markup import escape

from mecha_exp.app.outputs.cards import note_results
from mecha_exp.app.tracking import EndedRun, close_run, log_runs, mend
from mecha_exp.errors import ConfigError, TrackingError
from mecha_exp.report import (
    CSV_FILE,
    MAIN_FILE,
    REPORT_FILE,
    VERDICT_FILE,
    Results,
    terminal_tables,
    write_all,
)
from mecha_exp.report.adaptive import FILES as ADAPTIVE_FILES
from mecha_exp.report.factors import factor_notes
from mecha_exp.report.search.notes import search_notes
from mecha_exp.report.shapley import shapley_notes
from mecha_exp.report.verdict import concluded_results, conclusion
from mecha_exp.runs.outcomes import OUTCOMES_FILE, collect_outcomes
from mecha_exp.runs.record import FAILED, FINISHED, Record
from mecha_exp.runs.sweep import FOLDER_TAG, Sweep, Tracking, finished_points
from mecha_exp.terminal import printable, show_error, stdout
from mecha_exp.tracking import Store


def begin(sweep: Sweep, folder: Path, tracking: Tracking) -> None:
    """Write the state of a sweep before it runs and open its MLflow run, or continue an earlier start."""
    before = Sweep.find(folder)
    sweep.tracked_in = tracking.place
    is_known = before is not None and before.tracked_in == sweep.tracked_in and not tracking.is_gone
    if before and before.complete and before.points == sweep.points and is_known:
        sweep.parent_run, sweep.input_runs, sweep.complete = before.parent_run, before.input_runs, True
    elif tracking.uri:
        try:
            store = Store(tracking.uri, tracking.experiment)
            if before:
                sweep.parent_run, sweep.input_runs = before.parent_run, before.input_runs
            mend(sweep, folder, store)
            if sweep.parent_run is None:
                tags = {"command": shlex.join(sweep.command), FOLDER_TAG: str(folder.absolute())}
                sweep.parent_run = store.start(sweep.title, tags)
        except TrackingError as error:
            sweep.tracking_error = str(error)
    sweep.save(folder)


def reopen(sweep: Sweep, folder: Path) -> None:
    """Mark a sweep as incomplete while one of its points runs again."""
    if sweep.complete:
        sweep.complete = False
        sweep.save(folder)


def finish(sweep: Sweep, folder: Path, tracking: Tracking) -> bool:
    """Show the table, and write it with the figures and the report; also when points failed.

    Returns:
        whether every point finished, and no outcomes of theirs are damaged.

    Raises:
        TrackingError: the sweep's MLflow run could not be opened or closed.
    """
    sweep.complete = Sweep.load(folder).complete  # no more where a point ran again; see `reopen`
    is_collected = _collect(sweep, folder)
    results = concluded_results(sweep, folder, ended=True)
    if sweep.complete and _is_as_before(results, folder):
        stdout.print(*terminal_tables(results, stdout.width), sep="\n")
        if results.protocol:
            stdout.print(results.protocol, markup=False, soft_wrap=True)
        stdout.print(f"nothing to do: every point is in {folder}", soft_wrap=True)
        return True
    return _summarise(sweep, folder, tracking, results) and is_collected


def _collect(sweep: Sweep, folder: Path) -> bool:
    """Write the outcomes of all points into one file; returns whether none of theirs is damaged."""
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
    stdout.print(*terminal_tables(results, stdout.width), sep="\n")
    if results.protocol:
        stdout.print(results.protocol, markup=False, soft_wrap=True)
    written = write_all(results, sweep.command, folder)
    written += [path for path in map(folder.joinpath, ADAPTIVE_FILES) if path.is_file()]
    if (folder / OUTCOMES_FILE).is_file():
        written.append(folder / OUTCOMES_FILE)
    records = sweep.records(folder)
    failed = [r for r in results.records if r.status == FAILED]
    if failed:
        stdout.print(f"[red]{len(failed)} of {len(results.records)} points failed[/]")
        for record in failed:
            reason = printable(_last_line(record.error))
            stdout.print(f"  {escape(record.name)}: {escape(reason)}", soft_wrap=True)
    for path, record in records.items():
        if record.model and Path(record.model).is_relative_to(path.absolute()):
            note_results(record, conclusion(results))
    for note in [*factor_notes(results), *shapley_notes(results), *search_notes(results), *results.notes]:
        stdout.print(note, markup=False, soft_wrap=True)
    stdout.print(f"every metric  {folder / CSV_FILE}", soft_wrap=True)
    if folder / VERDICT_FILE in written:
        stdout.print(f"the verdict   {folder / VERDICT_FILE}", soft_wrap=True)
    if folder / MAIN_FILE in written:
        stdout.print(f"the figure    {folder / MAIN_FILE}", soft_wrap=True)
    stdout.print(f"the report    {folder / REPORT_FILE}", soft_wrap=True)
    if sweep.tracking_error:
        raise TrackingError(sweep.tracking_error)
    if sweep.parent_run:
        store = Store(str(tracking.uri), tracking.experiment)
        _log_the_rest(sweep, records, store)
        close_run(sweep, results, written, store)
    sweep.complete = not failed
    sweep.save(folder)
    return not failed


def _log_the_rest(sweep: Sweep, records: Mapping[Path, Record], store: Store) -> None:
    """Track the points that are not in this store: they were there before, or it did not answer then."""
    missing = {path: record for path, record in records.items() if record.run_id is None}
    log_runs([EndedRun(path, record, sweep.parent_run) for path, record in missing.items()], store)


def _last_line(text: str | None) -> str:
    """The last line of a traceback, or the first line of another message."""
    lines = (text or "").strip().splitlines() or [""]
    return lines[-1] if lines[0].startswith("Traceback") else lines[0]
