"""The MLflow store: what is logged is there, and what cannot be logged is a TrackingError that says why."""

import os
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from mecha_exp.app.tracking import log_run, log_sweep
from mecha_exp.errors import TrackingError
from mecha_exp.runs.record import Record
from mecha_exp.runs.sweep import Sweep
from mecha_exp.tracking import Store, sqlite_tables
from mecha_exp.tracking.database import absolute_uri, create_database
from mecha_exp.tracking.mlflow_client import ClientBackend
from mecha_exp.tracking.processes import is_abandoned, numbering, this_machine
from mecha_exp.tracking.sqlite_tables import TablesBackend


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tracking")


@pytest.fixture(scope="module", params=["tables", "client"])
def store(request: pytest.FixtureRequest, folder: Path) -> Store:
    """A store of each kind, on one database: its tables written directly, and through MLflow's client."""
    return store_of(folder / "outputs/mlflow.db", request.param)


def store_of(database: Path, kind: str = "tables") -> Store:
    with pytest.MonkeyPatch.context() as patch:
        if kind == "client":
            patch.setattr(sqlite_tables, "REVISIONS", frozenset())
        store = Store(f"sqlite:///{database.as_posix()}", "lab")
    assert type(store._backend) is {"tables": TablesBackend, "client": ClientBackend}[kind]
    return store


@pytest.fixture(scope="module")
def client(store: Store) -> MlflowClient:
    return MlflowClient(store.uri)


def test_a_run_keeps_its_times_status_and_figures(store, client, tmp_path):
    (tmp_path / "table.csv").write_text("a,b\n")

    run_id = store.log(
        "alpha=0.3",
        "FAILED",
        (1000, 5000),
        {"alpha": 0.3},
        {"acc": 0.5},
        {"why": "x"},
        [tmp_path / "table.csv"],
    )

    run = client.get_run(run_id)
    assert (run.info.run_name, run.info.status) == ("alpha=0.3", "FAILED")
    assert (run.info.start_time, run.info.end_time) == (1000, 5000)
    assert run.data.params == {"alpha": "0.3"}
    assert run.data.metrics == {"acc": 0.5, "hp/alpha": 0.3}
    assert [a.path for a in client.list_artifacts(run_id)] == ["table.csv"]


def test_a_child_points_to_its_parent(store, client):
    parent = store.start("sweep", {"command": "x"})

    child = store.log("p", "FINISHED", (0, 1), {}, {}, {}, [], parent)
    store.finish(parent, "FINISHED", {"best": 1.0}, {}, [])

    assert client.get_run(child).data.tags["mlflow.parentRunId"] == parent
    assert client.get_run(parent).info.status == "FINISHED"


def test_more_parameters_than_a_batch_holds_and_values_that_are_too_long(store, client):
    parameters = {f"p{i}": "v" * 7000 for i in range(150)}

    run_id = store.log("p", "FINISHED", (0, 1), parameters, {}, {}, [])

    logged = client.get_run(run_id).data.params
    assert len(logged) == 150
    assert len(logged["p149"]) == 6000


def test_names_that_mlflow_refuses_are_made_acceptable(store, client):
    run_id = store.log("p", "FINISHED", (0, 1), {"blocks[0]@x": 1}, {"acc%": 1.0}, {}, [])

    assert client.get_run(run_id).data.params == {"blocks_0__x": "1"}


def test_artifacts_lie_beside_the_database(store, folder, tmp_path):
    (tmp_path / "file.txt").write_text("x")

    store.log("p", "FINISHED", (0, 1), {}, {}, {}, [tmp_path / "file.txt"])

    assert list((folder / "outputs" / "mlartifacts").rglob("file.txt"))


def test_a_relative_database_means_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert (
        absolute_uri("sqlite:///outputs/mlflow.db")
        == f"sqlite:///{(tmp_path / 'outputs/mlflow.db').as_posix()}"
    )
    assert absolute_uri("http://host:5000") == "http://host:5000"


