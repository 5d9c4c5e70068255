"""Results by signature on disk: whole files, other versions, models that were changed."""

import hashlib
import math
from pathlib import Path

import pytest

from mecha_exp.errors import StoreError
from mecha_exp.lab.store import ResultStore
from mecha_exp.lab.stored_results import ModelFile, StoredEvaluation, StoredMerge
from mecha_exp.system.atomic_write import atomic_write_text

KEYS = ["digits-1", "margin-2"]


@pytest.fixture
def store(tmp_path: Path) -> ResultStore:
    return ResultStore(tmp_path / "store")


def model_file(path: Path, content: bytes = b"weights") -> ModelFile:
    path.write_bytes(content)
    return ModelFile(str(path), hashlib.sha256(content).hexdigest(), len(content))


def test_what_is_kept_is_found_by_its_signature(store, tmp_path):
    kept = StoredMerge(
        "a1", {"recipe": "r"}, ["base"], {"x": 0.1}, model=model_file(tmp_path / "m.safetensors")
    )

    store.put(kept)

    assert ResultStore(store.folder).get("a1") == kept
    assert list(store) == [kept]
    assert store.get("b2") is None


def test_a_model_is_trusted_only_with_the_bytes_that_were_written(tmp_path):
    path = tmp_path / "m.safetensors"
    model = model_file(path)

    assert model.is_intact()
    path.write_bytes(b"WEIGHTS")
    assert not model.is_intact()
    path.unlink()
    assert not model.is_intact()


def test_evaluations_are_kept_by_evaluator_for_points_and_inputs(store):
    store.put_evaluation("digits-1", StoredEvaluation({"accuracy": 0.5, "loss": math.nan}), "a1")
    store.put_evaluation("digits-1", StoredEvaluation({"accuracy": 0.25}, b"outcomes"), content="c0ffee")

    found = store.evaluation("digits-1", "a1")
    assert found is not None
    assert found.metrics["accuracy"] == 0.5
    assert math.isnan(found.metrics["loss"])
    assert found.outcomes is None
    assert store.evaluation("digits-1", content="c0ffee") == StoredEvaluation({"accuracy": 0.25}, b"outcomes")
    assert store.evaluation("digits-2", "a1") is None


@pytest.mark.parametrize(
    ("suffix", "before", "after"),
    [
        (".json", b"0.25", b"0.35"),
        (".json", b'"accuracy"', b'"accurate"'),
        (".json", b"}", b""),
        (".parquet", b"outcomes", b"outc0mes"),
        (".parquet", b"outcomes", b""),
    ],
)
def test_a_damaged_evaluation_is_measured_again(store, suffix, before, after):
    store.put_evaluation("digits-1", StoredEvaluation({"accuracy": 0.25}, b"outcomes"), "a1")
    (file,) = (store.folder / "points" / "a1").glob(f"*{suffix}")
    file.write_bytes(file.read_bytes().replace(before, after))

    assert store.evaluation("digits-1", "a1") is None


def test_files_of_an_evaluation_are_stored_beside_it_and_checked(store, tmp_path):
    (tmp_path / "b.png").write_bytes(b"from a path")
    files = {"a.png": b"content", "b.png": tmp_path / "b.png"}

    store.put_evaluation("images-1", StoredEvaluation({"score": 0.25}, files=files), "a1")

    stored = store.evaluation("images-1", "a1")
    assert stored is not None
    assert {name: path.read_bytes() for name, path in stored.files.items()} == {
        "a.png": b"content",
        "b.png": b"from a path",
    }
    stored.files["a.png"].write_bytes(b"changed")
    assert store.evaluation("images-1", "a1") is None


def test_an_evaluation_without_its_outcomes_is_measured_again(store):
    store.put_evaluation("digits-1", StoredEvaluation({"accuracy": 0.25}, b"outcomes"), "a1")
    next((store.folder / "points" / "a1").glob("*.parquet")).unlink()

    assert store.evaluation("digits-1", "a1") is None


def test_the_failure_of_an_evaluation_counts_for_that_one_alone(store):
    store.put_failure("a1", "it broke", "digits-1")

    assert store.failure("a1", ["digits-1", "margin-2"]) == "it broke"
    assert store.failure("a1", ["margin-2"]) is None
    assert store.failure("a1") is None


def test_each_evaluation_that_failed_is_kept_by_name_until_it_succeeds(store):
    store.put_failure("a1", "no labels", "digits-1")
    store.put_failure("a1", "too long", "margin-2")
    store.put(StoredMerge("a1", {}))
    store.clear_failure("a1", ["speed-3"])
    assert store.failures("a1", KEYS) == {"digits-1": "no labels", "margin-2": "too long"}

    store.clear_failure("a1", ["margin-2"])
    assert store.failures("a1", KEYS) == {"digits-1": "no labels"}
    assert store.failure("a1", ["margin-2", "digits-1"]) == "no labels"

    store.clear_failure("a1", ["digits-1"])
    assert not list(store.folder.rglob("failure*.json"))


def test_a_failure_is_remembered_until_the_point_succeeds(store):
    store.put_failure("a1", "it broke")
    assert store.failure("a1") == "it broke"

    store.put(StoredMerge("a1", {}))
    assert store.failure("a1") is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"unknown": 1}', "null"])
def test_a_damaged_file_is_no_result(store, text):
    store.put(StoredMerge("a1", {}))
    (store.folder / "points" / "a1" / "merge.json").write_text(text)

    assert store.get("a1") is None


def test_a_store_of_a_newer_version_is_refused(store):
    atomic_write_text(store.folder / "store.json", '{"version": 2}')

    with pytest.raises(StoreError, match=r"written by a newer mecha_exp \(format 2; this one reads 1\)"):
        ResultStore(store.folder)


def test_the_folder_of_a_sweep_is_found_while_it_is_there(store, tmp_path):
    (tmp_path / "sweep").mkdir()
    store.put_sweep("k", tmp_path / "sweep")

    assert store.sweep_folder("k") == tmp_path / "sweep"
    (tmp_path / "sweep").rmdir()
    assert store.sweep_folder("k") is None


def test_a_store_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(StoreError, match="cannot be written"):
        ResultStore(tmp_path / "file").put(StoredMerge("a1", {}))


def test_a_file_that_could_not_be_written_leaves_nothing(tmp_path, monkeypatch):
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)

    with pytest.raises(StoreError, match="the disk is full"):
        ResultStore(tmp_path / "store").put(StoredMerge("a1", {}))
    assert not list((tmp_path / "store").rglob("*.partial"))
