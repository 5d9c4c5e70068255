"""Hashes of files that are computed while they are written: those of the files, or none."""

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from written import digest, names

from mecha_exp import Job, MergeError, Parameter, Return, merge_many, merge_method, weighted_sum
from mecha_exp.checkpoint import CheckpointWriter, Destination
from mecha_exp.checkpoint.positional import PositionalFile, is_still
from mecha_exp.checkpoint.transaction import running_hash
from mecha_exp.checkpoint.transaction.running_hash import THREAD_NAME, RunningHash
from mecha_exp.errors import CheckpointError
from mecha_exp.lab.content_hash import content_of, keep_hash, unread_bytes

LAYOUT = {"a": ("F32", (6,)), "empty": ("F32", (0,)), "b": ("F16", (2, 3)), "c": ("U8", (5,))}
VALUES = {
    "a": torch.arange(6.0),
    "empty": torch.zeros(0),
    "b": torch.arange(6.0).half(),
    "c": torch.arange(5, dtype=torch.uint8),
}


class Received:
    """What a writer has said of its files: the hash by path, each checked to be of the file that is there."""

    def __init__(self) -> None:
        self.hashes: dict[Path, str] = {}

    def __call__(self, path: Path, sha256: str, identity: tuple[int, int, int]) -> None:
        assert is_still(path, identity)
        self.hashes[path] = sha256


def hashing() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


def open_writer(path: Path, received: Received | None, **more: object) -> CheckpointWriter:
    return CheckpointWriter(path, LAYOUT, {}, hashed=received, **more)  # type: ignore[arg-type]


def write(writer: CheckpointWriter, *keys: str) -> None:
    for key in keys:
        writer.write(key, 0, VALUES[key])
        writer.finish(key)


def test_tiles_of_many_threads_in_any_order_give_the_hash_of_the_file(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(running_hash, "_CHUNK", 1000)  # several for a key, and turns within keys
    monkeypatch.setattr(running_hash, "_TURN", 3000)
    layout = {f"key {n}": ("U8", (4096 + n,)) for n in range(40)}
    tiles = [(key, start) for key, (_, (size,)) in layout.items() for start in range(0, size, 512)]
    random.Random(0).shuffle(tiles)
    received = Received()
    with CheckpointWriter(tmp_path / "m.safetensors", layout, {"of": "a"}, hashed=received) as writer:

        def fill(tile: tuple[str, int]) -> None:
            key, start = tile
            size = min(512, layout[key][1][0] - start)
            writer.write(key, start, torch.randint(256, (size,), dtype=torch.uint8))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(fill, tiles))
        path = writer.commit()
    assert received.hashes == {path: digest(path)}
    assert not hashing()


def test_a_writer_that_goes_on_hashes_what_an_interrupted_one_has_left(tmp_path: Path):
    path, received = tmp_path / "m.safetensors", Received()
    with pytest.raises(KeyboardInterrupt), open_writer(path, received, signature="same") as writer:
        write(writer, "b")
        raise KeyboardInterrupt
    assert not hashing() and not received.hashes
    with open_writer(path, received, signature="same") as writer:
        assert set(writer.finished) == {"b"}
        write(writer, "c", "a")
        writer.commit()
    assert received.hashes == {path: digest(path)}


def test_keys_that_are_written_together_count(tmp_path: Path):
    received, layout = Received(), dict.fromkeys("ab", ("F32", (3,)))
    with CheckpointWriter(tmp_path / "m.safetensors", layout, {}, hashed=received) as writer:
        writer.write_together({"a": 3, "b": 3}, torch.arange(6.0))
        path = writer.commit()
    assert received.hashes == {path: digest(path)}


def test_a_file_without_keys_has_a_hash(tmp_path: Path):
    received = Received()
    with CheckpointWriter(tmp_path / "m.safetensors", {}, {}, hashed=received) as writer:
        path = writer.commit()
    assert received.hashes == {path: digest(path)}


