"""The MLflow store: what is logged is there, and what cannot be logged is a TrackingError that says why."""

import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from mecha_exp.app.tracking import log_run, log_sweep
from mecha_exp.errors import TrackingError
from mecha_exp.runs.record import Record
from mecha_exp.runs.sweep import Sweep
from mecha_exp.tracking import Store
from mecha_exp.tracking.database import absolute_uri, create_database
from mecha_exp.tracking.mlflow_store import _is_abandoned, _numbering, _this_machine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tracking")


@pytest.fixture(scope="module")
def store(folder: Path) -> Store:
    return Store(f"sqlite:///{(folder / 'outputs/mlflow.db').as_posix()}", "lab")


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


@pytest.mark.parametrize("uri", ["sqlite:///", "sqlite:///."])
def test_an_address_without_a_file_is_said_at_once(uri):
    with pytest.raises(TrackingError, match="names no file: write it as sqlite:///outputs"):
        Store(uri, "lab")


def test_runs_of_processes_that_are_gone_are_deleted(store, client, monkeypatch):
    abandoned = client.create_run(store._experiment, tags={"logged_by": f"{_this_machine()}:{2**31 - 1}"})
    alive = client.create_run(store._experiment, tags={"logged_by": f"{_this_machine()}:{os.getpid()}"})
    elsewhere = client.create_run(store._experiment, tags={"logged_by": "another:1"})

    store.delete_abandoned()

    assert store.status(abandoned.info.run_id) is None
    assert store.status(alive.info.run_id) == store.status(elsewhere.info.run_id) == "RUNNING"
    assert store.status("0" * 32) is None
    for run in (alive, elsewhere):
        store.delete(run.info.run_id)


@pytest.mark.parametrize(
    ("process", "numbering", "age", "is_gone"),
    [
        (os.getpid(), "", 10_000, False),
        (2**31 - 1, "", 0, True),
        (os.getpid(), "1", 10, False),  # another container's: it may be at work
        (2**31 - 1, "1", 10, False),
        (os.getpid(), "1", 10_000, True),
    ],
    ids=["alive", "gone", "other numbers", "gone, other numbers", "long ago"],
)
def test_a_process_of_another_container_is_not_judged_by_its_number(process, numbering, age, is_gone):
    place = f"{numbering or _numbering()}:{int(time.time()) - age}"

    assert _is_abandoned(f"{_this_machine()}:{process}:{place}") == is_gone


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


def test_metrics_and_artifacts_are_added_to_a_run_that_has_ended(store, client, tmp_path):
    table = tmp_path / "table.csv"
    table.write_text("old")
    run_id = store.log("p", "FINISHED", (0, 1), {}, {"accuracy": 0.5}, {}, [table])
    table.write_text("new")

    store.add(run_id, {"test/accuracy": 0.4}, [table, tmp_path / "missing.csv"])

    run = client.get_run(run_id)
    assert run.data.metrics == {"accuracy": 0.5, "test/accuracy": 0.4}
    assert run.info.status == "FINISHED"
    assert (store.fetch(run_id, tmp_path / "fetched") / "table.csv").read_text() == "new"
