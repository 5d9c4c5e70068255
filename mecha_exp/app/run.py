"""One run: a point in its folder, found or made, measured, written down and tracked."""

from __future__ import annotations

import logging
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from mecha_exp.app.block_weights import block_weights
from mecha_exp.app.point import prepare, resolve
from mecha_exp.app.provenance import git_changes
from mecha_exp.app.sweep.summary import reopen
from mecha_exp.app.tracking import log_folder
from mecha_exp.app.workbench import Entry, Result, Workbench, workbench
from mecha_exp.engine.planner.by_key import effective_values_in, values_table
from mecha_exp.errors import ConfigError, MechaError, TrackingError
from mecha_exp.evaluation import nan_warning
from mecha_exp.graph.nodes import InMemory, models_of
from mecha_exp.plugins import load_plugins
from mecha_exp.recipe import serialize
from mecha_exp.report.figures import draw_block_values
from mecha_exp.runs.record import BLOCKS_FIGURE, BLOCKS_FILE, CHANGES_FILE, FAILED, FINISHED, RUN_FILE, Record
from mecha_exp.runs.sweep import Sweep
from mecha_exp.terminal import progress_bar, show_error, show_point
from mecha_exp.tracking import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A point that was made together with others.

    Attributes:
        entry: what it is; None where it is not even that.
        result: what the pass gave, or what went wrong.
    """

    entry: Entry | None
    result: Result | Exception


def run_point(cfg: DictConfig, prepared: Prepared | None = None) -> float | None:
    """One point, in the folder that Hydra made for it; returns its main metric.

    What is wrong with a point is written down in its record and does not stop the others.
    """
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    sweep = Sweep.load(Path(hydra.sweep.dir)) if hydra.mode == RunMode.MULTIRUN else None
    if sweep:
        reopen(sweep, Path(hydra.sweep.dir))
    given = list(hydra.overrides.task)
    record = Record(
        _name_of(given, sweep, hydra.runtime.choices.get("recipe")), overrides=given, started=_now()
    )
    earlier, bench, entry = _earlier(folder), None, None
    try:
        bench = workbench(cfg.store, cfg.rerun)
        load_plugins(cfg.get("plugins") or ())
        if prepared is None:
            point = prepare(resolve(cfg), folder)
            record.parameters = point.hyperparameters
            entry = bench.enter(point, folder)
            prepared = Prepared(entry, _find_or_make(bench, entry))
        entry = prepared.entry
        if isinstance(prepared.result, Exception):
            raise prepared.result
        assert entry is not None
        record.note = _what_changed(earlier, given, entry)
        _complete(record, bench, entry, prepared.result)
        if sweep is None and record.block_weights:  # a sweep has one figure for all of its points
            draw_block_values(record.block_weights, record.name, folder / BLOCKS_FIGURE)
    except KeyboardInterrupt:
        record.status, record.error, record.ended = FAILED, "interrupted", _now()
        record.save(folder)
        raise
    except MechaError as error:
        record.status, record.error = FAILED, str(error)
        show_error(f"{record.name}: {error}" if sweep else str(error))
    except Exception as error:  # of an evaluator or a method, or a bug: the traceback says whose
        record.status, record.error = FAILED, "".join(traceback.format_exception(error))
        log.error("%s failed\n%s", record.name, record.error)
    if bench and entry:
        bench.note_failure(entry, str(record.error)) if record.error else bench.forgive(entry)
    record.ended = _now()
    record.save(folder)
    _track(cfg, folder, record, sweep, earlier)
    if sweep:
        show_point(record, int(hydra.job.num) + 1, sweep.points)
    return record.metrics.get(record.metric or "")


def _find_or_make(bench: Workbench, entry: Entry) -> Result | Exception:
    found = bench.recall(entry)
    return found if found else next(bench.make([entry], progress_bar))[1]


def _complete(record: Record, bench: Workbench, entry: Entry, result: Result) -> None:
    """Measure a point, and write down everything that is known of it."""
    kept, point, scoring = result.kept, entry.point, entry.scoring
    for warning in kept.warnings:
        log.warning(warning)
    record.parameters = point.parameters
    fingerprints = {f"fingerprint/{n}": entry.contents[point.files[m]] for m, n in point.names.items()}
    record.tags = {"signature": entry.digest, **fingerprints, **kept.tags}
    record.signature, record.found = entry.digest, result.found
    record.origin = asdict(entry.origin)
    record.block_weights = block_weights(point.recipe, point.files.values())
    if kept.model:
        record.model, record.model_sha256 = kept.model.path, kept.model.sha256
    record.metrics = dict(kept.metrics)
    if scoring.evaluations:
        started = time.perf_counter()
        record.metrics.update(bench.measure(entry, result))
        record.metrics["time/evaluate_seconds"] = time.perf_counter() - started
        record.metric, record.direction, record.units = scoring.metric, scoring.direction, scoring.units
        record.evaluations = [evaluation.key for evaluation in scoring.evaluations]
        if warning_of_nan := nan_warning(scoring, record.metrics):
            log.warning("%s: %s", record.name, warning_of_nan)
        record.references = bench.measure_inputs(entry)
    record.status = FINISHED
    _write_files(entry, kept.statistics)


def _earlier(folder: Path) -> Record | None:
    """What lay in the folder before, where that can be read."""
    try:
        return Record.load(folder) if (folder / RUN_FILE).is_file() else None
    except ConfigError:
        return None


def _what_changed(earlier: Record | None, given: list[str], entry: Entry) -> str | None:
    """What to say where the point lay here with another signature, as after an input was replaced."""
    if earlier is None or not earlier.signature:
        return None
    if earlier.signature == entry.digest or earlier.overrides != given:
        return earlier.note if earlier.signature == entry.digest else None
    point = entry.point
    changed = [
        name
        for node, name in point.names.items()
        if earlier.tags.get(f"fingerprint/{name}") != entry.contents[point.files[node]]
    ]
    what = f"the input {', '.join(changed)} has changed" if changed else "a method or a setting has changed"
    return f"made again: {what}"


def _track(
    cfg: DictConfig, folder: Path, record: Record, sweep: Sweep | None, earlier: Record | None
) -> None:
    """Log the run; in a sweep it takes the place of the one that lay in its folder before."""
    if not cfg.tracking.uri or (sweep is not None and sweep.parent_run is None):
        return  # off, or the sweep has said already that the store does not answer
    try:
        store = Store(cfg.tracking.uri, cfg.tracking.experiment)
        record.run_id = log_folder(folder, record, store, sweep.parent_run if sweep else None)
        if sweep and earlier and earlier.run_id:
            store.delete(earlier.run_id)
    except TrackingError as error:
        record.tracking_error = str(error)
    record.save(folder)


def _write_files(entry: Entry, statistics: str) -> None:
    point, folder = entry.point, entry.folder
    if changes := git_changes():
        (folder / CHANGES_FILE).write_text(changes, encoding="utf-8")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(point.config, sort_keys=False), encoding="utf-8")
    if not any(isinstance(m.source, InMemory) for m in models_of(point.recipe)):
        (folder / "recipe.mecha").write_text(serialize(point.recipe), encoding="utf-8")
    if values := effective_values_in(point.recipe, point.options.model_dirs):
        (folder / BLOCKS_FILE).write_text(values_table(values), encoding="utf-8")
    if point.wants_statistics:
        (folder / "weight_stats.csv").write_text(statistics, encoding="utf-8")


def _name_of(given: list[str], sweep: Sweep | None, recipe: str | None) -> str:
    """What differs from the other points, or the recipe."""
    words = [word.lstrip("+") for word in given]
    differing = [word for word in words if sweep and word.partition("=")[0] in sweep.swept]
    return ",".join(differing) or str(recipe)


def _now() -> int:
    return time.time_ns() // 1_000_000
