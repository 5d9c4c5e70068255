"""A store of results in a bucket of S3, on a server of moto on the loopback, through the real client."""

import multiprocessing

import pytest

from mecha_exp.errors import StoreError
from mecha_exp.lab.bucket import BucketStore, open_store
from mecha_exp.lab.store import ResultStore
from mecha_exp.lab.stored_results import StoredEvaluation, StoredMerge

pytestmark = pytest.mark.libraries

POINTS = [f"{number:064x}" for number in range(16)]
ADDRESS = "s3://results/study"


def fill(store: ResultStore) -> None:
    for signature in POINTS:
        store.put(StoredMerge(signature, {"recipe": signature}, metrics={"x": 1.0}))
        measured = StoredEvaluation({"accuracy": 0.5}, b"outcomes", {"a/cat.png": b"picture"})
        store.put_evaluation("digits-1", measured, signature)
    store.flush()


def test_results_come_back_with_outcomes_and_pictures(bucket):
    fill(open_store(ADDRESS))

    store = open_store(ADDRESS)
    store.fetch(POINTS)
    for signature in POINTS:
        assert store.get(signature) == StoredMerge(signature, {"recipe": signature}, metrics={"x": 1.0})
        found = store.evaluation("digits-1", signature)
        assert found is not None and found.outcomes == b"outcomes"
        assert found.contents() == {"a/cat.png": b"picture"}
    assert {path.name for path in store.points()} == set(POINTS)
    assert len(list(store)) == len(POINTS)


def test_results_are_fetched_together_and_what_is_not_there_is_not_asked_for(bucket):
    fill(open_store(ADDRESS))
    bucket.clear()

    store = open_store(ADDRESS)
    store.fetch(POINTS)
    fetched = len(bucket.requests)
    others = ["f" * 64, "e" * 64]
    store.fetch(others)
    assert all(store.get(s) is None and store.failure(s, ["digits-1"]) is None for s in others)
    assert all(store.get(s) is not None for s in POINTS)

    assert bucket.count("GET") <= 4 * len(POINTS) + 3  # of each point four files, the format, and the list
    assert bucket.at_once >= 8
    assert len(bucket.requests) == fetched


def test_results_are_sent_together(bucket):
    store = open_store(ADDRESS)
    fill(store)

    assert bucket.count("PUT") == 4 * len(POINTS) + 1
    assert bucket.at_once >= 8


def test_the_bucket_says_its_format_also_where_a_sweep_comes_first(bucket, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = open_store(ADDRESS)
    store.put_sweep("key", tmp_path)
    store.put(StoredMerge(POINTS[0], {}))
    store.flush()

    assert (open_store(ADDRESS).folder / "store.json").exists()


def test_a_failure_is_forgotten_everywhere_once_the_point_succeeds(bucket):
    first = open_store(ADDRESS)
    first.put_failure(POINTS[0], "it broke")
    first.flush()
    second = open_store(ADDRESS)
    assert second.failure(POINTS[0]) == "it broke"

    second.put(StoredMerge(POINTS[0], {}))
    second.flush()

    assert open_store(ADDRESS).failure(POINTS[0]) is None


def test_a_store_in_a_folder_can_be_copied_to_a_bucket(bucket, tmp_path):
    import fsspec

    fill(ResultStore(tmp_path / "store"))
    fsspec.filesystem("s3").put(f"{tmp_path}/store/", "results/study/", recursive=True)

    found = open_store(ADDRESS).evaluation("digits-1", POINTS[3])

    assert found is not None and found.outcomes == b"outcomes"


def write(number: int) -> None:
    """Write some results, the same and others than the next process."""
    store = open_store(ADDRESS)
    for signature in POINTS[number : number + 8]:
        store.put(StoredMerge(signature, {"recipe": signature}, metrics={"by": float(number)}))
        outcomes = f"outcomes of {number}".encode()
        store.put_evaluation("digits-1", StoredEvaluation({"accuracy": number / 8}, outcomes), signature)
    store.flush()


def test_two_processes_that_write_at_once_leave_whole_results(bucket):
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=write, args=(number,)) for number in (0, 4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 2

    store = open_store(ADDRESS)
    for signature in POINTS[:12]:
        assert store.get(signature) is not None
        found = store.evaluation("digits-1", signature)
        assert found is not None
        assert found.outcomes == f"outcomes of {round(found.metrics['accuracy'] * 8)}".encode()


def test_a_bucket_that_is_missing_is_named(bucket):
    with pytest.raises(StoreError, match="s3://others/study cannot be listed: there is no such bucket"):
        open_store("s3://others/study")


def test_missing_credentials_are_named(bucket, monkeypatch, tmp_path):
    import fsspec

    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.delenv(f"AWS_{name}")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    fsspec.filesystem("s3").clear_instance_cache()

    with pytest.raises(StoreError, match=r"there are no credentials for it .* Set AWS_PROFILE"):
        open_store(ADDRESS)


@pytest.mark.parametrize("address", ["https://example.org/store", "hf://org/name"])
def test_an_address_that_is_not_written_to_is_refused(address):
    with pytest.raises(StoreError, match=r"results cannot be written there. Name a folder, or"):
        open_store(address)


def test_what_cannot_be_sent_is_said_once_and_later_results_are_sent(bucket, monkeypatch):
    store = open_store(ADDRESS)
    assert isinstance(store, BucketStore)
    files = store._bucket._fs
    with monkeypatch.context() as broken:
        broken.setattr(files, "pipe", lambda *_: (_ for _ in ()).throw(PermissionError("not you")))
        store.put(StoredMerge(POINTS[0], {}))
        with pytest.raises(StoreError, match=r"store=s3://results/study cannot be written: access is denied"):
            store.flush()

    store.put(StoredMerge(POINTS[1], {}))
    store.flush()

    assert [merge.signature for merge in open_store(ADDRESS)] == [POINTS[1]]
