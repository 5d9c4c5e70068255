"""Runs in an MLflow store: a local database or a server.

A finished run is logged in a few batches, from the files in its folder. So a run that could not be logged can
be logged later, and no run stays half-logged when its process dies.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit
from urllib.request import url2pathname

from mecha_exp.errors import TrackingError
from mecha_exp.system.imports import import_without_gc
from mecha_exp.tracking.database import SQLITE, absolute_uri, create_database

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput, Metric, Param, Run, RunTag
    from mlflow.tracking import MlflowClient

ARTIFACTS_FOLDER = "mlartifacts"
PARENT_TAG = "mlflow.parentRunId"
SWEPT_TAG = "swept"
"""The tag of a sweep's run with the keys that differ between its points."""
TRAINING_VIEW = {"workflowType": "machine_learning"}
"""What has MLflow show runs rather than traces of language models."""
HYPERPARAMETER = "hp/"
"""The start of the metrics that repeat numeric parameters: MLflow searches and plots metrics as numbers."""
LOGGED_BY = "logged_by"
"""The tag with the machine, the process and the time of logging: it tells a run that was abandoned."""
LOGGING_SECONDS = 3600
"""How long a process that this one cannot see is taken to be logging."""
ANSWER_SECONDS = 5
MAX_PARAMS_A_BATCH = 100
MAX_RUNS = 10_000
MAX_COMPARED = 100
"""The runs of a sweep that an address of the dashboard names: longer ones are cut by servers."""
MAX_VALUE, MAX_KEY, MAX_DIGEST = 6000, 250, 36

# By default MLflow sends telemetry, and retries a dead server for minutes.
_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "GIT_PYTHON_REFRESH": "quiet",
}


def last_comparison(uri: str) -> str | None:
    """The part of the dashboard's address that compares the runs of the last sweep; None without one.

    Raises:
        TrackingError: the store does not answer or cannot be used.
    """
    with _tracking_errors(uri):
        client = _client(uri)
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        is_sweep, newest = f"tags.`{SWEPT_TAG}` LIKE '%'", ["attributes.start_time DESC"]
        for sweep in client.search_runs(experiments, is_sweep, max_results=1, order_by=newest):
            experiment, is_point = sweep.info.experiment_id, f"tags.`{PARENT_TAG}` = '{sweep.info.run_id}'"
            runs = client.search_runs([experiment], is_point, max_results=MAX_COMPARED)
            names = json.dumps([run.info.run_id for run in runs])
            query = {"runs": names, "experiments": json.dumps([experiment]), **TRAINING_VIEW}
            return f"/#/compare-runs?{urlencode(query)}"
    return None


