"""A bucket that misbehaves: whole results or an error that says so, never wrong ones."""

import multiprocessing
import os
import signal
import time

import pytest
from buckets import at_first, busy, cut, short

from mecha_exp.errors import StoreError
from mecha_exp.lab.bucket import open_store
from mecha_exp.lab.store import ResultStore
from mecha_exp.lab.stored_results import StoredEvaluation, StoredMerge

pytestmark = pytest.mark.libraries

POINTS = [f"{number:064x}" for number in range(8)]
ADDRESS = "s3://results/study"


@pytest.fixture(autouse=True)
def few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clients try again soon, and not for minutes."""
    import s3fs.core

    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    monkeypatch.setattr(s3fs.core.S3FileSystem, "retries", 2)


def outcomes_of(signature: str) -> bytes:
    return f"outcomes of {signature}".encode() * 100


def fill(store: ResultStore, signatures=POINTS) -> None:
    for signature in signatures:
        store.put(StoredMerge(signature, {"recipe": signature}, metrics={"x": 1.0}))
        measured = StoredEvaluation({"accuracy": int(signature, 16) / 8}, outcomes_of(signature))
        store.put_evaluation("digits-1", measured, signature)
    store.flush()


def found_in(store: ResultStore) -> list[str]:
    """The points that a store has. What it has of them must be right."""
    store.fetch(POINTS)
    found = []
    for signature in POINTS:
        merge, evaluation = store.get(signature), store.evaluation("digits-1", signature)
        if merge is not None:
            assert merge == StoredMerge(signature, {"recipe": signature}, metrics={"x": 1.0})
        if evaluation is not None:
            assert evaluation.outcomes == outcomes_of(signature)
            assert evaluation.metrics == {"accuracy": int(signature, 16) / 8}
            found.append(signature)
    return found


@pytest.mark.parametrize("fault", [busy, cut])
def test_answers_that_fail_once_are_asked_for_again(fault, bucket):
    fill(open_store(ADDRESS))
    bucket.fault = at_first(fault, 1, "GET")

    assert found_in(open_store(ADDRESS)) == POINTS


def test_a_store_that_stays_busy_is_an_error_when_it_is_read(bucket):
    fill(open_store(ADDRESS))
    store = open_store(ADDRESS)
    bucket.fault = at_first(busy, 1000, "GET")

    with pytest.raises(StoreError, match=rf"store={ADDRESS} cannot be read: .*Reduce your request rate\.$"):
        store.fetch(POINTS)

    bucket.fault = None
    assert found_in(store) == POINTS


def test_a_store_that_cuts_every_answer_is_an_error(bucket):
    fill(open_store(ADDRESS))
    store = open_store(ADDRESS)
    bucket.fault = at_first(cut, 1000, "GET")

    with pytest.raises(StoreError, match=f"store={ADDRESS} cannot be read: "):
        store.fetch(POINTS)


def test_answers_that_are_too_short_are_taken_for_no_result(bucket):
    fill(open_store(ADDRESS))
    store = open_store(ADDRESS)
    bucket.fault = at_first(short, 1000, "GET")

    assert found_in(store) == []


def test_a_store_that_is_busy_for_a_moment_has_what_was_sent(bucket):
    store = open_store(ADDRESS)
    bucket.fault = at_first(busy, 1, "PUT")

    fill(store)

    bucket.fault = None
    assert found_in(open_store(ADDRESS)) == POINTS


def test_a_store_that_stays_busy_is_an_error_when_it_is_written(bucket):
    store = open_store(ADDRESS)
    bucket.fault = at_first(busy, 1000, "PUT")

    with pytest.raises(
        StoreError, match=rf"store={ADDRESS} cannot be written: .*Reduce your request rate\.$"
    ):
        fill(store)

    bucket.fault = None
    assert found_in(open_store(ADDRESS)) == []


def write_slowly(number: int, begun) -> None:
    """Write all points, those first whose turn it is, and tell when the first one is sent."""
    store = open_store(ADDRESS)
    for signature in POINTS[number:] + POINTS[:number]:
        fill(store, [signature])
        begun.set()
        time.sleep(0.2)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_writer_that_is_killed_leaves_whole_results_and_the_others_go_on(bucket):
    spawn = multiprocessing.get_context("spawn")
    begun = [spawn.Event() for _ in range(3)]
    writers = [spawn.Process(target=write_slowly, args=(3 * n, begun[n])) for n in range(3)]
    for writer in writers:
        writer.start()
    assert begun[0].wait(120)
    os.kill(writers[0].pid, signal.SIGKILL)
    for writer in writers:
        writer.join()

    assert [writer.exitcode for writer in writers] == [-signal.SIGKILL, 0, 0]
    assert found_in(open_store(ADDRESS)) == POINTS


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_the_only_writer_is_killed_and_the_next_one_adds_what_is_missing(bucket):
    spawn = multiprocessing.get_context("spawn")
    begun = spawn.Event()
    writer = spawn.Process(target=write_slowly, args=(0, begun))
    writer.start()
    assert begun.wait(120)
    time.sleep(0.3)
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()

    store = open_store(ADDRESS)
    left = found_in(store)
    assert 0 < len(left) < len(POINTS)
    fill(store, [signature for signature in POINTS if signature not in left])

    assert found_in(open_store(ADDRESS)) == POINTS
