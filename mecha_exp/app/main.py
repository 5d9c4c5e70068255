"""The Hydra application: checks a command line, runs its points, shows the summary."""

from __future__ import annotations

import shlex
from pathlib import Path

from mecha_exp.app import command_line
from mecha_exp.app.checks.race import check_race
from mecha_exp.app.command_line import CommandLine
from mecha_exp.app.launchers.batches import run_alone
from mecha_exp.app.loop import folder_of, require_one_good_point, run_sweep, say_what_is_left_out
from mecha_exp.app.preparation import prepare_job
from mecha_exp.app.recipes.templates import notes_of
from mecha_exp.app.sweep.plan import plan_sweep, show_sweep_plan
from mecha_exp.app.tracking import how_to_log_later
from mecha_exp.app.words.quotes import quoted
from mecha_exp.app.workbench import Workbench, workbench
from mecha_exp.checkpoint import can_resume, find_partial_outputs
from mecha_exp.engine import plan
from mecha_exp.errors import counted
from mecha_exp.plugins import load_plugins
from mecha_exp.report import Results, terminal_table
from mecha_exp.runs.record import FAILED, Record
from mecha_exp.runs.sweep import Tracking
from mecha_exp.system.folders import make_new_folder
from mecha_exp.system.progress import merge_summary
from mecha_exp.terminal.console import print_line, program_name, show_error, stdout
from mecha_exp.terminal.plan import show_plan


def main(arguments: list[str]) -> int:
    """Run a command line that is ordered for Hydra; returns the exit status.

    Raises:
        MechaError: what is wrong before any work.
    """
    with command_line.checked(arguments) as line:
        return _run(line)


def _run(line: CommandLine) -> int:
    load_plugins(line.config.get("plugins") or ())
    if line.config.get("debug") and line.config.debug.get("plan"):
        return _show_plan(line)
    bench = workbench(line.config.store, line.config.rerun)
    bench.begin()
    return _run_sweep(line, bench) if line.is_sweep else _run_one(line, bench)


def _show_plan(line: CommandLine) -> int:
    if line.is_sweep:
        return _show_plan_of_sweep(line)
    point = prepare_job(line.config, Path("outputs/runs/<time>"))
    with plan([point.job(point.output or {})], point.options) as planned:
        point.read_scoring(planned)  # checks it
        show_plan(planned, list(point.names.values()), point.hyperparameters)
    if point.adapter:
        print_line(f" {point.adapter.summary}, made of that output")
    return 0


def _show_plan_of_sweep(line: CommandLine) -> int:
    say_what_is_left_out(line)
    if line.searched:
        stdout.print("A search chooses its points while it runs. A few of its space stand for them here.")
    if line.adaptive:
        stdout.print("The sweep makes more points while it runs. One stands for them here.")
    planned = plan_sweep(line.points, workbench(line.config.store, line.config.rerun))
    show_sweep_plan(planned, line.swept)
    return 1 if planned.failing else 0


def _run_one(line: CommandLine, bench: Workbench) -> int:
    folder = folder_of(line, "run")
    point, scoring = require_one_good_point(line, bench, folder)
    for note in notes_of(point.config, point.options.model_dirs):
        print_line(note)
    check_race(line, scoring)
    if not any(word.startswith("hydra.run.dir=") for word in line.overrides):
        folder = make_new_folder(folder)
    try:
        jobs = line.composer.jobs(line.settings_in(folder), line.jobs, 0, like=line.config)
        run_alone(jobs[0])
    except KeyboardInterrupt:
        return _interrupted(_how_to_go_on(line, folder))
    record = Record.load(folder)
    if record.status == FAILED:
        return 1
    _show_result(record, folder)
    return _tracking_status(record.tracking_error, folder, line)


def _run_sweep(line: CommandLine, bench: Workbench) -> int:
    ended = run_sweep(line, bench)
    if ended.interrupted:
        return _interrupted("What is done is kept. The same command goes on.")
    return _tracking_status(ended.trouble, ended.folder, line) or (0 if ended.finished else 1)


def _interrupted(what_now: str) -> int:
    show_error(f"interrupted. {what_now}")
    return 130


def _how_to_go_on(line: CommandLine, folder: Path) -> str:
    """The hint after an interrupt: what is kept, and the command that resumes it."""
    output = line.config.output
    named = {str(output.path)} if output.save and output.path else set()
    if not any(map(can_resume, named | {leftover.target for leftover in find_partial_outputs([folder])})):
        return "The same command starts again."
    words = [word for word in line.arguments if not word.startswith("hydra.run.dir=")]
    if not named:
        words.append(f"hydra.run.dir={quoted(str(folder))}")
    return f"What is done is kept. Go on with: {program_name()} {shlex.join(words)}".rstrip()


def _tracking_status(trouble: str | None, folder: Path, line: CommandLine) -> int:
    if trouble:
        show_error(f"{trouble} {how_to_log_later(folder)}")
        return 1
    if Tracking.of(line.config.tracking).uri:
        stdout.print("the dashboard python -m mecha_exp ui")
    return 0


def _show_result(record: Record, folder: Path) -> None:
    stdout.print(terminal_table(Results(record.name, [], [record]), stdout.width))
    m = record.metrics
    if record.found:
        where = f", the model is {record.model}" if record.model else ""
        print_line(f"known already: nothing was merged{where}")
        print_line(f"the run       {folder}")
        return
    if resumed := m["io/resumed_keys"]:
        stdout.print(f"resumed: {resumed:.0f} of {counted(int(m['io/keys']), 'key')} were already done")
    took = m["time/merge_seconds"], m["io/bytes_read"], m["io/bytes_written"], m["memory/peak_bytes"]
    print_line(f"merged in {merge_summary(*took)}")
    print_line(f"the run       {folder}")