def test_a_database_from_the_cache_is_as_mlflow_makes_it(tmp_path, monkeypatch):
    monkeypatch.setenv("MECHA_EXP_CACHE", "off")
    create_database(tmp_path / "own.db")
    MlflowClient(f"sqlite:///{(tmp_path / 'own.db').as_posix()}").search_experiments()
    monkeypatch.setenv("MECHA_EXP_CACHE", str(tmp_path / "cache"))
    create_database(tmp_path / "first.db")
    [kept] = (tmp_path / "cache/tracking").iterdir()
    create_database(tmp_path / "second.db")

    MlflowClient(
        f"sqlite:///{(tmp_path / 'second.db').as_posix()}"
    ).search_experiments()  # adds the first one
    assert kept.read_bytes().endswith((tmp_path / "first.db").read_bytes())
    assert tables(tmp_path / "second.db") == tables(tmp_path / "own.db") > tables(tmp_path / "first.db")

    kept.write_bytes(b"damaged")
    create_database(tmp_path / "third.db")

    assert tables(tmp_path / "third.db") == tables(tmp_path / "first.db")


def test_the_first_experiment_of_a_database_from_the_cache_lies_where_it_would_without(tmp_path, monkeypatch):
    monkeypatch.setenv("MECHA_EXP_CACHE", str(tmp_path / "cache"))
    create_database(tmp_path / "first.db")
    monkeypatch.chdir(tmp_path)

    create_database(tmp_path / "second.db")
    [default] = MlflowClient(f"sqlite:///{(tmp_path / 'second.db').as_posix()}").search_experiments()

    assert default.artifact_location == str(tmp_path / "mlruns/0")


def tables(database: Path) -> set[tuple[object, ...]]:
    """The columns, indices, experiments and revision of a database. MLflow orders its checks by chance."""
    with closing(sqlite3.connect(database)) as connection:
        columns = "SELECT m.type, m.name, c.* FROM sqlite_master m LEFT JOIN pragma_table_info(m.name) c"
        experiments = "SELECT name FROM experiments"
        return {
            row
            for query in (columns, experiments, "SELECT * FROM alembic_version")
            for row in connection.execute(query)
        }


def test_a_server_that_does_not_answer_is_said_at_once(free_port):
    with pytest.raises(TrackingError, match="does not answer"):
        Store(f"http://127.0.0.1:{free_port}", "lab")


def test_a_database_that_is_none(tmp_path):
    (tmp_path / "mlflow.db").write_text("this is not a database, it is a text of some length " * 40)

    with pytest.raises(TrackingError, match="cannot be used"):
        Store(f"sqlite:///{(tmp_path / 'mlflow.db').as_posix()}", "lab")


@pytest.mark.parametrize("uri", ["sqlite:///", "sqlite:///.", "sqlite://", "sqlite:mlflow.db"])
def test_an_address_without_a_file_is_said_at_once(uri):
    with pytest.raises(TrackingError, match="names no file: write it as sqlite:///outputs"):
        Store(uri, "lab")


@pytest.mark.parametrize("name", ["a%20b.db", "a%41.db", "a.db?timeout=3"])
def test_a_file_that_mlflow_would_look_for_elsewhere_is_refused(tmp_path, name):
    with pytest.raises(TrackingError, match=r"MLflow would not find .* with tracking=none"):
        Store(f"sqlite:///{tmp_path}/{name}", "lab")

    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a b.db", "50 %.db", "a#b.db", "\u00e4+&=;@.db", "a:b'\".db"])
def test_mlflow_finds_the_database_whatever_it_is_called(tmp_path, name):
    store = store_of(tmp_path / name)
    run_id = store.log("p", "FINISHED", (0, 1), {}, {"acc": 0.5}, {}, [])

    assert MlflowClient(store.uri).get_run(run_id).data.metrics == {"acc": 0.5}
    assert {path.name for path in tmp_path.iterdir()} <= {name, "mlartifacts"}


@pytest.mark.parametrize("name", ["", " ", None, "x" * 501])
def test_names_of_experiments_that_mlflow_refuses_are_refused(tmp_path, name):
    with pytest.raises(TrackingError, match="expected a name of 1 to 500 characters"):
        Store(f"sqlite:///{tmp_path}/mlflow.db", name)


