"""A store in a folder that many processes write at once, some of them killed: nothing lost, nothing half."""

import multiprocessing
import sys
import time
from pathlib import Path

import pytest

from mecha_exp.lab.store import ResultStore
from mecha_exp.lab.stored_results import StoredEvaluation, StoredMerge

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")

SHARED = [f"shared-{number}" for number in range(5)]
FORK = multiprocessing.get_context("fork" if sys.platform != "win32" else "spawn")


def outcomes_by(writer: int, time: int) -> bytes:
    return f"outcomes of {writer}, time {time}, ".encode() * 5000


def write(folder: Path, writer: int, times: int) -> None:
    """Write results of its own and those that all write, each measured otherwise; note what is stored."""
    store = ResultStore(folder)
    for number in range(times):
        outcomes = outcomes_by(writer, number)
        measured = StoredEvaluation({"writer": writer, "time": number}, outcomes, {"cat.png": outcomes})
        for signature in (f"own-{writer}-{number}", SHARED[number % len(SHARED)]):
            store.put(StoredMerge(signature, {"recipe": signature}, metrics={"writer": writer}))
            store.put_evaluation("digits-1", measured, signature)
            store.put_failure(signature, f"of {writer}", f"other-{writer}")
        with (folder.parent / f"stored-{writer}").open("a") as log:
            log.write(f"own-{writer}-{number}\n")


def require_whole(store: ResultStore, signature: str) -> None:
    """Require that a point has a merge, and an evaluation with the outcomes and the file of its writer."""
    merge, found = store.get(signature), store.evaluation("digits-1", signature)
    assert merge is not None and merge.parts == {"recipe": signature}
    assert found is not None, signature
    expected = outcomes_by(int(found.metrics["writer"]), int(found.metrics["time"]))
    assert found.outcomes == expected
    assert found.contents() == {"cat.png": expected}


@pytest.mark.parametrize("writers", [2, pytest.param(8, marks=pytest.mark.heavy)])
def test_processes_that_write_at_once_lose_nothing(tmp_path, writers):
    folder = tmp_path / "store"
    processes = [FORK.Process(target=write, args=(folder, writer, 10)) for writer in range(writers)]
    for process in processes:
        process.start()
    store = ResultStore(folder)
    while any(process.is_alive() for process in processes):
        for signature in SHARED:
            if store.evaluation("digits-1", signature) is not None:
                require_whole(store, signature)
    assert [process.exitcode for process in processes] == [0] * writers

    for signature in [*SHARED, *(f"own-{writer}-{n}" for writer in range(writers) for n in range(10))]:
        require_whole(store, signature)
    for writer in range(writers):
        assert store.failure(SHARED[0], [f"other-{writer}"]) == f"of {writer}"


@pytest.mark.parametrize("writers", [2, pytest.param(8, marks=pytest.mark.heavy)])
def test_what_was_stored_before_a_kill_stays_and_nothing_else_is_half(tmp_path, writers):
    folder = tmp_path / "store"
    processes = [FORK.Process(target=write, args=(folder, writer, 10_000)) for writer in range(writers)]
    for process in processes:
        process.start()
    while sum((tmp_path / f"stored-{writer}").is_file() for writer in range(writers)) < writers:
        time.sleep(0.01)
    for process in processes:
        time.sleep(0.02)
        process.kill()
        process.join()

    store, stored = ResultStore(folder), set()
    for writer in range(writers):
        stored.update((tmp_path / f"stored-{writer}").read_text().split())
    for signature in stored:
        require_whole(store, signature)
    for path in store.points():
        if store.evaluation("digits-1", path.name) is not None:
            require_whole(store, path.name)


def test_a_store_of_an_earlier_version_is_read(tmp_path):
    store = ResultStore(tmp_path)
    store.put_evaluation("digits-1", StoredEvaluation({"accuracy": 0.5}, b"outcomes"), "a1")
    written = next(tmp_path.rglob("evaluation-*.json"))
    next(tmp_path.rglob("*.parquet")).rename(written.with_suffix(".parquet"))  # where it was before
    lines = [line for line in written.read_text().splitlines() if '"beside"' not in line]
    written.write_text("\n".join(lines).replace('",\n}', '"\n}'))

    assert store.evaluation("digits-1", "a1") == StoredEvaluation({"accuracy": 0.5}, b"outcomes")
