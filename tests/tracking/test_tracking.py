"""The MLflow store: what is logged is there, and what cannot be logged is a TrackingError that says why."""

import os
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from mecha_exp.app.tracking import log_run, log_sweep
from mecha_exp.errors import TrackingError
from mecha_exp.runs.record import Record
from mecha_exp.runs.sweep import Sweep
from mecha_exp.tracking import Store
from mecha_exp.tracking.database import absolute_uri
from mecha_exp.tracking.mlflow_store import _this_machine


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
    assert run.data.metrics == {"acc": 0.5}
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
