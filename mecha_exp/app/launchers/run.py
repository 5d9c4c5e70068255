"""Runs one point in its folder: find or merge it, measure it, write its record, track it."""

from __future__ import annotations

import logging
import time
import traceback
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from mecha_exp.app.batch import Merged
from mecha_exp.app.config.execution import shared_yaml
from mecha_exp.app.experts import base_of, experts_of
from mecha_exp.app.measurements import Measured
from mecha_exp.app.outputs.cards import note_results
from mecha_exp.app.point import Point
from mecha_exp.app.preparation import prepare_job
from mecha_exp.app.provenance import git_changes
from mecha_exp.app.recipes.block_weights import block_weights
from mecha_exp.app.reproduction.sources import SOURCES_FILE, sources_text
from mecha_exp.app.sweep.summary import reopen
from mecha_exp.app.tracking import EndedRun, Tracker
from mecha_exp.app.workbench import Workbench, workbench
from mecha_exp.engine.planner.by_key import effective_values_in, values_table
from mecha_exp.errors import MechaError
from mecha_exp.evaluation import Scoring, nan_warning
from mecha_exp.evaluation.racing import Fidelity
from mecha_exp.graph.nodes import InMemory, models_of
from mecha_exp.plugins import load_plugins
from mecha_exp.recipe import serialize
from mecha_exp.report.figures import draw_block_values
from mecha_exp.runs.files import FILES, add_files_of_input, write_files
from mecha_exp.runs.outcomes import INPUT, OUTCOMES_FILE, POINT, write_outcomes
from mecha_exp.runs.record import (
    BLOCKS_FIGURE,
    BLOCKS_FILE,
    CONFIG_FILE,
    FAILED,
    FINISHED,
    RACE,
    RACE_EXAMPLES,
    RACE_FIDELITY,
    RECIPE_FILE,
    STATISTICS_FILE,
    Record,
)
from mecha_exp.runs.sweep import Sweep, Tracking
from mecha_exp.system.atomic_write import replace_text
from mecha_exp.system.write_errors import write_sentence
from mecha_exp.terminal.bars import progress_bar
from mecha_exp.terminal.console import as_typed, show_error
from mecha_exp.terminal.pace import show_point
from mecha_exp.tracking.backend import now

log = logging.getLogger(__name__)


def run_point(
    cfg: DictConfig,
    point: Point | Exception | None = None,
    result: Merged | Exception | None = None,
    tracker: Tracker | None = None,
) -> float | None:
    """Run one point in the folder that Hydra made for it; returns its main metric.

    An error is written into the point's record and does not stop the other points.

    Args:
        cfg: the configuration of Hydra's job.
        point: the signed point, or why there is none; None to prepare it here.
        result: its merge, if it was merged together with others.
        tracker: of the sweep; None to log the point by itself.
    """
    run = _PointRun.begin(cfg)
    try:
        run.complete(point, result)
    except KeyboardInterrupt:
        run.fail("interrupted")
        run.end()
        raise
    except MechaError as error:
        run.fail(as_typed(str(error)), getattr(error, "evaluation", ""))
        show_error(f"{run.record.name}: {error}" if run.sweep else str(error))
    except Exception as error:  # in an evaluator or a method, or a bug: the traceback tells which
        if isinstance(error, OSError) and (sentence := write_sentence(error)):
            run.fail(sentence)
            show_error(f"{run.record.name}: {sentence}")
        else:
            run.fail("".join(traceback.format_exception(error)))
            log.error("%s failed\n%s", run.record.name, run.record.error)
    run.store_failure()
    run.end()
    run.track(tracker)
    if run.bench and tracker is None:  # by itself, and perhaps in a process of its own
        run.bench.flush()
    if run.sweep:
        number = int(HydraConfig.get().job.num) + 1
        show_point(run.record, number, run.sweep.points, run.seconds_of_inputs, run.seconds_left(number))
    return run.record.metrics.get(run.record.metric or "")