@pytest.mark.parametrize("folder_is_there", [False, True])
def test_the_files_of_a_folder_are_told_by_their_final_paths(tmp_path: Path, folder_is_there: bool):
    received = Received()
    layout = dict.fromkeys("abc", ("F32", (1000,)))
    destination = Destination(tmp_path / "model", layout, shard_size=5000, hashed=received)
    for turn in range(1 + folder_is_there):
        received.hashes.clear()
        writer = destination.open({}, False, None)
        for key in layout:
            writer.write(key, 0, torch.full((1000,), float(turn)))
        writer.commit()
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(files) == 3
    assert received.hashes == {file: digest(file) for file in files}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_errors_and_interrupts_leave_no_thread(tmp_path: Path, error: type[BaseException]):
    received = Received()
    with pytest.raises(error), open_writer(tmp_path / "m.safetensors", received) as writer:
        write(writer, "a")
        assert len(hashing()) == 1
        raise error
    assert not hashing() and not received.hashes
    assert names(tmp_path) == []


def test_an_incomplete_file_has_no_hash(tmp_path: Path):
    received = Received()
    incomplete = pytest.raises(CheckpointError, match="is not complete, nothing was saved: a ")
    with incomplete, open_writer(tmp_path / "m.safetensors", received) as writer:
        write(writer, "b", "c")
        writer.commit()
    assert not hashing() and not received.hashes


def test_without_a_wish_there_is_no_thread(tmp_path: Path):
    with open_writer(tmp_path / "m.safetensors", None) as writer:
        write(writer, "a", "b", "c")
        assert not hashing()
        writer.commit()


def test_a_file_that_cannot_be_read_has_no_hash(tmp_path: Path):
    (tmp_path / "short").write_bytes(b"1234")
    with PositionalFile(tmp_path / "short", os.O_RDONLY) as file:
        running = RunningHash(file, {"a": 4, "b": 8}, 8)
        running.add("ab")
        assert running.result() is None
        running.stop()


def test_a_key_is_not_read_before_those_in_front_of_it_are_complete(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"....5678")
    with PositionalFile(tmp_path / "file", os.O_RDONLY) as file:
        running = RunningHash(file, {"b": 8, "a": 4}, 8)
        running.add("b")
        time.sleep(0.02)  # in which a thread that did not wait would have read it
        (tmp_path / "file").write_bytes(b"12345678")
        running.add("a")
        assert running.result() == digest(tmp_path / "file")
        running.stop()


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{name}.safetensors" for name in "ab"]
    for number, path in enumerate(paths):
        save_file({f"w{n}": torch.full((64, 64), float(n + number)) for n in range(8)}, path)
    return paths


@pytest.mark.parametrize("shard_size", [None, 50_000])
def test_a_merge_leaves_nothing_to_read_for_the_hashes_of_its_files(
    tmp_path: Path, models: list[Path], shard_size: int | None
):
    output = tmp_path / ("out.safetensors" if shard_size is None else "out")
    job = Job(weighted_sum(*map(str, models), alpha=0.25), output, shard_size=shard_size, hashed=keep_hash)
    merge_many([job])
    assert unread_bytes([output]) == 0
    files = [output] if shard_size is None else sorted(output.glob("*.safetensors"))
    assert len(files) == (1 if shard_size is None else 3)
    assert {file: content_of(file) for file in files} == {file: digest(file) for file in files}


@merge_method(register=False)
def failing_at_last(a: Parameter(torch.Tensor), b: Parameter(torch.Tensor)) -> Return(torch.Tensor):  # type: ignore[valid-type]
    if a.flatten()[0] == 7:
        raise ValueError("no seven")
    return a + b


def test_a_merge_that_fails_leaves_no_thread(tmp_path: Path, models: list[Path]):
    output, received = tmp_path / "out.safetensors", Received()
    with pytest.raises(MergeError, match="no seven"):
        merge_many([Job(failing_at_last(*map(str, models)), output, hashed=received)])
    assert not hashing() and not received.hashes
    assert not output.exists()


def test_a_hash_of_another_file_is_not_kept(tmp_path: Path):
    path, other = tmp_path / "a", tmp_path / "b"
    path.write_bytes(b"one")
    other.write_bytes(b"two")
    status = other.stat()
    keep_hash(path, "0" * 64, (status.st_ino, status.st_size, status.st_mtime_ns))
    keep_hash(tmp_path / "none", "0" * 64, (status.st_ino, status.st_size, status.st_mtime_ns))
    assert content_of(path) == digest(path)
