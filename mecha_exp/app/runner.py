"""The Hydra application: checks a command line, runs its points, sums them up."""

from __future__ import annotations

import logging
import re
import shlex
import time
import traceback
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from mecha_exp.app import overrides
from mecha_exp.app import sweep as sweeps
from mecha_exp.app.display import human_bytes, out, progress_bar, show_error, show_plan, show_point
from mecha_exp.app.overrides import CommandLine
from mecha_exp.app.point import prepare, resolve, run
from mecha_exp.app.provenance import input_names
from mecha_exp.app.record import FAILED, Record
from mecha_exp.app.report import Results, terminal_table
from mecha_exp.app.sweep import Sweep, Tracking
from mecha_exp.app.track import how_to_log_later, log_folder
from mecha_exp.checkpoint import can_resume, check_writable, find_leftovers
from mecha_exp.errors import ConfigError, MechaError, Problems, TrackingError
from mecha_exp.plugins import load_plugins
from mecha_exp.tracking import Store

log = logging.getLogger(__name__)

_PLAIN = re.compile(r"[\w./\\:-]+")  # what Hydra reads as it is, without quotes


def main(arguments: list[str]) -> int:
    """Run a command line that is ordered for Hydra; returns the exit status.

    Raises:
        MechaError: what is wrong before any work.
    """
    line = overrides.check(arguments)
    load_plugins(line.config.get("plugins") or ())
    if line.config.get("debug") and line.config.debug.get("plan"):
        return _show_plan(line)
    folder = Path(line.config.hydra.sweep.dir if line.is_sweep else line.config.hydra.run.dir)
    _require_one_good_point(line, folder)
    tracking = Tracking(line.config.tracking.uri, line.config.tracking.experiment)
    try:
        return _run_sweep(line, folder, tracking) if line.is_sweep else _run_one(line, folder)
    except KeyboardInterrupt:
        show_error(f"interrupted. {_how_to_go_on(line, folder)}")
        return 130


def run_point(cfg: DictConfig) -> float | None:
    """One point, in the folder that Hydra made for it; returns its main metric.

    What is wrong with a point is written down in its record and does not stop the others.
    """
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    sweep = Sweep.load(Path(hydra.sweep.dir)) if hydra.mode == RunMode.MULTIRUN else None
    given = list(hydra.overrides.task)
    record = Record(
        _name_of(given, sweep, hydra.runtime.choices.get("recipe")), overrides=given, started=_now()
    )
    try:
        load_plugins(cfg.get("plugins") or ())
        point = prepare(resolve(cfg), folder)
        record.parameters = point.hyperparameters
        run(point, record, folder, progress_bar)
    except KeyboardInterrupt:
        record.status, record.error, record.ended = FAILED, "interrupted", _now()
        record.save(folder)
        raise
    except MechaError as error:
        record.status, record.error = FAILED, str(error)
        show_error(f"{record.name}: {error}" if sweep else str(error))
    except Exception:  # of an evaluator or a method, or a bug: the traceback says whose
        record.status, record.error = FAILED, traceback.format_exc()
        log.exception("%s failed", record.name)
    record.ended = _now()
    record.save(folder)
    _track(cfg, folder, record, sweep)
    if sweep:
        show_point(record, int(hydra.job.num) + 1, sweep.points)
    return record.metrics.get(record.metric or "")


def _track(cfg: DictConfig, folder: Path, record: Record, sweep: Sweep | None) -> None:
    if not cfg.tracking.uri or (sweep is not None and sweep.parent_run is None):
        return  # off, or the sweep has said already that the store does not answer
    try:
        store = Store(cfg.tracking.uri, cfg.tracking.experiment)
        log_folder(folder, record, store, sweep.parent_run if sweep else None)
    except TrackingError as error:
        record.tracking_error = str(error)
        record.save(folder)