def test_a_number_that_no_metric_holds_is_an_error_of_tracking(store):
    with pytest.raises(TrackingError, match="too large"):
        store.log("p", "FINISHED", (0, 1), {"seed": 10**400}, {}, {}, [])


def test_a_number_is_the_name_of_an_experiment(tmp_path):
    store = Store(f"sqlite:///{tmp_path}/mlflow.db", 2024)

    assert MlflowClient(store.uri).get_experiment_by_name("2024") is not None


def test_runs_of_processes_that_are_gone_are_deleted(store, client):
    lab = client.get_experiment_by_name("lab").experiment_id
    abandoned = client.create_run(lab, tags={"logged_by": f"{this_machine()}:{2**31 - 1}"})
    alive = client.create_run(lab, tags={"logged_by": f"{this_machine()}:{os.getpid()}"})
    elsewhere = client.create_run(lab, tags={"logged_by": "another:1"})

    store.delete_abandoned()

    assert store.status(abandoned.info.run_id) is None
    assert store.status(alive.info.run_id) == store.status(elsewhere.info.run_id) == "RUNNING"
    assert store.status("0" * 32) is None
    for run in (alive, elsewhere):
        store.delete(run.info.run_id)


@pytest.mark.parametrize(
    ("process", "its_numbering", "age", "is_gone"),
    [
        (os.getpid(), "", 10_000, False),
        (2**31 - 1, "", 0, True),
        (os.getpid(), "1", 10, False),  # another container's: it may be at work
        (2**31 - 1, "1", 10, False),
        (os.getpid(), "1", 10_000, True),
    ],
    ids=["alive", "gone", "other numbers", "gone, other numbers", "long ago"],
)
def test_a_process_of_another_container_is_not_judged_by_its_number(process, its_numbering, age, is_gone):
    place = f"{its_numbering or numbering()}:{int(time.time()) - age}"

    assert is_abandoned(f"{this_machine()}:{process}:{place}") == is_gone


def test_a_run_is_logged_once(store, tmp_path):
    record = Record("p")
    record.save(tmp_path)

    assert log_run(tmp_path, record, store)
    assert not log_run(tmp_path, Record.load(tmp_path), store)


def test_a_sweep_is_logged_once_and_what_is_missing_later(store, client, tmp_path):
    Sweep("s", ["alpha"], ["python"], 2).save(tmp_path)
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        Record(f"p{number}", parameters={"alpha": number}).save(tmp_path / str(number))

    assert [log_sweep(tmp_path, store) for _ in range(2)] == [2, 0]

    store.delete(str(Record.load(tmp_path / "1").run_id))
    assert log_sweep(tmp_path, store) == 1
    runs = store.runs_with("mlflow.parentRunId", str(Sweep.load(tmp_path).parent_run))
    assert sorted(runs.values()) == ["FINISHED"] * 2


@pytest.mark.parametrize(
    "name", ["a/", "a//b", "weights/distance/.", "..", "../a", "", "/", "50 %", "a" * 300]
)
def test_every_name_is_one_that_mlflow_accepts(store, client, name):
    run_id = store.log("p", "FINISHED", (0, 1), {}, {name: 1.0}, {}, [])

    assert list(client.get_run(run_id).data.metrics.values()) == [1.0]


def test_an_empty_file_is_not_an_artifact(store, client, tmp_path):
    (tmp_path / "table.csv").write_text("a")
    (tmp_path / "run.log").touch()
    run_id = store.log("p", "FINISHED", (0, 1), {}, {}, {}, [tmp_path / "table.csv", tmp_path / "run.log"])
    assert [a.path for a in client.list_artifacts(run_id)] == ["table.csv"]


def test_metrics_and_artifacts_are_added_to_a_run_that_has_ended(store, client, tmp_path):
    table = tmp_path / "table.csv"
    table.write_text("old")
    run_id = store.log("p", "FINISHED", (0, 1), {}, {"accuracy": 0.5}, {}, [table])
    table.write_text("new")

    files = [table, tmp_path / "missing.csv"]
    store.add(run_id, {"test/accuracy": 0.4}, files, {("digits", "test"): "0123"})

    run = client.get_run(run_id)
    assert run.data.metrics == {"accuracy": 0.5, "test/accuracy": 0.4}
    (used,) = run.inputs.dataset_inputs
    assert (used.dataset.name, used.dataset.digest, used.tags[0].value) == ("digits", "0123", "test")
    assert run.info.status == "FINISHED"
    assert (store.fetch(run_id, tmp_path / "fetched") / "table.csv").read_text() == "new"


