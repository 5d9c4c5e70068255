"""The Hydra application: checks a command line, runs its points, shows the summary."""

from __future__ import annotations

import shlex
from contextlib import nullcontext
from pathlib import Path

from mecha_exp.app import command_line
from mecha_exp.app.adaptive.points import AdaptiveSweep
from mecha_exp.app.checks.race import check_race
from mecha_exp.app.checks.unused_settings import idle_experts
from mecha_exp.app.command_line import CommandLine
from mecha_exp.app.config.compose import multirun_config
from mecha_exp.app.config.jobs import Batch, enter
from mecha_exp.app.launchers.loop import run_alone, run_batches, run_by_sweeper
from mecha_exp.app.point import Point
from mecha_exp.app.preparation import prepare_job
from mecha_exp.app.recipes.templates import notes_of
from mecha_exp.app.search.search import Search
from mecha_exp.app.search.settings import checked_reference, search_of
from mecha_exp.app.sweep import summary
from mecha_exp.app.sweep.folder import claimed_folder
from mecha_exp.app.sweep.fresh import NewReplicates
from mecha_exp.app.sweep.holdout import report_chosen
from mecha_exp.app.sweep.plan import plan_sweep, show_sweep_plan
from mecha_exp.app.sweep.replicates import DATA, replicate_kinds
from mecha_exp.app.tracking import how_to_log_later
from mecha_exp.app.words.quotes import quoted
from mecha_exp.app.workbench import Workbench, workbench
from mecha_exp.checkpoint import can_resume, check_writable, find_partial_outputs
from mecha_exp.checkpoint.remote.address import address_in
from mecha_exp.engine import plan
from mecha_exp.errors import ConfigError, MechaError, Problems, TrackingError, counted
from mecha_exp.evaluation import Scoring
from mecha_exp.plugins import load_plugins
from mecha_exp.report import Results, terminal_table
from mecha_exp.report.figures.contact_sheet import checked_sheet
from mecha_exp.runs.record import FAILED, Record
from mecha_exp.runs.sweep import Sweep, Tracking
from mecha_exp.system.folders import make_new_folder
from mecha_exp.system.progress import merge_summary
from mecha_exp.terminal.console import print_line, show_error, stdout
from mecha_exp.terminal.plan import show_plan
from mecha_exp.tracking.database import absolute_uri
from mecha_exp.tracking.names import experiment

_MAX_NAMED = 3  # recipes in the title of a sweep


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
        print_line(
            f" adapter  {point.adapter.path.name}, of rank {point.adapter.rank} at most, made of that output"
        )
    return 0


def _show_plan_of_sweep(line: CommandLine) -> int:
    _say_what_is_left_out(line)
    if line.searched:
        stdout.print("A search chooses its points while it runs. A few of its space stand for them here.")
    if line.adaptive:
        stdout.print("The sweep makes more points while it runs. One stands for them here.")
    planned = plan_sweep(line.points, workbench(line.config.store, line.config.rerun))
    show_sweep_plan(planned, line.swept)
    return 1 if planned.failing else 0


def _require_one_good_point(line: CommandLine, bench: Workbench, folder: Path) -> tuple[Point, Scoring]:
    """Plan points until one is sound; if none is, fail before anything is written.

    Returns:
        that point, and what measures it.
    """
    problems = Problems()
    for config in line.points:
        try:
            enter(config)
            point = prepare_job(config, folder)
            with plan([point.job(point.output or {})], point.options) as planned:
                scoring = bench.scoring(point, planned)
        except MechaError as error:
            problems.add(error)
        else:
            check_writable(folder / "run.json", 0)
            tracking = Tracking.of(line.config.tracking)
            if tracking.uri:
                experiment(tracking.experiment)
                absolute_uri(tracking.uri)
            return point, scoring
    problems.raise_as(ConfigError)
    raise ConfigError("the sweep has no points.")


def _check_evaluations(line: CommandLine, scoring: Scoring) -> None:
    """Check that all points of a sweep are measured alike, and by the split that they are chosen by.

    Raises:
        ConfigError: an evaluator's setting is swept, a split is asked for, or data are replicates of nothing.
    """
    swept = [key for key in line.swept if key == "evaluator" or key.startswith("evaluator.")]
    if swept:
        raise ConfigError(
            f"{swept[0]} is swept, and a table holds the numbers of one evaluation. List the others in "
            "evaluator.also, with names (`as`), or start a sweep for each value."
        )
    if DATA in replicate_kinds(line.config) and not scoring.evaluations:
        raise ConfigError(
            "sweep.replicate has data, and no evaluator measures the points: choose one that returns an "
            "outcome for each example with evaluator=..., or leave data out."
        )
    split = line.config.evaluator.get("split")
    if split is not None and scoring.report_split is not None and split != scoring.selection_split:
        raise ConfigError(
            f"evaluator.split={split}: a sweep is chosen on {scoring.selection_split}, and the chosen points "
            f"are then measured on {scoring.report_split} by themselves. Leave it out."
        )


def _folder(line: CommandLine, mode: str) -> Path:
    """The folder of a run or a sweep.

    Raises:
        ConfigError: it lies elsewhere.
    """
    folder = str(line.config.hydra[mode].dir)
    if address_in(folder):
        raise ConfigError(
            f"hydra.{mode}.dir={folder}: runs and sweeps keep their folders on a disk. Machines share "
            "results with store=s3://bucket/path, and a merged model goes to a bucket with python -m "
            "mecha_exp merge RECIPE.mecha -o s3://bucket/path"
        )
    return Path(folder)


