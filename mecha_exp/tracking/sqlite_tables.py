"""Runs written straight into the tables of a local MLflow database, one or many in a transaction.

MLflow's client takes six transactions and 30 to 60 ms of processor time to log a run, after two seconds of
imports. A sweep of small models spends a third of its time so. The tables are plain, and their revision is in
the database: one that is not known here is left to the client.
"""

from __future__ import annotations

import math
import sqlite3
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from mecha_exp.errors import TrackingError
from mecha_exp.tracking.backend import Backend, Entries, copy_artifacts, local_folder, now
from mecha_exp.tracking.database import SQLITE, artifacts_beside

REVISIONS = frozenset({"dc11669786a5"})
"""The revisions of MLflow's tables that are known here: that of 3.17."""
BUSY_SECONDS = 30
"""How long a transaction waits for that of another process."""
_RUN_NAME = "mlflow.runName"
_REPLACE = "ON CONFLICT DO UPDATE SET value = excluded.value"
_NEWER = "(excluded.step, excluded.timestamp, excluded.value) > (step, timestamp, value)"


def open_tables(uri: str, experiment: str) -> TablesBackend | None:
    """Open an experiment of a database; None if its tables or the place of its artifacts are not known here.

    Args:
        uri: of an existing database.
        experiment: its name; created when needed.
    """
    file = Path(uri.removeprefix(SQLITE)).as_uri()
    database = sqlite3.connect(f"{file}?mode=rw", timeout=BUSY_SECONDS, isolation_level=None, uri=True)
    try:
        revisions = database.execute("SELECT version_num FROM alembic_version").fetchall()
        if len(revisions) == 1 and revisions[0][0] in REVISIONS:
            database.execute("PRAGMA foreign_keys = ON")
            number, place = _find_experiment(database, uri, experiment)
            if folder := local_folder(place):
                return TablesBackend(database, number, place.rstrip("/"), folder)
    except sqlite3.OperationalError as error:
        if "no such table" not in str(error):
            raise
    database.close()
    return None