@dataclass
class _PointRun:
    """A point on its way to a finished record.

    Attributes:
        cfg: the configuration of Hydra's job.
        folder: the folder of the run.
        sweep: the sweep that it is part of, if it is.
        record: the record, written when the run ends.
        earlier: the record that was in the folder before.
        bench: the workbench, once it is open.
        point: the signed point, once it is signed.
        failed_evaluation: the key of the evaluation that failed, if one did.
        seconds_of_inputs: how long it took to measure the inputs for comparison.
        is_known: whether the store had its merge and all numbers.
    """

    cfg: DictConfig
    folder: Path
    sweep: Sweep | None
    record: Record
    earlier: Record | None
    bench: Workbench | None = None
    point: Point | None = None
    failed_evaluation: str = ""
    seconds_of_inputs: float = 0
    is_known: bool = False

    @classmethod
    def begin(cls, cfg: DictConfig) -> _PointRun:
        """Start the record of Hydra's current job."""
        hydra = HydraConfig.get()
        folder = Path(hydra.runtime.output_dir)
        sweep = Sweep.load(Path(hydra.sweep.dir)) if hydra.mode == RunMode.MULTIRUN else None
        if sweep:
            reopen(sweep, Path(hydra.sweep.dir))
        overrides = list(hydra.overrides.task)
        name = _name_of(overrides, sweep, hydra.runtime.choices.get("recipe"))
        record = Record(name, overrides=overrides, started=now())
        return cls(cfg, folder, sweep, record, Record.find(folder))

    def complete(self, point: Point | Exception | None, result: Merged | Exception | None) -> None:
        """Find or merge the point, measure it, and write down the result.

        Raises:
            Exception: whatever is wrong with the point.
        """
        self.bench = workbench(self.cfg.store, self.cfg.rerun)
        load_plugins(self.cfg.get("plugins") or ())
        if isinstance(point, Exception):
            raise point
        self.point = point = point or self._signed(self.bench)
        result = result or _find_or_merge(self.bench, point)
        if isinstance(result, Exception):
            raise result
        self.record.note = _what_changed(self.earlier, self.record, point)
        _describe(self.record, point, result, self.bench)
        _measure(self, self.bench, point, result)
        if point.has_card and self.record.model == str(point.output):
            note_results(self.record)
        self.record.status = FINISHED
        _write_files(point, result.statistics)
        if self.sweep is None and self.record.block_weights:  # a sweep has one figure for all of its points
            draw_block_values(self.record.block_weights, self.record.name, self.folder / BLOCKS_FIGURE)

    def _signed(self, bench: Workbench) -> Point:
        point = prepare_job(self.cfg, self.folder)
        self.record.parameters = point.hyperparameters
        return bench.sign(point)

    def fail(self, error: str, evaluation: str = "") -> None:
        """Mark the run as failed, by an evaluation if its key is given."""
        self.record.status, self.record.error = FAILED, error
        self.failed_evaluation = evaluation

    def store_failure(self) -> None:
        """Tell the store whether the point failed."""
        if self.bench and self.point:
            if self.record.error:
                self.bench.note_failure(self.point, self.record.error, self.failed_evaluation)
            else:
                self.bench.clear_failure(self.point)

    def end(self) -> None:
        """Write the record."""
        self.record.ended = now()
        self.record.save(self.folder)

    def seconds_left(self, number: int) -> float:
        """How long the points after this one will take; 0 where nothing tells."""
        left = max(self.sweep.points - number, 0) if self.sweep else 0
        return self.bench.pace.note(left, self.seconds_of_inputs, is_known=self.is_known) if self.bench else 0

    def track(self, tracker: Tracker | None) -> None:
        """Log the run; in a sweep it replaces the run that was in its folder before."""
        sweep, tracking = self.sweep, Tracking.of(self.cfg.tracking)
        if not tracking.uri or (sweep is not None and sweep.parent_run is None):
            return  # off, or the sweep has already reported that the tracking store does not answer
        ended = EndedRun(self.folder, self.record)
        if sweep:
            replaced = self.earlier.run_id if self.earlier else None
            ended = EndedRun(self.folder, self.record, sweep.parent_run, replaced)
        with nullcontext(tracker) if tracker else Tracker(tracking) as open_tracker:
            open_tracker.add(ended)


def _find_or_merge(bench: Workbench, point: Point) -> Merged | Exception:
    recalled = bench.recall(point)
    return recalled if recalled else next(bench.merge([point], progress_bar))[1]


def _describe(record: Record, point: Point, merged: Merged, bench: Workbench) -> None:
    """Write the point and its merge into the record."""
    for warning in filter(bench.is_news, [*point.equal_inputs, *merged.warnings]):
        log.warning("%s", as_typed(warning))
    recipe = HydraConfig.get().runtime.choices.get("recipe")
    record.parameters = {**point.parameters, **({"recipe": recipe} if recipe else {})}
    fingerprints = {f"fingerprint/{n}": point.contents[point.files[m]] for m, n in point.names.items()}
    record.tags = {"signature": point.digest, **fingerprints, **merged.tags}
    record.signature, record.found = point.digest, merged.is_recalled
    record.base = base_of(point)
    record.origin = asdict(point.origin)
    record.block_weights = block_weights(point.recipe, point.files.values())
    if merged.file:
        record.model, record.model_sha256 = merged.file.path, merged.file.sha256
    record.metrics = dict(merged.metrics)


