"""Runs at a server of MLflow: several are logged at a time, each once, as in a database of this machine."""

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from mlflow.tracking import MlflowClient
from tracking_server import TrackingServer

from mecha_exp.app import tracking
from mecha_exp.app.tracking import PARENT_TAG, EndedRun, Tracker, log_runs
from mecha_exp.runs.record import FAILED, FINISHED, Record
from mecha_exp.tracking import Store
from mecha_exp.tracking.mlflow_client import ClientBackend

RUNS = 20


@pytest.fixture
def server(tmp_path, free_port) -> Iterator[TrackingServer]:
    folder = tmp_path / "server"
    folder.mkdir()
    running = TrackingServer(folder, f"sqlite:///{folder}/server.db", free_port)
    yield running
    running.kill()


def ended(folder: Path, number: int, parent: str) -> EndedRun:
    """A run of a sweep with all that a run has."""
    record = Record(f"alpha={number}", [f"alpha={number}"], started=number + 1)
    record.status, record.ended = FAILED if number == 3 else FINISHED, number + 5
    record.error = "ValueError: three" if number == 3 else None
    record.parameters = {"alpha": number, "recipe": "ties"}
    record.metrics = {"accuracy": number / 7, "io/bytes_read": 1e9}
    record.evaluations = {"accuracy": f"digits-{number // 7:064d}"}
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text(f"alpha: {number}\n")
    (folder / "recipe.mecha").write_text(f"recipe {number}\n")
    record.save(folder)
    return EndedRun(folder, record, parent)


def contents(uri: str, parent: str) -> dict[str, object]:
    """All that a store has of the runs of a sweep, by their names."""
    client = MlflowClient(uri)
    experiment = client.get_run(parent).info.experiment_id
    found = client.search_runs([experiment], f"tags.mlflow.parentRunId = '{parent}'", max_results=1000)
    named = {run.info.run_name: _content(client, run) for run in found}
    assert len(named) == len(found)
    return named


def _content(client, run) -> object:
    run_id, info, tags = run.info.run_id, run.info, dict(run.data.tags)
    inputs = [(i.dataset.name, i.dataset.digest, i.tags[0].value) for i in run.inputs.dataset_inputs]
    folders = ("", "config")
    artifacts = sorted((a.path, a.file_size) for f in folders for a in client.list_artifacts(run_id, f))
    assert tags.pop(PARENT_TAG)
    tags.pop("mlflow.user", None)
    times = info.start_time, info.end_time
    return info.status, times, run.data.params, run.data.metrics, tags, inputs, artifacts


def test_a_server_has_what_a_database_has(server, tmp_path, capfd):
    seen = []
    for name, uri in {"server": server.uri, "database": f"sqlite:///{tmp_path}/here.db"}.items():
        store = Store(uri, "lab")
        parent = store.start("sweep", {})
        log_runs([ended(tmp_path / "runs" / name / str(n), n, parent) for n in range(RUNS)], store)
        seen.append(contents(uri, parent))

    assert seen[0] == seen[1]
    assert capfd.readouterr() == ("", "")
    assert len(seen[0]) == RUNS
    status, times, params, metrics, tags, inputs, artifacts = seen[0]["alpha=3"]
    assert (status, times, params["alpha"]) == ("FAILED", (4, 8), "3")
    assert (metrics["accuracy"], metrics["hp/alpha"], tags["error"]) == (3 / 7, 3.0, "ValueError: three")
    assert inputs == [("digits", f"{0:064d}"[:36], "all")]
    assert {"run.json", "recipe.mecha", "config/config.yaml"} < {path for path, _ in artifacts}


def test_several_runs_are_logged_at_a_time(server, tmp_path, monkeypatch):
    both = threading.Barrier(2, timeout=60)  # which one thread alone would never pass
    log = ClientBackend.log
    monkeypatch.setattr(ClientBackend, "log", lambda *about: (both.wait(), log(*about))[1])
    store = Store(server.uri, "lab")
    parent = store.start("sweep", {})
    runs = [ended(tmp_path / str(number), number, parent) for number in range(4)]

    log_runs(runs, store)

    assert {run.record.run_id for run in runs} == set(store.runs_with(PARENT_TAG, parent))
    assert [Record.load(run.folder).run_id for run in runs] == [run.record.run_id for run in runs]


def test_what_was_logged_before_the_server_died_is_not_logged_again(server, tmp_path, monkeypatch):
    parent = Store(server.uri, "lab").start("sweep", {})
    runs = [ended(tmp_path / str(number), number, parent) for number in range(RUNS)]
    log_folder, begun = tracking.log_folder, iter(range(RUNS))

    def die_in_the_middle(*about):
        if next(begun) == RUNS // 2:
            server.kill()
        return log_folder(*about)

    monkeypatch.setattr(tracking, "log_folder", die_in_the_middle)
    tracker = Tracker(SimpleNamespace(uri=server.uri, experiment="lab"))
    tracker._waiting = list(runs)
    tracker.flush()
    monkeypatch.undo()
    written = [Record.load(run.folder) for run in runs]
    logged = [record.run_id for record in written if record.run_id]
    assert 0 < len(logged) < RUNS
    assert all("cannot be used" in r.tracking_error for r in written if r.run_id is None)

    server.start()
    log_runs([run for run in runs if run.record.run_id is None], Store(server.uri, "lab"))

    ids = [Record.load(run.folder).run_id for run in runs]
    assert set(logged) < set(ids) <= set(Store(server.uri, "lab").runs_with(PARENT_TAG, parent))
    assert len(set(ids)) == RUNS


def test_a_sweep_goes_on_while_a_server_is_slow_and_an_interrupt_does_not_wait_for_all_runs(
    server, tmp_path, monkeypatch
):
    log_folder, may_log = tracking.log_folder, threading.Event()
    monkeypatch.setattr(tracking, "log_folder", lambda *about: (may_log.wait(60), log_folder(*about))[1])
    store, address = Store(server.uri, "lab"), SimpleNamespace(uri=server.uri, experiment="lab")
    parent = store.start("sweep", {})
    first, more = ([ended(tmp_path / f"{n}{name}", n, parent) for n in range(4)] for name in ("a", "b"))

    with Tracker(address) as tracker:
        for run in first:
            tracker.add(run)
        before = [run.record.run_id for run in first]
        may_log.set()

    assert before == [None] * 4
    assert {Record.load(run.folder).run_id for run in first} == set(store.runs_with(PARENT_TAG, parent))

    may_log.clear()
    with pytest.raises(KeyboardInterrupt), Tracker(address) as tracker:
        for run in more:
            tracker.add(run)
        may_log.set()
        raise KeyboardInterrupt
    assert [run.record.run_id is not None for run in more] == [True, False, False, False]