def test_the_experiment_says_which_metric_counts(store, client):
    for name, more_is_better in (("acc%", True), ("loss", False)):
        store.name_main_metric(name, more_is_better=more_is_better)

    tags = client.get_experiment_by_name("lab").tags
    assert tags["mlflow.experiment.primaryMetric.name"] == "loss"
    assert tags["mlflow.experiment.primaryMetric.greaterIsBetter"] == "False"


def test_hyperparameters_follow_the_metrics(store, client):
    run_id = store.log("p", "FINISHED", (0, 1), {"alpha": 0.3}, {"loss": 0.5, "acc": 0.2}, {}, [])

    assert [*client.get_run(run_id).data.metrics] == ["loss", "acc", "hp/alpha"]


def log_everything(store: Store, folder: Path) -> None:
    """Log a sweep with all that runs can have."""
    (folder / "0/.hydra").mkdir(parents=True, exist_ok=True)
    for name in ("table.csv", "0/.hydra/config.yaml"):
        (folder / name).write_text(name)
    store.name_main_metric("half", more_is_better=True)
    parent = store.start("sweep", {"command": "x" * 9000, "folder": "it's"})
    splits = {("digits", "validation"): "1" * 40, ("digits", "test"): "2", ("faces", "validation"): "2"}
    numbers = {"nan": float("nan"), "inf": float("inf"), "low": float("-inf"), "half": 0.5, "a/": 1.0}
    parameters = {"alpha": 0.3, "n": 3, "on": True, "long": "y" * 9000, **{f"p{i}": i for i in range(120)}}
    files = [folder / "table.csv", folder / "0", folder / "0/.hydra/config.yaml"]
    child = store.log("p", "FINISHED", (1000, 2000), parameters, numbers, {"why": "z"}, files, parent, splits)
    store.log("alone", "FAILED", (1, 2), {}, {"half": 0.5}, {}, [], None, splits)
    store.add(child, {"half": 0.25, "more": 1.0}, [])
    store.delete(store.log("gone", "FINISHED", (1, 2), {}, {}, {}, [], parent))
    steps = {"loss/entropy": {0: 1.0, 1: 0.5, 2: 0.75}}
    store.finish(parent, "FINISHED", {"best/half": 0.5}, {"swept": "alpha", "command": "y"}, [], steps, 7)


def contents(database: Path) -> dict[str, list[tuple[object, ...]]]:
    """The rows of a database's tables, with a number for each id and for each moment of writing."""
    with closing(sqlite3.connect(database)) as connection:
        names = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        tables = {name: connection.execute(f'SELECT * FROM "{name}"').fetchall() for name in names}
    runs = {row[0]: f"run {row[1]}" for row in tables["runs"]}
    known = {**runs, **{row[0]: f"dataset {row[2:4]}" for row in tables["datasets"]}}
    known |= {row[0]: f"input {known[row[2]]} {known[row[4]]}" for row in tables["inputs"]}

    def plain(cell: object) -> object:
        if isinstance(cell, int) and cell > 1e12:
            return "now"
        text = str(cell)
        for id_, name in known.items():
            text = text.replace(id_, name)
        return "logger" if text.startswith(f"{this_machine()}:") else text

    return {name: sorted(tuple(map(plain, row)) for row in rows) for name, rows in tables.items()}


def test_the_tables_are_written_as_mlflow_writes_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "files").mkdir()

    written = {}
    for kind in ("client", "tables"):
        (tmp_path / "lab").mkdir()
        log_everything(store_of(tmp_path / "lab/mlflow.db", kind), tmp_path / "files")
        artifacts = sorted(path.name for path in (tmp_path / "lab/mlartifacts").glob("*/artifacts/**/*"))
        written[kind] = {**contents(tmp_path / "lab/mlflow.db"), "artifacts": artifacts}
        (tmp_path / "lab").rename(tmp_path / kind)

    assert written["tables"] == written["client"]
    assert len(written["tables"]["metrics"]) == 134 and len(written["tables"]["input_tags"]) == 6