def _measure(run: _PointRun, bench: Workbench, point: Point, merged: Merged) -> None:
    """Measure the point and its inputs; write the numbers into the record, outcomes and files beside it."""
    record, scoring = run.record, point.scoring
    run.is_known = merged.is_recalled
    if not scoring.evaluations:
        return
    started = time.perf_counter()
    measured = bench.measurements.of_point(point, merged)
    run.is_known &= measured.is_known
    record.metrics.update(measured.numbers)
    record.metrics["time/evaluate_seconds"] = time.perf_counter() - started
    record.metric, record.direction, record.units = scoring.metric, scoring.direction, scoring.units
    record.evaluations, record.directions = scoring.keys, scoring.directions
    record.objectives = dict(scoring.objectives)
    record.split, record.report_split = scoring.selection_split, scoring.report_split
    if scoring.race:
        _note_race(record, scoring, measured)
    if measured.dropped is None and (warning := nan_warning(scoring, record.metrics)):
        log.warning("%s: %s", record.name, warning)
    started = time.perf_counter()
    inputs = bench.measurements.of_inputs_and_experts(point)
    run.seconds_of_inputs = time.perf_counter() - started
    scores, of_inputs = bench.measurements.normalised_scores(point, measured, inputs)
    record.metrics.update(scores)
    record.expert_of = experts_of(point)
    record.references = {name: m.numbers | of_inputs[name] for name, m in inputs.items()}
    rows = measured.rows(POINT, record.name, point.expert_set)
    rows += [part for name, m in inputs.items() for part in m.rows(INPUT, name, point.expert_set)]
    write_outcomes(rows, point.folder / OUTCOMES_FILE)
    if measured.dropped is None:  # else the race has written them
        write_files(measured.files, point.folder / FILES)
    for name, m in inputs.items():
        add_files_of_input(m.files, name, Path(HydraConfig.get().sweep.dir) if run.sweep else point.folder)


def _note_race(record: Record, scoring: Scoring, measured: Measured) -> None:
    """Write down on how much a point was measured; the score of a dropped one has another name."""
    race = scoring.race
    assert race is not None
    record.race = asdict(race)
    name = RACE_FIDELITY if isinstance(race, Fidelity) else RACE_EXAMPLES
    if measured.dropped is None:
        record.metrics[name] = float(
            race.full if isinstance(race, Fidelity) else _examples(scoring, measured)
        )
        return
    record.dropped = measured.dropped.examples
    record.metrics[name] = float(record.dropped)
    record.metrics[f"{RACE}{scoring.metric}"] = measured.dropped.score


def _examples(scoring: Scoring, measured: Measured) -> int:
    """How many examples the main evaluator has measured."""
    return sum(map(len, measured.outcomes[scoring.evaluations[0].prefix].values.values()))


def _what_changed(earlier: Record | None, record: Record, point: Point) -> str | None:
    """A note that the same overrides had another signature before, as after an input was replaced."""
    if earlier is None or not earlier.signature:
        return None
    if earlier.signature == point.digest:
        return earlier.note
    if earlier.overrides != record.overrides:
        return None
    changed = [
        name
        for node, name in point.names.items()
        if earlier.tags.get(f"fingerprint/{name}") != point.contents[point.files[node]]
    ]
    what = f"the input {', '.join(changed)} has changed" if changed else "a method or a setting has changed"
    return f"made again: {what}"


def _write_files(point: Point, statistics: str) -> None:
    folder = point.folder
    for name, text in {**git_changes(), SOURCES_FILE: _sources(point)}.items():
        if text:
            replace_text(folder / name, text)
        else:  # of an earlier start
            (folder / name).unlink(missing_ok=True)
    replace_text(folder / CONFIG_FILE, shared_yaml(point.config, _plain_yaml))
    if not any(isinstance(m.source, InMemory) for m in models_of(point.recipe)):
        replace_text(folder / RECIPE_FILE, serialize(point.recipe))
    if values := effective_values_in(point.recipe, point.options.model_dirs):
        replace_text(folder / BLOCKS_FILE, values_table(values))
    if point.wants_statistics:
        replace_text(folder / STATISTICS_FILE, statistics)


def _plain_yaml(content: Any) -> str:
    return str(yaml.dump(content, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False))


def _sources(point: Point) -> str:
    evaluators = [evaluation.evaluator for evaluation in point.scoring.evaluations]
    return sources_text(point.recipe, evaluators)


def _name_of(overrides: list[str], sweep: Sweep | None, recipe: str | None) -> str:
    """The overrides that tell the point from the others of its sweep, or its recipe.

    Of several overrides with one key the last one holds: a replicate sets its seed again.
    """
    words = [word.lstrip("+") for word in overrides]
    keys = [word.partition("=")[0] for word in words]
    swept = sweep.swept if sweep else ()
    differing = [
        word
        for i, (key, word) in enumerate(zip(keys, words, strict=True))
        if key in swept and key not in keys[i + 1 :]
    ]
    return ",".join(differing) or str(recipe)