def _show_plan(line: CommandLine) -> int:
    point = prepare(resolve(line.config), Path("outputs/runs/<time>"))
    with point.plan() as (planned, _):
        show_plan(planned, list(input_names(planned).values()), point.hyperparameters)
    if len(line.points) > 1:
        out.print(f"This is the first of {len(line.points)} points; swept: {', '.join(line.swept)}.")
    return 0


def _require_one_good_point(line: CommandLine, folder: Path) -> None:
    """Build and plan points until one is right; where none is, say so before anything is written."""
    problems = Problems()
    for config in line.points:
        try:
            point = prepare(resolve(config), folder)
            with point.plan() as (planned, _):
                point.scoring(planned)
                break
        except MechaError as error:
            problems.add(error)
    else:
        problems.raise_as(ConfigError)
    check_writable(folder / "run.json", 0)


def _run_one(line: CommandLine, folder: Path) -> int:
    fixed = [f"hydra.run.dir={_quoted(folder)}"]
    overrides.start_hydra([*line.arguments, *fixed], run_point)
    record = Record.load(folder)
    if record.status == FAILED:
        return 1
    _show_result(record, folder)
    return _tracking_status(record.tracking_error, folder, line)


def _how_to_go_on(line: CommandLine, folder: Path) -> str:
    """What an interrupt has left of the work, and the command that takes it up."""
    named = {str(p.output.path) for p in line.points if p.output.save and p.output.path}
    below = {leftover.target for leftover in find_leftovers([folder])}
    if not any(map(can_resume, named | below)):
        return "The same command starts again."
    key = "hydra.sweep.dir" if line.is_sweep else "hydra.run.dir"
    words = [word for word in line.arguments if not word.startswith(f"{key}=")]
    if line.is_sweep or not named:
        words.append(f"{key}={folder if _PLAIN.fullmatch(str(folder)) else _quoted(folder)}")
    return f"What is done is kept. Go on with: {overrides.program_name()} {shlex.join(words)}".rstrip()


def _run_sweep(line: CommandLine, folder: Path, tracking: Tracking) -> int:
    title = line.config.name or f"{line.config.hydra.runtime.choices.recipe} by {', '.join(line.swept)}"
    command = ["python", "-m", "mecha_exp", *line.arguments]
    sweep = Sweep(title, line.swept, command, len(line.points))
    sweeps.begin(sweep, folder, tracking)
    good = False
    try:
        overrides.start_hydra([*line.arguments, f"hydra.sweep.dir={_quoted(folder)}"], run_point)
    finally:
        try:
            good = sweeps.finish(sweep, folder, tracking)
            trouble = None
        except TrackingError as error:
            trouble = str(error)
    return _tracking_status(trouble, folder, line) or (0 if good else 1)


def _tracking_status(trouble: str | None, folder: Path, line: CommandLine) -> int:
    if trouble:
        show_error(f"{trouble} {how_to_log_later(folder)}")
        return 1
    if line.config.tracking.uri:
        out.print("the dashboard python -m mecha_exp ui")
    return 0


def _show_result(record: Record, folder: Path) -> None:
    out.print(terminal_table(Results(record.name, [], [record]), out.width))
    m = record.metrics
    if resumed := m["io/resumed_keys"]:
        out.print(f"resumed: {resumed:.0f} of {m['io/keys']:.0f} keys were already done")
    out.print(
        f"merged in {m['time/merge_seconds']:.2f} s: {human_bytes(m['io/bytes_read'])} read, "
        f"{human_bytes(m['io/bytes_written'])} written, {human_bytes(m['io/bytes_per_second'])}/s, "
        f"peak memory {human_bytes(m['memory/peak_bytes'])}",
        soft_wrap=True,
    )
    out.print(f"the run       {folder}", soft_wrap=True)


def _name_of(given: list[str], sweep: Sweep | None, recipe: str | None) -> str:
    """What differs from the other points, or the recipe."""
    differing = [o for o in given if sweep and o.lstrip("+").partition("=")[0] in sweep.swept]
    return ",".join(differing) or str(recipe)


def _quoted(folder: Path) -> str:
    escaped = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _now() -> int:
    return time.time_ns() // 1_000_000
