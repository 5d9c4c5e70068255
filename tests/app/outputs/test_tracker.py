"""The points of a sweep are logged while it runs, those of a second together."""

from types import SimpleNamespace

import pytest

from mecha_exp.app import tracking
from mecha_exp.app.tracking import EndedRun, Tracker, log_runs
from mecha_exp.errors import TrackingError
from mecha_exp.runs.record import FINISHED, Record
from mecha_exp.tracking import Store


@pytest.fixture
def address(tmp_path):
    """A tracking configuration, and its store with a sweep's run."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    return SimpleNamespace(uri=uri, experiment="mecha_exp")


@pytest.fixture
def sweep(address):
    store = Store(address.uri, address.experiment)
    return store, store.start("sweep", {})


def ended(tmp_path, name, parent, replaces=None):
    folder = tmp_path / name
    folder.mkdir()
    record = Record(name, overrides=[], started=1)
    record.status, record.ended = FINISHED, 2
    record.save(folder)
    return EndedRun(folder, record, parent, replaces)


def children(store, parent):
    return set(store.runs_with(tracking.PARENT_TAG, parent))


def test_the_first_point_is_logged_at_once_and_the_next_ones_together(tmp_path, address, sweep, monkeypatch):
    store, parent = sweep
    clock = iter([0, 0, 0.5, 0.9, 1.0, 1.0])
    monkeypatch.setattr(tracking.time, "monotonic", lambda: next(clock))
    runs = [ended(tmp_path, name, parent) for name in "abcd"]
    seen = []

    with Tracker(address) as tracker:
        for run in runs:
            tracker.add(run)
            seen.append(len(children(store, parent)))
        monkeypatch.undo()

    assert seen == [1, 1, 1, 4]
    assert {Record.load(run.folder).run_id for run in runs} == children(store, parent)


def test_points_that_wait_are_logged_when_the_sweep_breaks_off(tmp_path, address, sweep):
    store, parent = sweep
    with pytest.raises(KeyboardInterrupt), Tracker(address) as tracker:
        for name in "ab":
            tracker.add(ended(tmp_path, name, parent))
        raise KeyboardInterrupt
    assert len(children(store, parent)) == 2


def test_a_group_that_fails_is_not_there_and_its_records_say_why(tmp_path, address, sweep, monkeypatch):
    store, parent = sweep
    earlier = store.log("earlier", FINISHED, (0, 1), {}, {}, {}, [], parent)
    log_folder = tracking.log_folder

    def fail_at_b(folder, *arguments):
        if folder.name == "b":
            raise TrackingError("the disk is full")
        return log_folder(folder, *arguments)

    monkeypatch.setattr(tracking, "log_folder", fail_at_b)
    runs = [ended(tmp_path, "a", parent, replaces=earlier), ended(tmp_path, "b", parent)]
    tracker = Tracker(address)
    tracker._waiting = list(runs)
    tracker.flush()

    assert children(store, parent) == {earlier}
    for run in runs:
        written = Record.load(run.folder)
        assert (written.run_id, written.tracking_error) == (None, "the disk is full")
    monkeypatch.undo()
    log_runs(runs, store)
    assert children(store, parent) == {Record.load(run.folder).run_id for run in runs}
    assert Record.load(runs[0].folder).tracking_error is None


def test_more_runs_than_a_transaction_holds_are_logged(tmp_path, sweep, monkeypatch):
    store, parent = sweep
    monkeypatch.setattr(tracking, "GROUP", 2)
    log_runs([ended(tmp_path, str(number), parent) for number in range(5)], store)
    assert len(children(store, parent)) == 5


def test_a_run_that_replaces_one_the_store_lacks_is_logged(tmp_path, sweep):
    store, parent = sweep
    earlier = store.log("earlier", FINISHED, (0, 1), {}, {}, {}, [], parent)
    store.delete(earlier)
    runs = [ended(tmp_path, "a", parent, replaces=earlier), ended(tmp_path, "b", parent, replaces="0" * 32)]

    log_runs(runs, store)

    assert children(store, parent) == {Record.load(run.folder).run_id for run in runs}
