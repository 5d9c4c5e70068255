"""Logging finished runs to MLflow from what they left in their folders: at once, or later."""

from __future__ import annotations

import argparse
from pathlib import Path

from mecha_exp.app import sweep as sweeps
from mecha_exp.app.display import out
from mecha_exp.app.record import (
    BLOCKS_FIGURE,
    BLOCKS_FILE,
    CHANGES_FILE,
    METRICS_FILE,
    RUN_FILE,
    Record,
)
from mecha_exp.app.report import write_all
from mecha_exp.tracking import Store

ARTIFACTS = (
    RUN_FILE,
    METRICS_FILE,
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
    sweep = sweeps.Sweep.load(folder)
    sweep.parent_run = store.start(sweep.title, {"command": " ".join(sweep.command)})
    records = sweep.records(folder)
    for path, record in records.items():
        log_folder(path, record, store, sweep.parent_run)
    sweep.tracking_error = None
    sweep.save(folder)
    results = sweep.results(folder)
    sweeps.close_run(sweep, results, write_all(results, sweep.command, folder), store)
    return len(records)


def how_to_log_later(folder: Path) -> str:
    """The command that logs a folder once the store is there again."""
    return f"The results are kept in {folder}. Log them later with: python -m mecha_exp track {folder}"


def main(arguments: list[str]) -> int:
    """`python -m mecha_exp track FOLDER...`"""
    parser = argparse.ArgumentParser(
        prog="python -m mecha_exp track",
        description="Log finished runs or sweeps to MLflow, for instance after the server was away.",
        epilog="example: python -m mecha_exp track outputs/multiruns/2026-01-31_12-00-00",
    )
    parser.add_argument("folder", nargs="+", type=Path, help="of a run or of a sweep")
    parser.add_argument(
        "--uri", default="sqlite:///outputs/mlflow.db", help="the store (default: %(default)s)"
    )
    parser.add_argument("--experiment", default="mecha_exp", help="the experiment (default: %(default)s)")
    options = parser.parse_args(arguments)
    loaded = [
        (folder, is_sweep(folder), None if is_sweep(folder) else Record.load(folder))
        for folder in options.folder
    ]
    store = Store(options.uri, options.experiment)
    for folder, sweep, record in loaded:
        if sweep:
            out.print(f"{folder}: logged {log_sweep(folder, store)} points")
        elif record is not None:
            log_folder(folder, record, store)
            out.print(f"{folder}: logged '{record.name}'")
    return 0


def is_sweep(folder: Path) -> bool:
    """Whether a folder is a sweep's."""
    return (folder / sweeps.SWEEP_FILE).is_file()
