"""Runs through MLflow's own client: of a server, and of databases whose tables are not known."""

from __future__ import annotations

import json
import logging
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlencode

from mecha_exp.errors import TrackingError
from mecha_exp.system.imports import import_without_gc
from mecha_exp.system.progress import within
from mecha_exp.tracking.backend import (
    Backend,
    Entries,
    copy_artifacts,
    local_folder,
    place_of,
    tracking_errors,
)
from mecha_exp.tracking.database import artifacts_beside
from mecha_exp.tracking.names import PARENT_TAG, SWEPT_TAG

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput, Metric, Param, Run, RunTag
    from mlflow.tracking import MlflowClient

TRAINING_VIEW = {"workflowType": "machine_learning"}
"""The tag that makes MLflow show runs rather than traces of language models."""
ANSWER_SECONDS = 5
CALL_SECONDS, FILE_SECONDS = 120, 1800
"""How long a server may take for one call, and for the files of a run."""
SERVER = ("http://", "https://")
"""How addresses of servers begin."""
WRITERS = 8
"""Runs that are logged to a server at a time: MLflow's has four processes unless it is told otherwise."""
MAX_PARAMS_A_BATCH = 100
MAX_METRICS_A_BATCH = 900  # of 1,000 entries in all, the rest for tags
MAX_RUNS = 10_000
MAX_COMPARED = 100
"""The runs of a sweep that an address of the dashboard names: longer ones are cut by servers."""

# By default MLflow sends telemetry, retries a dead server for minutes, and prints two lines for each run.
_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "GIT_PYTHON_REFRESH": "quiet",
}


def last_comparison(uri: str) -> str | None:
    """The part of the dashboard's address that compares the runs of the last sweep; None without one.

    Raises:
        TrackingError: the store does not answer or cannot be used.
    """
    with tracking_errors(uri):
        client = make_client(uri)
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        is_sweep, newest = f"tags.`{SWEPT_TAG}` LIKE '%'", ["attributes.start_time DESC"]
        for sweep in client.search_runs(experiments, is_sweep, max_results=1, order_by=newest):
            experiment, is_point = sweep.info.experiment_id, f"tags.`{PARENT_TAG}` = '{sweep.info.run_id}'"
            runs = client.search_runs([experiment], is_point, max_results=MAX_COMPARED)
            names = json.dumps([run.info.run_id for run in runs])
            query = {"runs": names, "experiments": json.dumps([experiment]), **TRAINING_VIEW}
            return f"/#/compare-runs?{urlencode(query)}"
    return None


def make_client(uri: str) -> MlflowClient:
    """MLflow's client of a store, without its telemetry and its chatter.

    Raises:
        TrackingError: the store is a server that does not answer.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if uri.startswith(SERVER):
        _require_answer(uri)
    for chatty in ("alembic", "mlflow.store.db.utils", "mlflow.utils"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    import_without_gc("mlflow.tracking")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    return cast("MlflowClient", _Limited(client)) if uri.startswith(SERVER) else client


class _Limited:
    """A client of a server, each of whose calls has an end; MLflow's own limit is one of silence."""

    def __init__(self, client: MlflowClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)
        seconds = FILE_SECONDS if "artifact" in name else CALL_SECONDS
        return lambda *arguments, **named: within(seconds, partial(call, *arguments, **named))


