"""Runs in an MLflow store: a local database or a server.

A finished run is logged at once, from the files in its folder. So a run that could not be logged can be
logged later, and no run stays half-logged when its process dies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mecha_exp.tracking import names
from mecha_exp.tracking.backend import Backend, Entries, tracking_errors
from mecha_exp.tracking.database import SQLITE, absolute_uri, create_database
from mecha_exp.tracking.mlflow_client import ClientBackend, make_client
from mecha_exp.tracking.names import LOGGED_BY, PARENT_TAG
from mecha_exp.tracking.processes import is_abandoned, this_process
from mecha_exp.tracking.sqlite_tables import open_tables


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
        with tracking_errors(self.uri):
            self._backend = _open(self.uri, names.experiment(experiment))

    @property
    def has_transactions(self) -> bool:
        """Whether all that is written within `transaction` is kept, or nothing of it."""
        return self._backend.has_transactions

    @property
    def writers(self) -> int:
        """How many runs may be logged at a time, from as many threads."""
        return self._backend.writers

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Write what is logged within together, where the store can."""
        with tracking_errors(self.uri), self._backend.transaction():
            yield

    def start(self, name: str, tags: Mapping[str, str]) -> str:
        """Create a parent run; returns its id."""
        with tracking_errors(self.uri):
            return self._backend.start(name, names.tags(tags))

    def name_main_metric(self, name: str, *, more_is_better: bool) -> None:
        """Say which metric of the experiment counts most: MLflow draws it first where it compares runs."""
        tags = {names.MAIN_METRIC: names.acceptable(name), names.MORE_IS_BETTER: str(more_is_better)}
        with tracking_errors(self.uri):
            self._backend.describe(tags)

    def runs_with(self, tag: str, value: str) -> dict[str, str]:
        """The status of each run whose tag has this value, by run id."""
        with tracking_errors(self.uri):
            return self._backend.runs_with(names.acceptable(tag), value)

    def status(self, run_id: str) -> str | None:
        """The status of a run; None if the store has no such run, or it was deleted."""
        with tracking_errors(self.uri):
            return self._backend.status(run_id)

    def delete_abandoned(self) -> None:
        """Delete runs that a process of this machine was logging when it was killed."""
        with tracking_errors(self.uri):
            for run_id, logged_by in self._backend.running(LOGGED_BY).items():
                if is_abandoned(logged_by):
                    self._backend.delete(run_id)

    def fetch(self, run_id: str, folder: Path) -> Path:
        """Copy a run's artifacts into a folder; returns their path."""
        folder.mkdir(parents=True, exist_ok=True)
        with tracking_errors(self.uri):
            return Path(make_client(self.uri).download_artifacts(run_id, "", str(folder)))

    def delete(self, run_id: str) -> None:
        """Delete a run, such as one that was logged in part."""
        with tracking_errors(self.uri):
            self._backend.delete(run_id)

    def finish(
        self,
        run_id: str,
        status: str,
        metrics: Mapping[str, float],
        tags: Mapping[str, str],
        artifacts: Iterable[Path],
        histories: Mapping[str, Mapping[int, float]] | None = None,
        began: int = 0,
    ) -> None:
        """End a run with its last metrics, tags and artifacts, and with the values of metrics by step.

        Args:
            run_id: of the run.
            status: `FINISHED` or `FAILED`.
            metrics, tags: by name.
            artifacts: files and folders to copy to the store.
            histories: values by step, by the name of the metric.
            began: the time of the histories, in milliseconds since 1970.
        """
        with tracking_errors(self.uri):
            known = names.accepted([*metrics, *(histories or {})])
            by_step = {known[name]: values for name, values in (histories or {}).items()}
            last = {known[name]: float(value) for name, value in metrics.items()}
            entries = Entries(last, tags=names.tags(tags), histories=by_step, began=began)
            self._backend.add(run_id, entries, _existing(artifacts), status)

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
        """Log a finished run; returns its id. Numbers among the parameters are metrics `hp/NAME`, too.

        Args:
            name: of the run.
            status: `FINISHED` or `FAILED`.
            times: start and end, in milliseconds since 1970.
            parameters, metrics, tags: by name; long lists of parameters are sent in several batches.
            artifacts: files and folders to copy to the store.
            parent: the id of the sweep's run.
            datasets: the digest of what each split was measured by, by evaluator and split.
        """
        with tracking_errors(self.uri):
            entries = Entries(
                names.metrics({**metrics, **names.hyperparameters(parameters), **metrics}),
                times[1],
                names.parameters(parameters),
                names.tags({**tags, **({PARENT_TAG: parent} if parent else {LOGGED_BY: this_process()})}),
                _short(datasets),
            )
            return self._backend.log(name, status, times, entries, _existing(artifacts))

    def add(
        self,
        run_id: str,
        metrics: Mapping[str, float],
        artifacts: Iterable[Path],
        datasets: Mapping[tuple[str, str], str] | None = None,
    ) -> None:
        """Add to a run that has ended; files of the same names are replaced."""
        with tracking_errors(self.uri):
            entries = Entries(names.metrics(metrics), datasets=_short(datasets))
            self._backend.add(run_id, entries, _existing(artifacts))


def _short(datasets: Mapping[tuple[str, str], str] | None) -> dict[tuple[str, str], str]:
    """The digests of datasets as MLflow accepts them."""
    return {key: digest[: names.MAX_DIGEST] for key, digest in (datasets or {}).items()}


def _open(uri: str, experiment: str) -> Backend:
    """Open an experiment: by the tables of a database where they are known, else by MLflow's client."""
    if uri.startswith(SQLITE):
        create_database(Path(uri.removeprefix(SQLITE)))
        if tables := open_tables(uri, experiment):
            return tables
    return ClientBackend(uri, experiment)


def _existing(artifacts: Iterable[Path]) -> list[Path]:
    """The files and folders that exist, without empty files such as the log of a point without warnings."""
    return [path for path in artifacts if path.is_dir() or (path.exists() and path.stat().st_size)]