class Store:
    """An experiment in an MLflow store, to which runs are logged.

    Args:
        uri: `sqlite:///path` (relative to the current folder; created when needed) or a server's address.
        experiment: the MLflow experiment, created when needed.

    Raises:
        TrackingError: the store does not answer or cannot be used, from any method.
    """

    def __init__(self, uri: str, experiment: str) -> None:
        self.uri = absolute_uri(uri)
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        if self.uri.startswith(("http://", "https://")):
            _require_answer(self.uri)
        with _tracking_errors(self.uri):
            self._client = _client(self.uri)
            self._experiment = self._find_experiment(experiment)

    def start(self, name: str, tags: Mapping[str, str]) -> str:
        """Create a parent run; returns its id."""
        with _tracking_errors(self.uri):
            run = self._client.create_run(self._experiment, run_name=name, tags=_tags(tags))
        return str(run.info.run_id)

    def runs_with(self, tag: str, value: str) -> dict[str, str]:
        """The status of each run whose tag has this value, by run id."""
        quoted = value.replace("'", "\\'")
        with _tracking_errors(self.uri):
            runs = self._client.search_runs(
                [self._experiment], f"tags.`{_name(tag)}` = '{quoted}'", max_results=MAX_RUNS
            )
        return {str(run.info.run_id): str(run.info.status) for run in runs}

    def status(self, run_id: str) -> str | None:
        """The status of a run; None if the store has no such run, or it was deleted."""
        from mlflow.exceptions import MlflowException

        with _tracking_errors(self.uri):
            try:
                run = self._client.get_run(run_id)
            except MlflowException as error:
                if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                    return None
                raise
        return str(run.info.status) if run.info.lifecycle_stage == "active" else None

    def delete_abandoned(self) -> None:
        """Delete runs that a process of this machine was logging when it was killed."""
        condition = f"attributes.status = 'RUNNING' and tags.`{LOGGED_BY}` LIKE '{_this_machine()}:%'"
        with _tracking_errors(self.uri):
            runs = self._client.search_runs([self._experiment], condition, max_results=MAX_RUNS)
            for run in runs:
                if _is_abandoned(run.data.tags[LOGGED_BY]):
                    self._client.delete_run(run.info.run_id)

    def fetch(self, run_id: str, folder: Path) -> Path:
        """Download a run's artifacts into a folder; returns their path."""
        folder.mkdir(parents=True, exist_ok=True)
        with _tracking_errors(self.uri):
            return Path(self._client.download_artifacts(run_id, "", str(folder)))

    def delete(self, run_id: str) -> None:
        """Delete a run, such as one that was logged in part."""
        with _tracking_errors(self.uri):
            self._client.delete_run(run_id)

    def finish(
        self,
        run_id: str,
        status: str,
        metrics: Mapping[str, float],
        tags: Mapping[str, str],
        artifacts: Iterable[Path],
    ) -> None:
        """End a run with its last metrics, tags and artifacts."""
        with _tracking_errors(self.uri):
            self._client.log_batch(run_id, metrics=_metrics(metrics), tags=_run_tags(tags))
            self._copy_artifacts(self._client.get_run(run_id), [path for path in artifacts if path.exists()])
            self._client.set_terminated(run_id, status)

    def log(
        self,
        name: str,
        status: str,
        times: tuple[int, int],
        parameters: Mapping[str, Any],
        metrics: Mapping[str, float],
        tags: Mapping[str, str],
        artifacts: Iterable[Path],
        parent: str | None = None,
        datasets: Mapping[tuple[str, str], str] | None = None,
    ) -> str:
        """Log a finished run; returns its id. Numeric parameters are logged as metrics `hp/NAME`, too.

        Args:
            name: of the run.
            status: `FINISHED` or `FAILED`.
            times: start and end, in milliseconds since 1970.
            parameters, metrics, tags: by name; long lists of parameters are sent in several batches.
            artifacts: files and folders to copy to the store.
            parent: the id of the sweep's run.
            datasets: the digest of what each split was measured by, by evaluator and split.
        """
        tags = {**tags, **({PARENT_TAG: parent} if parent else {LOGGED_BY: _this_process()})}
        with _tracking_errors(self.uri):
            run = self._client.create_run(
                self._experiment, start_time=times[0], run_name=name, tags=_tags(tags)
            )
            run_id = str(run.info.run_id)
            params = _params(parameters)
            numbers = {**_hyperparameters(parameters), **metrics}
            self._client.log_batch(
                run_id, metrics=_metrics(numbers, times[1]), params=params[:MAX_PARAMS_A_BATCH]
            )
            for start in range(MAX_PARAMS_A_BATCH, len(params), MAX_PARAMS_A_BATCH):
                self._client.log_batch(run_id, params=params[start : start + MAX_PARAMS_A_BATCH])
            if datasets:
                self._client.log_inputs(run_id, datasets=_datasets(datasets))
            self._copy_artifacts(run, artifacts)
            self._client.set_terminated(run_id, status, end_time=times[1])
        return run_id

    def add(self, run_id: str, metrics: Mapping[str, float], artifacts: Iterable[Path]) -> None:
        """Add metrics and artifacts to a run that has ended; files of the same names are replaced."""
        with _tracking_errors(self.uri):
            self._client.log_batch(run_id, metrics=_metrics(metrics))
            self._copy_artifacts(self._client.get_run(run_id), [path for path in artifacts if path.exists()])

    def _copy_artifacts(self, run: Run, artifacts: Iterable[Path]) -> None:
        """Copy files to a run's artifacts; Hydra's files into `config`, a folder with all that is in it.

        A local store is written directly, since MLflow would query its database once for each file.
        """
        address = str(run.info.artifact_uri)
        for path in artifacts:
            folder = "config" if path.parent.name == ".hydra" else None
            if address.startswith("file:"):
                target = Path(url2pathname(urlsplit(address).path)) / (folder or "")
                target.mkdir(parents=True, exist_ok=True)
                if path.is_dir():
                    shutil.rmtree(target / path.name, ignore_errors=True)
                    shutil.copytree(path, target / path.name)
                else:
                    shutil.copyfile(path, target / path.name)
            elif path.is_dir():
                self._client.log_artifacts(str(run.info.run_id), str(path), path.name)
            else:
                self._client.log_artifact(str(run.info.run_id), str(path), folder)

    def _find_experiment(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            return str(experiment.experiment_id)
        location = None  # a server decides it
        if self.uri.startswith(SQLITE):
            location = (Path(self.uri.removeprefix(SQLITE)).parent / ARTIFACTS_FOLDER).as_uri()
        from mlflow.exceptions import MlflowException

        try:
            return str(self._client.create_experiment(name, location))
        except MlflowException:
            experiment = self._client.get_experiment_by_name(name)  # another process created it meanwhile
            if experiment is None:
                raise
            return str(experiment.experiment_id)


def _client(uri: str) -> MlflowClient:
    import logging

    for chatty in ("alembic", "mlflow.store.db.utils", "mlflow.utils"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    import_without_gc("mlflow.tracking")
    from mlflow.tracking import MlflowClient

    if uri.startswith(SQLITE):
        create_database(Path(uri.removeprefix(SQLITE)))
    return MlflowClient(tracking_uri=uri)


def _require_answer(uri: str) -> None:
    """Raise a TrackingError unless a server answers one short request; MLflow itself would keep trying."""
    try:
        urllib.request.urlopen(uri.rstrip("/") + "/health", timeout=ANSWER_SECONDS).close()
    except urllib.error.HTTPError:
        return  # it answers; other errors show when it is used
    except (OSError, ValueError) as error:
        raise TrackingError(f"the MLflow server at {uri} does not answer ({error}).") from None


@contextmanager
def _tracking_errors(uri: str) -> Iterator[None]:
    """Turn every exception of MLflow or its database into a TrackingError."""
    try:
        yield
    except TrackingError:
        raise
    except Exception as error:
        message = str(error).strip().partition("\n")[0] or type(error).__name__
        raise TrackingError(f"the MLflow store {uri} cannot be used: {message}") from error


def _this_machine() -> str:
    """The name of this machine, as it stands in a search."""
    return "".join(c if c.isalnum() or c in "-." else "-" for c in platform.node())


def _this_process() -> str:
    """The machine, the number of this process, in which numbering it counts, and the time in seconds."""
    return f"{_this_machine()}:{os.getpid()}:{_numbering()}:{int(time.time())}"


def _numbering() -> str:
    """What tells the processes of this container from those of others; empty where the system has none."""
    try:
        return "".join(filter(str.isdecimal, str(Path("/proc/self/ns/pid").readlink())))
    except OSError:
        return ""


def _is_abandoned(logged_by: str) -> bool:
    """Whether the process of a tag is gone, or is another container's and began to log long ago."""
    _, process, *place = logged_by.split(":")
    numbering, seconds = place if len(place) == 2 else (_numbering(), "0")
    if not (process.isdecimal() and seconds.isdecimal()):
        return False
    if numbering != _numbering():
        return time.time() - int(seconds) > LOGGING_SECONDS
    return not _is_running(int(process))


def _is_running(process: int) -> bool:
    """Whether a process of this machine exists, as far as the system says."""
    if os.name == "nt":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _metrics(values: Mapping[str, float], timestamp: int = 0) -> list[Metric]:
    from mlflow.entities import Metric

    return [Metric(_name(k), float(v), timestamp, 0) for k, v in values.items()]


def _params(values: Mapping[str, Any]) -> list[Param]:
    from mlflow.entities import Param

    return [Param(_name(k), str(v)[:MAX_VALUE]) for k, v in values.items()]


def _hyperparameters(parameters: Mapping[str, Any]) -> dict[str, float]:
    numbers = {k: v for k, v in parameters.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return {HYPERPARAMETER + name: float(value) for name, value in numbers.items()}


def _datasets(digests: Mapping[tuple[str, str], str]) -> list[DatasetInput]:
    """What runs were measured by, as MLflow's datasets: its digest is the evaluation's."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    return [
        DatasetInput(
            Dataset(name, digest[:MAX_DIGEST], "evaluator", name), [InputTag("mlflow.data.context", split)]
        )
        for (name, split), digest in digests.items()
    ]


def _run_tags(values: Mapping[str, str]) -> list[RunTag]:
    from mlflow.entities import RunTag

    return [RunTag(_name(k), v) for k, v in values.items()]


def _tags(values: Mapping[str, str]) -> dict[str, str]:
    return {_name(k): v for k, v in values.items()}


def _name(text: str) -> str:
    """A name that MLflow accepts: letters, digits and `_-. :/`, and no part that is empty or of dots alone.

    >>> _name("weights/distance/.."), _name("a/"), _name("50 %")
    ('weights/distance/__', 'a/_', '50 _')
    """
    plain = "".join(c if c.isalnum() or c in "_-. :/" else "_" for c in text)[:MAX_KEY]
    return "/".join("_" * max(len(part), 1) if not part.strip(".") else part for part in plain.split("/"))