def _run_one(line: CommandLine, bench: Workbench) -> int:
    folder = _folder(line, "run")
    point, scoring = _require_one_good_point(line, bench, folder)
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
    return f"What is done is kept. Go on with: {command_line.program_name()} {shlex.join(words)}".rstrip()


def _prepare_sweep(line: CommandLine, bench: Workbench) -> tuple[Sweep, AdaptiveSweep | None]:
    """The data of a sweep, after all checks, and what makes its points where they are not listed.

    Raises:
        MechaError: no point is sound, or the sweep cannot be measured or searched as asked.
    """
    title, command = line.config.name or _title(line), ["python", "-m", "mecha_exp", *line.typed]
    sweep = Sweep(title, line.swept, command, 0, mode=line.config.sweep.mode, notes=[*line.notes])
    if line.searched is not None:
        sweep.logarithmic = [d.key for d in line.searched.space.dimensions if d.logarithmic]
    point, scoring = _require_one_good_point(line, bench, _folder(line, "sweep"))
    _check_evaluations(line, scoring)
    check_race(line, scoring)
    sweep.notes += notes_of(point.config, point.options.model_dirs)
    _new_replicates(line).check(scoring)
    adaptive = _adaptive(line, point, scoring, title, bench)
    sweep.notes += adaptive.notes if adaptive else ()
    sweep.reference = checked_reference(line.config.sweep.get("reference"), scoring)
    sweep.sheet = checked_sheet(line.config.evaluator.get("sheet"), line.swept)
    sweep.points = adaptive.trials if adaptive else len(line.jobs) if line.lists_points else 0
    return sweep, adaptive


def _new_replicates(line: CommandLine) -> NewReplicates:
    """The seeds, or sets of experts, with which the chosen setting is measured again."""
    return NewReplicates(line.config.sweep.get("fresh"), line.config, line.jobs, line.points, line.composer)


def _run_sweep(line: CommandLine, bench: Workbench) -> int:
    sweep, adaptive = _prepare_sweep(line, bench)
    tracking = Tracking.of(line.config.tracking)
    _say_what_is_left_out(line)
    at_work = adaptive.at_work() if isinstance(adaptive, Search) else nullcontext()
    with claimed_folder(line, bench) as folder, at_work:
        if adaptive:
            adaptive.check_folder(folder)
        goes_on = summary.begin(sweep, folder, tracking)
        all_finished, reported, trouble, interrupted = False, False, None, False
        try:
            batches = adaptive.batches(folder) if adaptive else [Batch(line.jobs)]
            config = multirun_config(line.composer, line.settings_in(folder), line.overrides)
            if line.lists_points:
                run_batches(line.composer, config, batches)
            else:
                run_by_sweeper(config)
            if goes_on:
                summary.mend(sweep, folder, tracking)
            is_part = line.config.sweep.get("share") is not None or _lacks_points(sweep, folder, adaptive)
            reported = is_part or report_chosen(sweep, folder, bench, tracking)  # the whole sweep chooses
            reported = reported and (is_part or _new_replicates(line).measure(sweep, folder, bench))
        except KeyboardInterrupt:
            interrupted = True
        finally:
            bench.measurements.end()
            bench.flush()
            try:
                all_finished = summary.finish(sweep, folder, tracking, ended=not interrupted) and reported
            except TrackingError as error:
                trouble = str(error)
    if interrupted:
        return _interrupted("What is done is kept. The same command goes on.")
    return _tracking_status(trouble, folder, line) or (0 if all_finished else 1)


def _adaptive(
    line: CommandLine, point: Point, scoring: Scoring, title: str, bench: Workbench
) -> AdaptiveSweep | None:
    """The search or the adaptive sweep that is asked for; None for a sweep that lists its points."""
    if line.searched is not None:
        return search_of(
            line.searched.space, line.config, point, scoring, line.job, line.jobs_of, title, bench
        )
    if line.adaptive is not None:
        from mecha_exp.app.adaptive.request import Request
        from mecha_exp.app.adaptive.sweeps import adaptive_sweep

        return adaptive_sweep(Request(line.config, point, scoring, line.adaptive, line.job))
    return None


def _lacks_points(sweep: Sweep, folder: Path, adaptive: AdaptiveSweep | None) -> bool:
    """Whether a folder has a part of a shared search, which a note of the sweep says then.

    Of a search it notes, too, which trials were drawn at random, and with which ones it began.
    """
    if not isinstance(adaptive, Search):
        return False
    lacking = adaptive.collect(folder)
    sweep.points = Sweep.load(folder).points  # with those that were known
    adaptive.note_origins(sweep, folder)
    if lacking is None:
        return False
    sweep.points = 0  # whatever is there is all
    sweep.notes.append(lacking)
    return True


def _title(line: CommandLine) -> str:
    """The title of a sweep without a name: its recipes and its varied keys."""
    recipes = list(dict.fromkeys(str(c.hydra.runtime.choices.recipe) for c in line.points.choices))
    named = ", ".join(recipes) if len(recipes) <= _MAX_NAMED else f"{len(recipes)} recipes"
    others = [key for key in line.swept if key != "recipe"]
    return f"{named} by {', '.join(others)}" if others else named


def _say_what_is_left_out(line: CommandLine) -> None:
    for config in line.points.first_of_each:
        if idle := idle_experts(config):
            recipe = config.hydra.runtime.choices.recipe
            print_line(f"models.experts: {recipe} runs without {', '.join(idle)}")
    for key, recipes in line.left_out.items():
        print_line(f"{key}: not of {', '.join(recipes)}, which run without it")
    for note in line.notes:
        print_line(note)


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
