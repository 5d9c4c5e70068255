"""The sweep: checks its points, has them run in batches, measures what was chosen, concludes.

The command line and `mecha_exp.sweep` run the same one.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from mecha_exp.app.adaptive.points import AdaptiveSweep
from mecha_exp.app.checks.race import check_race
from mecha_exp.app.checks.unused_settings import base_of_demo, idle_experts, is_base_idle
from mecha_exp.app.command_line import CommandLine
from mecha_exp.app.config.compose import multirun_config
from mecha_exp.app.config.jobs import Batch, enter
from mecha_exp.app.launchers.batches import run_batches, run_by_sweeper
from mecha_exp.app.point import Point
from mecha_exp.app.preparation import prepare_job
from mecha_exp.app.recipes.templates import notes_of
from mecha_exp.app.search.search import Search
from mecha_exp.app.search.settings import checked_reference, search_of
from mecha_exp.app.sweep import summary
from mecha_exp.app.sweep.folder import claimed_folder
from mecha_exp.app.sweep.fresh import NewReplicates
from mecha_exp.app.sweep.holdout import report_chosen
from mecha_exp.app.sweep.replicates import DATA, replicate_kinds
from mecha_exp.app.workbench import Workbench
from mecha_exp.checkpoint import check_writable
from mecha_exp.checkpoint.remote.address import address_in
from mecha_exp.engine import plan
from mecha_exp.errors import ConfigError, MechaError, Problems, TrackingError
from mecha_exp.evaluation import Scoring
from mecha_exp.report.figures.contact_sheet import checked_sheet
from mecha_exp.runs.sweep import Sweep, Tracking
from mecha_exp.terminal.console import print_line
from mecha_exp.tracking.database import absolute_uri
from mecha_exp.tracking.names import experiment

_MAX_NAMED = 3  # recipes in the title of a sweep


@dataclass
class Ended:
    """How a sweep ended.

    Attributes:
        folder: of the sweep.
        finished: whether every point finished and what was chosen is measured.
        interrupted: whether Ctrl-C ended it.
        trouble: what went wrong with its MLflow run; None for nothing.
    """

    folder: Path
    finished: bool = False
    interrupted: bool = False
    trouble: str | None = None


def run_sweep(line: CommandLine, bench: Workbench) -> Ended:
    """Run the points of a sweep, conclude, and show the table.

    Raises:
        MechaError: what is wrong before any work.
    """
    sweep, adaptive = _prepare_sweep(line, bench)
    tracking = Tracking.of(line.config.tracking)
    say_what_is_left_out(line)
    at_work = adaptive.at_work() if isinstance(adaptive, Search) else nullcontext()
    with claimed_folder(line, bench) as folder, at_work:
        if adaptive:
            adaptive.check_folder(folder)
        goes_on = summary.begin(sweep, folder, tracking)
        ended = Ended(folder)
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
            ended.finished = reported and (is_part or _new_replicates(line).measure(sweep, folder, bench))
        except KeyboardInterrupt:
            ended.interrupted = True
        finally:
            bench.measurements.end()
            bench.flush()
            try:
                all_finished = summary.finish(sweep, folder, tracking, ended=not ended.interrupted)
                ended.finished = ended.finished and all_finished
            except TrackingError as error:
                ended.finished, ended.trouble = False, str(error)
    return ended


def require_one_good_point(line: CommandLine, bench: Workbench, folder: Path) -> tuple[Point, Scoring]:
    """Plan points until one is sound; if none is, fail before anything is written.

    Returns:
        that point, and what measures it.
    """
    problems = Problems()
    for config in line.points:
        good = None
        with problems.collected(MechaError):
            enter(config)
            point = prepare_job(config, folder)
            with plan([point.job(point.output or {})], point.options) as planned:
                good = point, bench.scoring(point, planned)
        if good:
            check_writable(folder / "run.json", 0)
            tracking = Tracking.of(line.config.tracking)
            if tracking.uri:
                experiment(tracking.experiment)
                absolute_uri(tracking.uri)
            return good
        if (base := base_of_demo(config)) is not None:
            problems.add(
                f"models.base is still the demo's, {base}. Name the model that the experts were fine-tuned "
                "from: models.base=PATH"
            )
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


def folder_of(line: CommandLine, mode: str) -> Path:
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


def _prepare_sweep(line: CommandLine, bench: Workbench) -> tuple[Sweep, AdaptiveSweep | None]:
    """The data of a sweep, after all checks, and what makes its points where they are not listed.

    Raises:
        MechaError: no point is sound, or the sweep cannot be measured or searched as asked.
    """
    title, command = line.config.name or _title(line), ["python", "-m", "mecha_exp", *line.typed]
    sweep = Sweep(title, line.swept, command, 0, mode=line.config.sweep.mode, notes=[*line.notes])
    if line.searched is not None:
        sweep.logarithmic = [d.key for d in line.searched.space.dimensions if d.logarithmic]
    point, scoring = require_one_good_point(line, bench, folder_of(line, "sweep"))
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


def say_what_is_left_out(line: CommandLine) -> None:
    for config in line.points.first_of_each:
        if idle := idle_experts(config):
            recipe = config.hydra.runtime.choices.recipe
            print_line(f"models.experts: {recipe} runs without {', '.join(idle)}")
    firsts = {id(point.base): point for point in reversed(line.points.points)}
    if idle := [str(p.base.hydra.runtime.choices.recipe) for p in firsts.values() if is_base_idle(p)]:
        merge = "merges" if len(idle) == 1 else "merge"
        print_line(f"models.base: not of {', '.join(reversed(idle))}, which {merge} the experts alone")
    for key, recipes in line.left_out.items():
        print_line(f"{key}: not of {', '.join(recipes)}, which run without it")
    for note in line.notes:
        print_line(note)
