"""Logs finished runs to MLflow from the files in their folders, at once or later."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mecha_exp.report import Results, write_all
from mecha_exp.report.results import results_of
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
from mecha_exp.runs.sweep import Sweep
from mecha_exp.tracking import Store

ARTIFACTS = (
    RUN_FILE,
    METRICS_FILE,
    OUTCOMES_FILE,
    CHANGES_FILE,
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
    """Log a whole sweep under a new parent run; returns the number of its points."""
    sweep = Sweep.load(folder)
    sweep.parent_run = store.start(sweep.title, {"command": " ".join(sweep.command)})
    records = sweep.records(folder)
    for path, record in records.items():
        log_folder(path, record, store, sweep.parent_run)
    sweep.tracking_error = None
    sweep.save(folder)
    results = results_of(sweep, folder)
    close_run(sweep, results, write_all(results, sweep.command, folder), store)
    return len(records)


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