class TablesBackend(Backend):
    """An experiment in the tables of a database.

    Args:
        database: a connection in autocommit mode, which is closed with this object.
        experiment: its number.
        address: of its artifacts.
        folder: that the address means.
    """

    has_transactions = True

    def __init__(self, database: sqlite3.Connection, experiment: int, address: str, folder: Path) -> None:
        self._database, self._experiment = database, experiment
        self._address, self._folder = address, folder

    def __del__(self) -> None:
        self._database.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        if self._database.in_transaction:
            yield
            return
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._database.execute("COMMIT")  # fails while another process reads long, and ends nothing
        except BaseException:
            if self._database.in_transaction:  # a full disk has ended it
                self._database.execute("ROLLBACK")
            raise

    def start(self, name: str, tags: Mapping[str, str]) -> str:
        run_id = uuid.uuid4().hex
        with self.transaction():
            self._create(run_id, name, "RUNNING", (now(), None))
            self._write(run_id, Entries(tags={_RUN_NAME: name, **tags}))
        return run_id

    def log(
        self, name: str, status: str, times: tuple[int, int], entries: Entries, artifacts: Sequence[Path]
    ) -> str:
        run_id = uuid.uuid4().hex
        copy_artifacts(artifacts, self._artifacts(run_id))
        with self.transaction():
            self._create(run_id, name, status, times)
            self._insert("tags", "key, value, run_uuid", [(_RUN_NAME, name, run_id)])
            self._write(run_id, entries)
        return run_id

    def add(
        self, run_id: str, entries: Entries, artifacts: Sequence[Path], status: str | None = None
    ) -> None:
        copy_artifacts(artifacts, self._artifacts(run_id))
        with self.transaction():
            self._write(run_id, entries)
            if status is not None:
                ended = "UPDATE runs SET status = ?, end_time = ? WHERE run_uuid = ?"
                self._database.execute(ended, (status, now(), run_id))

    def delete(self, run_id: str) -> None:
        gone = "UPDATE runs SET lifecycle_stage = 'deleted', deleted_time = ? WHERE run_uuid = ?"
        self._database.execute(gone, (now(), run_id))

    def describe(self, tags: Mapping[str, str]) -> None:
        rows = [(name, value, self._experiment) for name, value in tags.items()]
        self._insert("experiment_tags", "key, value, experiment_id", rows, _REPLACE)

    def status(self, run_id: str) -> str | None:
        query = "SELECT status FROM runs WHERE run_uuid = ? AND lifecycle_stage = 'active'"
        row = self._database.execute(query, (run_id,)).fetchone()
        return row and str(row[0])

    def runs_with(self, tag: str, value: str) -> dict[str, str]:
        return dict(self._tagged("run_uuid, status", "key = ? AND value = ?", (tag, value)))

    def running(self, tag: str) -> dict[str, str]:
        return dict(self._tagged("run_uuid, value", "key = ? AND status = 'RUNNING'", (tag,)))

    def _artifacts(self, run_id: str) -> Path:
        return self._folder / run_id / "artifacts"

    def _create(self, run_id: str, name: str, status: str, times: tuple[int, int | None]) -> None:
        address = f"{self._address}/{run_id}/artifacts"
        self._insert(
            "runs",
            "run_uuid, name, source_type, source_name, entry_point_name, user_id, status, start_time, "
            "end_time, source_version, lifecycle_stage, artifact_uri, experiment_id",
            [
                (
                    run_id,
                    name,
                    "UNKNOWN",
                    "",
                    "",
                    "unknown",
                    status,
                    *times,
                    "",
                    "active",
                    address,
                    self._experiment,
                )
            ],
        )

    def _write(self, run_id: str, entries: Entries) -> None:
        """Write entries as MLflow does; a parameter or a tag that is there is replaced."""
        metrics = [(k, *_stored(v), time, step, run_id) for k, v, time, step in entries.measured]
        columns = "key, value, is_nan, timestamp, step, run_uuid"
        latest = f"ON CONFLICT DO UPDATE SET value = excluded.value, is_nan = excluded.is_nan, \
timestamp = excluded.timestamp, step = excluded.step WHERE {_NEWER}"
        self._insert("metrics", columns, metrics, "ON CONFLICT DO NOTHING")
        self._insert("latest_metrics", columns, metrics, latest)
        for table, texts in (("params", entries.parameters), ("tags", entries.tags)):
            self._insert(table, "key, value, run_uuid", [(k, v, run_id) for k, v in texts.items()], _REPLACE)
        for (name, split), digest in entries.datasets.items():
            self._write_dataset(run_id, name, digest, split)

    def _write_dataset(self, run_id: str, name: str, digest: str, split: str) -> None:
        """Say what a run was measured by. Of two splits with one digest the first counts, as in MLflow."""
        what = (self._experiment, name, digest)
        columns = "dataset_uuid, experiment_id, name, digest, dataset_source_type, dataset_source"
        row = (uuid.uuid4().hex, *what, "evaluator", name)
        self._insert("datasets", columns, [row], "ON CONFLICT DO NOTHING")
        query = "SELECT dataset_uuid FROM datasets WHERE experiment_id = ? AND name = ? AND digest = ?"
        [dataset] = self._database.execute(query, what).fetchone()
        columns = "input_uuid, source_type, source_id, destination_type, destination_id"
        used = (uuid.uuid4().hex, "DATASET", dataset, "RUN", run_id)
        if self._insert("inputs", columns, [used], "ON CONFLICT DO NOTHING"):
            self._insert("input_tags", "input_uuid, name, value", [(used[0], "mlflow.data.context", split)])

    def _insert(
        self, table: str, columns: str, rows: Sequence[tuple[object, ...]], conflict: str = ""
    ) -> int:
        """Insert rows; returns how many were written."""
        places = ", ".join("?" * (columns.count(",") + 1))
        statement = f"INSERT INTO {table} ({columns}) VALUES ({places}) {conflict}"
        return self._database.executemany(statement, rows).rowcount

    def _tagged(self, columns: str, condition: str, values: tuple[str, ...]) -> Sequence[tuple[str, str]]:
        """Columns of the active runs of the experiment whose tags are as asked for."""
        query = (
            f"SELECT {columns} FROM runs JOIN tags USING (run_uuid) "
            f"WHERE experiment_id = ? AND lifecycle_stage = 'active' AND {condition}"
        )
        return self._database.execute(query, (self._experiment, *values)).fetchall()


def _stored(value: float) -> tuple[float, bool]:
    """A number as MLflow stores it, with whether it is a NaN: infinities become the largest numbers."""
    if math.isnan(value):
        return 0.0, True
    return max(-sys.float_info.max, min(value, sys.float_info.max)), False


def _find_experiment(database: sqlite3.Connection, uri: str, name: str) -> tuple[int, str]:
    """The number of an experiment and the address of its artifacts.

    Raises:
        TrackingError: it was deleted.
    """
    query = "SELECT experiment_id, artifact_location, lifecycle_stage FROM experiments WHERE name = ?"
    if (row := database.execute(query, (name,)).fetchone()) is None:
        columns = "experiment_id, name, artifact_location, lifecycle_stage, creation_time, last_update_time"
        insert = (
            f"INSERT INTO experiments ({columns}) VALUES (?, ?, ?, 'active', ?, ?) ON CONFLICT DO NOTHING"
        )
        first = (0, "Default", str(Path("mlruns/0").absolute()), now(), now())  # as MLflow's own first one
        if database.execute("SELECT 1 FROM experiments").fetchone() is None:
            database.execute(insert, first)
        database.execute(insert, (None, name, artifacts_beside(uri), now(), now()))
        row = database.execute(query, (name,)).fetchone()
    number, address, stage = row
    if stage != "active":
        raise TrackingError(
            f"the experiment '{name}' of {uri} was deleted. Name another with tracking.experiment=..., or "
            f"restore it with: mlflow experiments restore --experiment-id {number}"
        )
    return int(number), str(address)
