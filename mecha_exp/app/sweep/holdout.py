"""Measures the chosen points of a sweep, and its inputs, on data that nothing was chosen by."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from mecha_exp.app.batch import Merged, merge_points
from mecha_exp.app.point import Point
from mecha_exp.app.preparation import prepare
from mecha_exp.app.tracking import datasets_of
from mecha_exp.app.workbench import Workbench
from mecha_exp.errors import MechaError, TrackingError
from mecha_exp.evaluation.model import Model
from mecha_exp.report.pareto import chosen_settings
from mecha_exp.report.sweep_results import results_of
from mecha_exp.runs.files import FILES, add_files, add_files_of_input
from mecha_exp.runs.outcomes import (
    INPUT,
    OUTCOMES_FILE,
    POINT,
    MeasuredOutcomes,
    read_outcomes,
    write_outcomes,
)
from mecha_exp.runs.record import METRICS_FILE, RUN_FILE, Record, read_settings
from mecha_exp.runs.sweep import Sweep, Tracking
from mecha_exp.terminal.console import show_error, stdout
from mecha_exp.tracking import Store

log = logging.getLogger(__name__)

REPORTED = (RUN_FILE, METRICS_FILE, OUTCOMES_FILE, FILES)
"""The files of a run that change when its point is reported."""


@dataclass(frozen=True)
class Chosen:
    """A chosen point, with what measures it on the report split.

    Attributes:
        record: of its run.
        point: in memory alone, with the evaluators on the report split.
    """

    record: Record
    point: Point

    @property
    def folder(self) -> Path:
        return self.point.folder


def report_chosen(sweep: Sweep, folder: Path, bench: Workbench, tracking: Tracking) -> bool:
    """Measure the chosen point of each method, and its inputs, on the report split, unless they are.

    A model that was not kept is merged once more, together with the other chosen ones.

    Returns:
        whether all could be measured.
    """
    results = results_of(sweep, folder, ended=True)
    chosen = {id(record) for setting in chosen_settings(results) for record in setting.finished}
    signatures = {record.signature for record in results.finished if id(record) in chosen}
    pending, all_measured = [], True
    for path, record in sweep.records(folder).items():
        if not record.finished or record.report_split is None:
            continue
        if record.signature not in signatures:
            _withdraw(path, record)
            continue
        signed = _candidate(path, record, bench)
        if signed is not None and not _is_reported(signed, bench):
            pending.append(signed)
    for candidate, merged in models_of_chosen(pending, bench):
        try:
            if isinstance(merged, Exception):
                raise merged
            _report(candidate, merged, bench)
            _log(candidate, sweep, tracking)
            merged.release()
        except MechaError as error:
            all_measured = False
            show_error(f"{candidate.record.name} on {candidate.record.report_split}: {error}")
    return all_measured


def _is_reported(candidate: Chosen, bench: Workbench) -> bool:
    return candidate.record.reported == candidate.point.scoring.keys and not bench.measures_again


def _candidate(path: Path, record: Record, bench: Workbench) -> Chosen | None:
    """A chosen point, from the configuration in its folder; None if it would be another merge by now."""
    try:
        point = bench.sign(prepare(read_settings(path), path))
    except MechaError as error:
        log.warning("%s is not measured on %s: %s", record.name, record.report_split, error)
        return None
    if point.digest != record.signature or point.scoring.keys != record.evaluations:
        log.warning("%s has changed, and is not measured on %s", record.name, record.report_split)
        return None
    scoring = point.scoring.on(str(record.report_split))
    return Chosen(record, replace(point, scoring=scoring, output=None))


def models_of_chosen(
    chosen: Sequence[Chosen], bench: Workbench
) -> Iterator[tuple[Chosen, Merged | Exception]]:
    """The model of each chosen point: stored, in its file, or merged again."""
    missing: dict[Point, Chosen] = {}
    for candidate in chosen:
        try:
            recalled = bench.recall(candidate.point)
            if recalled is None and candidate.record.has_model:
                recalled = Merged({}, "", [], _kept(candidate))
        except MechaError as error:
            yield candidate, error
            continue
        if recalled is None:
            missing[candidate.point] = candidate
        else:
            yield candidate, recalled
    if missing:
        stdout.print(f"merging the chosen points once more ({len(missing)}), since no model was kept")
    for outcomes in merge_points(list(missing), lambda planned: nullcontext(lambda key, nbytes: None)):
        for point, result in outcomes.items():
            yield missing[point], _with_its_rank(point, result)


def _kept(candidate: Chosen) -> Model:
    """The model to measure of a point whose output is there."""
    path, adapter = Path(str(candidate.record.model)), candidate.point.adapter
    return adapter.model(path) if adapter else path


def _with_its_rank(point: Point, result: Merged | Exception) -> Merged | Exception:
    """A merge as it is measured: of an adapter the base with it."""
    if point.adapter and isinstance(result, Merged):
        assert isinstance(result.model, Mapping)
        try:
            result.model = point.adapter.remade(result.model)
        except MechaError as error:
            return error
    return result


def _report(candidate: Chosen, merged: Merged, bench: Workbench) -> None:
    """Measure a chosen point and its inputs, and write the numbers and the outcomes into its folder."""
    record, point = candidate.record, candidate.point
    measured = bench.measurements.of_point(point, merged)
    inputs = bench.measurements.of_inputs_and_experts(point)
    scores, of_inputs = bench.measurements.normalised_scores(point, measured, inputs)
    rows = measured.rows(POINT, record.name, point.expert_set)
    rows += [part for name, m in inputs.items() for part in m.rows(INPUT, name, point.expert_set)]
    file = candidate.folder / OUTCOMES_FILE
    write_outcomes([*_without(str(record.report_split), file), *rows], file)
    add_files(measured.files, candidate.folder / FILES)
    for name, m in inputs.items():
        add_files_of_input(m.files, name, candidate.folder.parent)
    record.metrics |= measured.numbers | scores
    for name, m in inputs.items():
        record.references.setdefault(name, {}).update(m.numbers | of_inputs[name])
    record.units |= point.scoring.units
    record.reported = point.scoring.keys
    record.save(candidate.folder)


def _log(candidate: Chosen, sweep: Sweep, tracking: Tracking) -> None:
    """Add the numbers to the point's MLflow run, if it has one."""
    record = candidate.record
    if record.run_id is None or sweep.parent_run is None or not tracking.uri:
        return
    prefix = f"{record.report_split}/"
    added = {name: value for name, value in record.metrics.items() if name.startswith(prefix)}
    try:
        store = Store(tracking.uri, tracking.experiment)
        files = [candidate.folder / name for name in REPORTED]
        store.add(record.run_id, added, files, datasets_of(record, added))
    except TrackingError as error:
        sweep.tracking_error = str(error)


def _withdraw(path: Path, record: Record) -> None:
    """Remove the numbers on the report split from a point that is not chosen any more."""
    if not record.reported:
        return
    for numbers in (record.metrics, *record.references.values()):
        for name in [name for name in numbers if name.startswith(f"{record.report_split}/")]:
            del numbers[name]
    file = path / OUTCOMES_FILE
    write_outcomes(_without(str(record.report_split), file), file)
    shutil.rmtree(path / FILES / str(record.report_split), ignore_errors=True)
    record.reported = {}
    record.save(path)


def _without(split: str, file: Path) -> list[MeasuredOutcomes]:
    """The outcomes in a file on other splits."""
    return [part for part in read_outcomes(file) if part.split != split] if file.is_file() else []