def test_a_value_that_is_logged_again_is_the_latest_one(store, client):
    run_id = store.log("p", "FINISHED", (0, 1), {}, {"loss": 0.5}, {}, [])

    store.add(run_id, {"loss": 0.4}, [])

    assert client.get_run(run_id).data.metrics == {"loss": 0.4}


def test_tables_of_another_revision_are_left_to_mlflow(tmp_path):
    create_database(tmp_path / "mlflow.db")
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = 'older'")

    assert sqlite_tables.open_tables(f"sqlite:///{tmp_path}/mlflow.db", "lab") is None
    with pytest.raises(TrackingError, match="cannot be used"):  # MLflow says what to do with it
        Store(f"sqlite:///{tmp_path}/mlflow.db", "lab")


def test_artifacts_that_lie_elsewhere_are_left_to_mlflow(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    create_database(tmp_path / "mlflow.db")
    MlflowClient(uri).create_experiment("remote", "s3://bucket/runs")

    assert sqlite_tables.open_tables(uri, "remote") is None


def test_an_experiment_that_was_deleted_is_said(tmp_path):
    store = store_of(tmp_path / "mlflow.db")
    client = MlflowClient(store.uri)
    client.delete_experiment(client.get_experiment_by_name("lab").experiment_id)

    with pytest.raises(TrackingError, match=r"experiment 'lab' of .* was deleted\. Name another with"):
        store_of(tmp_path / "mlflow.db")


def test_a_run_that_cannot_be_written_leaves_nothing(tmp_path):
    store = store_of(tmp_path / "mlflow.db")

    with pytest.raises(TrackingError, match="cannot be used"):
        store.log("p", "no such status", (0, 1), {"alpha": 1}, {"acc": 0.5}, {}, [])

    assert not any(contents(tmp_path / "mlflow.db")[table] for table in ("runs", "metrics", "params", "tags"))


def test_a_transaction_that_cannot_end_is_taken_back(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite_tables, "BUSY_SECONDS", 0.1)
    store = store_of(tmp_path / "mlflow.db")
    with closing(sqlite3.connect(tmp_path / "mlflow.db", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM experiments").fetchone()
        with pytest.raises(TrackingError, match="database is locked"):
            store.log("first", "FINISHED", (0, 1), {}, {}, {}, [])

    run_id = store.log("second", "FINISHED", (0, 1), {}, {}, {}, [])

    assert [row[0] for row in contents(tmp_path / "mlflow.db")["runs"]] == ["run second"]
    assert store_of(tmp_path / "mlflow.db").status(run_id) == "FINISHED"


def test_two_processes_log_to_one_database(tmp_path):
    code = """
import sys
from mecha_exp.tracking import Store
store = Store(sys.argv[1], "lab")
parent = store.start("sweep", {"command": "x"})
for number in range(50):
    store.log(str(number), "FINISHED", (0, 1), {"alpha": number}, {"acc": number}, {}, [], parent)
print(len(store.runs_with("mlflow.parentRunId", parent)), "mlflow" in sys.modules)
"""
    create_database(tmp_path / "mlflow.db")  # by MLflow, if no other test has made one
    command = [sys.executable, "-c", code, f"sqlite:///{tmp_path}/mlflow.db"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]

    assert [process.communicate()[0].split() for process in processes] == [["50", "False"]] * 2


def test_values_by_step_are_a_history_and_are_there_once(store, client):
    parent = store.start("search", {})
    steps = {"best so far%": {step: step / 2 for step in range(2000)}}

    for _ in range(2):  # the same command starts again
        store.finish(parent, "FINISHED", {}, {}, [], steps, 1000)

    history = client.get_metric_history(parent, "best so far_")
    assert [(m.step, m.value, m.timestamp) for m in sorted(history, key=lambda m: m.step)] == [
        (step, step / 2, 1000) for step in range(2000)
    ]
    assert client.get_run(parent).data.metrics["best so far_"] == 999.5
