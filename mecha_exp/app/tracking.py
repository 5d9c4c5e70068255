"""Logs finished runs to MLflow from the files in their folders, at once or later."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mecha_exp.app.reproduction.sources import SOURCES_FILE
from mecha_exp.report import Results, write_all
from mecha_exp.report.verdict import concluded_results
from mecha_exp.runs.outcomes import OUTCOMES_FILE
from mecha_exp.runs.record import (
    BLOCKS_FIGURE,
    BLOCKS_FILE,
    CHANGES_FILE,
    FAILED,
    FINISHED,
    METRICS_FILE,
    RUN_FILE,
    Record,
)
from mecha_exp.runs.sweep import FOLDER_TAG, RUNNING, Sweep
from mecha_exp.tracking import Store
from mecha_exp.tracking.mlflow_store import PARENT_TAG

ARTIFACTS = (
    RUN_FILE,
    METRICS_FILE,
    OUTCOMES_FILE,
    CHANGES_FILE,
    SOURCES_FILE,
    "recipe.yaml",
    "recipe.mecha",
    BLOCKS_FILE,
    BLOCKS_FIGURE,
    "weight_stats.csv",
    "mecha_exp.log",
)
HYDRA_ARTIFACTS = ("config.yaml", "overrides.yaml")


def log_folder(folder: Path, record: Record, store: Store, parent: str | None = None) -> str:
    """Log one run; returns its MLflow id."""
    files = [folder / name for name in ARTIFACTS]
    files += [folder / ".hydra" / name for name in HYDRA_ARTIFACTS]
    return store.log(
        record.name,
        record.status,
        (record.started, record.ended),
        record.parameters,
        record.metrics,
        {**record.tags, **({"error": record.error} if record.error else {})},
        [path for path in files if path.is_file()],
        parent,
    )


def log_sweep(folder: Path, store: Store) -> int:
    """Log what a store lacks of a sweep; returns the number of points that were logged."""
    sweep = Sweep.load(folder)
    mend(sweep, folder, store)
    is_new = sweep.parent_run is None
    if is_new:
        tags = {"command": " ".join(sweep.command), FOLDER_TAG: str(folder.absolute())}
        sweep.parent_run = store.start(sweep.title, tags)
    sweep.tracking_error = None
    sweep.save(folder)
    missing = {path: record for path, record in sweep.records(folder).items() if record.run_id is None}
    for path, record in missing.items():
        record.run_id, record.tracking_error = log_folder(path, record, store, sweep.parent_run), None
        record.save(path)
    if missing or store.status(str(sweep.parent_run)) == RUNNING:
        results = concluded_results(sweep, folder)
        close_run(sweep, results, write_all(results, sweep.command, folder), store)
    return len(missing)


def log_run(folder: Path, record: Record, store: Store) -> bool:
    """Log a run that is not part of a sweep, unless the store has it; returns whether it was logged."""
    store.delete_abandoned()
    if record.run_id is not None and store.status(record.run_id) is not None:
        return False
    record.run_id, record.tracking_error = log_folder(folder, record, store), None
    record.save(folder)
    return True


def mend(sweep: Sweep, folder: Path, store: Store) -> None:
    """Remove what a kill left half logged: an unknown parent run, points without a record."""
    parents = store.runs_with(FOLDER_TAG, str(folder.absolute()))
    for run_id, status in parents.items():
        if run_id != sweep.parent_run and status == RUNNING:
            store.delete(run_id)
    if sweep.parent_run not in parents:  # another store, or deleted there
        sweep.parent_run = None
    records = sweep.records(folder)
    logged = {record.run_id for record in records.values()}
    children = store.runs_with(PARENT_TAG, sweep.parent_run) if sweep.parent_run else {}
    for run_id in children.keys() - logged:
        store.delete(run_id)
    for path, record in records.items():
        if record.run_id is not None and record.run_id not in children:
            record.run_id = None
            record.save(path)


def close_run(sweep: Sweep, results: Results, files: Sequence[Path], store: Store) -> None:
    """Log the best point and the result files of a sweep, and end its MLflow run."""
    best = results.best
    metrics = {f"best/{best.metric}": best.metrics[str(best.metric)]} if best else {}
    tags = {"best": best.name} if best else {}
    status = FAILED if any(r.status == FAILED for r in results.records) else FINISHED
    store.finish(str(sweep.parent_run), status, metrics, tags, files)


def how_to_log_later(folder: Path) -> str:
    """A hint with the command that logs a folder when the store answers again."""
    return f"The results are kept in {folder}. Log them later with: python -m mecha_exp track {folder}"