class ClientBackend(Backend):
    """An experiment that MLflow's client reaches; it is created when needed.

    Args:
        uri: of a server, or of a database.
        experiment: its name.
    """

    def __init__(self, uri: str, experiment: str) -> None:
        self._uri, self._client = uri, make_client(uri)
        self.writers = WRITERS if uri.startswith(SERVER) else 1
        self._one_by_one = threading.Lock()
        self._experiment = self._find_experiment(experiment)

    def start(self, name: str, tags: Mapping[str, str]) -> str:
        return str(self._client.create_run(self._experiment, run_name=name, tags=dict(tags)).info.run_id)

    def log(
        self, name: str, status: str, times: tuple[int, int], entries: Entries, artifacts: Sequence[Path]
    ) -> str:
        run = self._client.create_run(
            self._experiment, start_time=times[0], run_name=name, tags=dict(entries.tags)
        )
        run_id = str(run.info.run_id)
        params, metrics = iter(_params(entries.parameters)), _metrics(entries)
        self._client.log_batch(run_id, metrics=metrics, params=list(islice(params, MAX_PARAMS_A_BATCH)))
        while batch := list(islice(params, MAX_PARAMS_A_BATCH)):
            self._client.log_batch(run_id, params=batch)
        self._log_datasets(run_id, entries)
        self._copy(run, artifacts)
        self._client.set_terminated(run_id, status, end_time=times[1])
        return run_id

    def add(
        self, run_id: str, entries: Entries, artifacts: Sequence[Path], status: str | None = None
    ) -> None:
        metrics = _metrics(entries)
        self._client.log_batch(run_id, metrics[:MAX_METRICS_A_BATCH], tags=_run_tags(entries.tags))
        for start in range(MAX_METRICS_A_BATCH, len(metrics), MAX_METRICS_A_BATCH):
            self._client.log_batch(run_id, metrics[start : start + MAX_METRICS_A_BATCH])
        self._log_datasets(run_id, entries)
        self._copy(self._client.get_run(run_id), artifacts)
        if status is not None:
            self._client.set_terminated(run_id, status)

    def _log_datasets(self, run_id: str, entries: Entries) -> None:
        if not entries.datasets:
            return
        with self._one_by_one:  # MLflow breaks the constraint of a table where two name one data set first
            self._client.log_inputs(run_id, datasets=_datasets(entries.datasets))

    def delete(self, run_id: str) -> None:
        self._client.delete_run(run_id)

    def describe(self, tags: Mapping[str, str]) -> None:
        for name, value in tags.items():
            self._client.set_experiment_tag(self._experiment, name, value)

    def status(self, run_id: str) -> str | None:
        from mlflow.exceptions import MlflowException

        try:
            run = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return str(run.info.status) if run.info.lifecycle_stage == "active" else None

    def runs_with(self, tag: str, value: str) -> dict[str, str]:
        quoted = value.replace("'", "\\'")
        runs = self._search(f"tags.`{tag}` = '{quoted}'")
        return {str(run.info.run_id): str(run.info.status) for run in runs}

    def running(self, tag: str) -> dict[str, str]:
        runs = self._search(f"attributes.status = 'RUNNING' and tags.`{tag}` LIKE '%'")
        return {str(run.info.run_id): str(run.data.tags[tag]) for run in runs}

    def _search(self, condition: str) -> list[Run]:
        return list(self._client.search_runs([self._experiment], condition, max_results=MAX_RUNS))

    def _copy(self, run: Run, artifacts: Sequence[Path]) -> None:
        """Copy files to a run's artifacts.

        A local store is written directly, since MLflow would query its database once for each file.
        """
        if folder := local_folder(str(run.info.artifact_uri)):
            copy_artifacts(artifacts, folder)
            return
        for path in artifacts:
            if path.is_dir():
                self._client.log_artifacts(str(run.info.run_id), str(path), path.name)
            else:
                self._client.log_artifact(str(run.info.run_id), str(path), place_of(path))

    def _find_experiment(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            return str(experiment.experiment_id)
        from mlflow.exceptions import MlflowException

        try:  # a server decides where its artifacts lie
            return str(self._client.create_experiment(name, artifacts_beside(self._uri)))
        except MlflowException:
            experiment = self._client.get_experiment_by_name(name)  # another process created it meanwhile
            if experiment is None:
                raise
            return str(experiment.experiment_id)


def _require_answer(uri: str) -> None:
    """Raise a TrackingError unless a server answers one short request; MLflow itself would keep trying."""
    try:
        ask = partial(urllib.request.urlopen, uri.rstrip("/") + "/health", timeout=ANSWER_SECONDS)
        within(2 * ANSWER_SECONDS, ask).close()
    except urllib.error.HTTPError:
        return  # it answers; other errors show when it is used
    except (OSError, ValueError) as error:
        raise TrackingError(f"the MLflow server at {uri} does not answer ({error}).") from None


def _metrics(entries: Entries) -> list[Metric]:
    from mlflow.entities import Metric

    return [Metric(*measured) for measured in entries.measured]


def _params(values: Mapping[str, str]) -> list[Param]:
    from mlflow.entities import Param

    return [Param(name, value) for name, value in values.items()]


def _datasets(digests: Mapping[tuple[str, str], str]) -> list[DatasetInput]:
    """What runs were measured by, as MLflow's datasets: its digest is the evaluation's."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    return [
        DatasetInput(Dataset(name, digest, "evaluator", name), [InputTag("mlflow.data.context", split)])
        for (name, split), digest in digests.items()
    ]


def _run_tags(values: Mapping[str, str]) -> list[RunTag]:
    from mlflow.entities import RunTag

    return [RunTag(name, value) for name, value in values.items()]
