"""What sweeps leave in their folders, for tests."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path

from mecha_exp.report import CSV_FILE, Results
from mecha_exp.report.export import write_csv
from mecha_exp.report.verdict import VERDICT_FILE, write_verdict

NONE = ("output=none", "evaluator=none", "-m")
"""Points that are merged and no more."""

LIBRARIES = {"processes": "cloudpickle", "slurm": "submitit", "ray": "ray"}
"""Launchers of other processes: the library of each."""


def sweep_of(folder: Path) -> Path:
    return max((folder / "outputs" / "multiruns").iterdir(), key=lambda path: path.stat().st_mtime_ns)


def write_table(results: Results, command: Sequence[str], folder: Path) -> list[Path]:
    """The table and the verdict alone, in place of all files that a sweep ends with."""
    write_csv(results, folder / CSV_FILE)
    write_verdict(results, folder / VERDICT_FILE)
    return [folder / CSV_FILE]


def only_run(folder: Path) -> Path:
    """The folder of the one run below a folder."""
    (run,) = (folder / "outputs" / "runs").iterdir()
    return run


def records(sweep: Path) -> list[dict]:
    found = sorted(sweep.glob("*/run.json"), key=lambda path: int(path.parent.name))
    return [json.loads(path.read_text()) for path in found]


def rows(sweep: Path) -> list[dict[str, str]]:
    with (sweep / "sweep.csv").open() as file:
        return [row for row in csv.DictReader(file) if row["status"] != "REFERENCE"]


def overrides(sweep: Path) -> list[list[str]]:
    return [record["overrides"] for record in records(sweep)]


def mlflow_statuses(folder: Path) -> list[str]:
    """How the runs of `folder` ended, by MLflow's own client: of sweeps and points, not of inputs."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{(folder / 'outputs' / 'mlflow.db').as_posix()}")
    found = client.search_runs([client.get_experiment_by_name("mecha_exp").experiment_id], max_results=1000)
    return [run.info.status for run in found if run.data.tags.get("role") != "input"]


def is_told(metric: str) -> bool:
    """Whether a number does not depend on when and where a point was made."""
    return not metric.startswith(("time/", "io/", "memory/", "process"))


def result(point: dict) -> dict[str, object]:
    """What does not depend on when and where the point was made."""
    numbers = {name: value for name, value in point["metrics"].items() if is_told(name)}
    error = (point["error"] or "").strip()
    return {
        "metrics": numbers,
        "error": error,
        **{k: point[k] for k in ("name", "status", "signature", "tags")},
    }
