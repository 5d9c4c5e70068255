"""All that a sweep leaves which must not depend on where and when its points ran, field by field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from sweep_folders import is_told, rows

_RECORD_OF_ITS_OWN = ("started", "ended", "metrics", "run_id")
_TAGS_OF_ITS_OWN = ("mlflow.parentRunId", "mlflow.user", "command", "folder", "logged_by")


def everything_of(sweep: Path, store: str) -> dict[str, Any]:
    """The records, tables, outcomes, verdict, recipes and tracked runs of a sweep."""
    files = {path.relative_to(sweep).as_posix(): path for path in sorted(sweep.rglob("*")) if path.is_file()}
    of_points = {name: path for name, path in files.items() if "/" in name and ".hydra" not in name}
    return {
        "files": [*files],
        "records": {name: _record(path) for name, path in of_points.items() if name.endswith("run.json")},
        "recipes": {name: path.read_text() for name, path in of_points.items() if "recipe." in name},
        "weights": {n: path.read_text() for n, path in of_points.items() if n.endswith("weight_stats.csv")},
        "outcomes": {
            n: pq.read_table(p).to_pylist() for n, p in files.items() if n.endswith("outcomes.parquet")
        },
        "sweep.csv": [_told(row) for row in rows(sweep)],
        "sweep.parquet": [_told(row) for row in pq.read_table(sweep / "sweep.parquet").to_pylist()],
        "verdict.json": json.loads((sweep / "verdict.json").read_text()),
        "tracked": _tracked(sweep, store),
    }


def _record(path: Path) -> dict[str, Any]:
    record = json.loads(path.read_text())
    kept = {name: value for name, value in record.items() if name not in _RECORD_OF_ITS_OWN}
    return {**kept, "metrics": _told(record["metrics"])}


def _tracked(sweep: Path, store: str) -> dict[str, Any]:
    """The run of the sweep, and those of its points and inputs by their names."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(store)
    parent = client.get_run(json.loads((sweep / "sweep.json").read_text())["parent_run"])
    condition = f"tags.mlflow.parentRunId = '{parent.info.run_id}'"
    found = client.search_runs([parent.info.experiment_id], condition, max_results=1000)
    named = {run.info.run_name: _run(client, run) for run in found}
    assert len(named) == len(found)
    return {"": _run(client, parent), **dict(sorted(named.items()))}


def _run(client: Any, run: Any) -> dict[str, Any]:
    tags = {
        name: value
        for name, value in run.data.tags.items()
        if name != "mlflow.runName" and not name.endswith(_TAGS_OF_ITS_OWN)
    }
    return {
        "status": run.info.status,
        "parameters": run.data.params,
        "metrics": _told(run.data.metrics),
        "tags": tags,
        "inputs": sorted((i.dataset.name, i.dataset.digest) for i in run.inputs.dataset_inputs),
        "artifacts": sorted(artifact.path for artifact in client.list_artifacts(run.info.run_id)),
    }


def _told(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if is_told(name)}
