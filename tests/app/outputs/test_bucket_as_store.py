"""Sweeps with a store in a bucket: what one machine has measured, another one recalls."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from buckets import Answer

from mecha_exp.app.workbench import _workbench
from mecha_exp.runs.query import find_runs

PAGE = Path(__file__).parents[3] / "docs" / "sweeps.md"
COMMAND = next(
    line.removeprefix("python -m mecha_exp ").split()
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if "store=s3://results/study" in line and line.startswith("python")
)


pytestmark = pytest.mark.libraries


@pytest.fixture(autouse=True)
def new_process() -> Iterator[None]:
    """A workbench, and so a store, of its own for each test."""
    _workbench.cache_clear()
    yield
    _workbench.cache_clear()


def test_what_one_machine_has_measured_another_one_recalls(app, folder, bucket, monkeypatch):
    first = app(*COMMAND)
    assert not first.status, first.err
    _workbench.cache_clear()  # as another process
    bucket.clear()
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)

    again = app(*COMMAND)

    assert not again.status, again.err
    runs = {run.record.name: run.record for run in find_runs([elsewhere])}
    before = {run.record.name: run.record for run in find_runs([folder / "outputs"])}
    assert runs.keys() == before.keys() and len(runs) == 3
    assert all(record.found for record in runs.values())
    assert all(runs[name].metrics["accuracy"] == before[name].metrics["accuracy"] for name in runs)
    assert bucket.count("PUT") == 0 < bucket.count("GET")


def late(method: str, path: str, answer: Answer) -> Answer:
    """Let a file take half a second until it is there."""
    time.sleep(0.5 if method == "PUT" else 0)
    return answer


def test_what_the_workers_of_a_sweep_in_shares_have_measured_is_there_afterwards(app, folder, bucket):
    bucket.fault = late  # so that a worker is still sending when its last point is measured
    first = app(*COMMAND, "hydra/launcher=processes", "hydra.launcher.workers=2", "hydra.sweep.dir=first")
    assert not first.status, first.err
    bucket.clear()
    _workbench.cache_clear()  # as another process

    again = app(*COMMAND, "hydra.sweep.dir=again")

    assert not again.status, again.err
    found = [run.record.found for run in find_runs([folder / "again"])]
    assert found == [True] * 3


def test_a_bucket_that_is_missing_is_said_before_any_work(app, folder, bucket):
    done = app("recipe=ties", "output=none", "store=s3://others/study")

    assert done.status == 1
    assert "there is no such bucket. Make it first" in done.err
    assert not (folder / "outputs").exists()
