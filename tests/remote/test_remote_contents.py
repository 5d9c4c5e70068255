"""Signatures are made of contents, and what was read may be kept."""

import contextlib
import hashlib
import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mecha_exp import merge, weighted_sum
from mecha_exp.checkpoint.remote import RemoteFile, content_cache, lookup, pieces
from mecha_exp.errors import ConfigError
from mecha_exp.lab.content_hash import content_of, is_hash, unread_bytes
from mecha_exp.sources.search import find_model
from mecha_exp.system.cache import MODELS_SIZE_VARIABLE, MODELS_VARIABLE


@pytest.fixture
def file(served: Path, monkeypatch) -> Path:
    """A model on the server."""
    monkeypatch.setattr(pieces, "PIECE", 1 << 18)
    monkeypatch.setattr(pieces, "SMALL", 1 << 10)
    path = served / "model.safetensors"
    save_file({f"layers.{n}": torch.randn(100_000) for n in range(4)}, path)
    return path


@pytest.fixture
def address(server) -> str:
    return f"{server.url}/model.safetensors"


def again(address: str) -> Path:
    """The stand-in of an address, as a new process finds it."""
    lookup.forget_lookups()
    return find_model(address, [])


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_a_store_without_hashes_names_a_version_and_nothing_is_read_for_it(file, address, server):
    path = find_model(address, [])
    sent = server.sent
    content = content_of(path)

    assert unread_bytes([path]) == 0
    assert server.sent == sent
    assert content.startswith("version-") and not is_hash(content)
    assert content_of(again(address)) == content
    assert is_hash(content_of(file))


def test_a_folder_of_such_files_is_named_by_their_versions(file, server, served):
    (served / "config.json").write_text("{}")
    content = content_of(find_model(server.url, []))

    assert content.startswith("version-")
    assert content_of(again(server.url)) == content

    (served / "config.json").write_text('{"model_type": "other"}')
    assert content_of(again(server.url)) == content

    save_file({"other": torch.zeros(9)}, file)
    assert content_of(again(server.url)) != content


def test_contents_that_differ_in_one_byte_have_other_hashes(file, address):
    first = content_of(find_model(address, []))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)

    assert content_of(again(address)) != first


def test_the_same_bytes_at_another_address_are_another_content(file, address, server, served):
    (served / "copy.safetensors").write_bytes(file.read_bytes())

    assert content_of(find_model(address, [])) != content_of(find_model(f"{server.url}/copy.safetensors", []))


def test_what_is_kept_is_not_fetched_again(file, address, server, tmp_path):
    content_cache.keep_in(str(tmp_path / "kept"))
    first = merge(weighted_sum(address, file, alpha=0.3))
    sent = server.sent

    again(address)
    second = merge(weighted_sum(address, file, alpha=0.3))

    assert all(torch.equal(first[key], second[key]) for key in first)
    assert server.sent - sent < 10  # its version
    assert size_of(tmp_path / "kept") > file.stat().st_size * 0.99


def test_processes_that_read_at_the_same_time_fetch_a_file_once(file, address, server, tmp_path):
    content_cache.keep_in(str(tmp_path / "kept"))
    path = find_model(address, [])
    server.latency, server.sent = 0.05, 0
    processes = multiprocessing.get_context("spawn")
    together, results = processes.Barrier(3), processes.Queue()
    arguments = (path, together, results)
    readers = [processes.Process(target=_read_in, args=arguments, daemon=True) for _ in range(3)]
    for reader in readers:
        reader.start()

    read = {results.get(timeout=120) for _ in readers}

    assert read == {hashlib.sha256(file.read_bytes()).hexdigest()}
    assert server.sent <= file.stat().st_size
    assert not list((tmp_path / "kept").rglob("*.lock"))


def test_what_is_kept_of_one_version_is_not_taken_for_another(file, address, tmp_path):
    content_cache.keep_in(str(tmp_path / "kept"))
    merge(weighted_sum(address, file, alpha=0.3))
    other = {f"layers.{n}": torch.randn(100_000) for n in range(4)}
    save_file(other, file)

    again(address)
    merged = merge(weighted_sum(address, other, alpha=0.0))

    assert all(torch.equal(merged[key], other[key]) for key in other)


def test_a_damaged_range_is_fetched_again(file, address, tmp_path):
    content_cache.keep_in(str(tmp_path / "kept"))
    first = merge(weighted_sum(address, file, alpha=0.3))
    for path in (tmp_path / "kept").rglob("*-*"):
        if path.is_file():
            content = bytearray(path.read_bytes())
            content[-5] ^= 1
            path.write_bytes(content)

    again(address)
    second = merge(weighted_sum(address, file, alpha=0.3))

    assert all(torch.equal(first[key], second[key]) for key in first)


def test_no_more_is_kept_than_is_allowed(file, address, server, tmp_path):
    limit = 900_000
    content_cache.keep_in(str(tmp_path / "kept"), limit)

    merge(weighted_sum(address, file, alpha=0.3))

    assert 300_000 < size_of(tmp_path / "kept") <= limit


def _read_in(path: Path, together, results) -> None:
    """Read a remote file in pieces, which begins when others do, too."""
    with contextlib.closing(RemoteFile(path)) as remote:
        content = bytearray(remote.size)
        together.wait()
        for start in range(0, remote.size, 1 << 18):
            remote.read_into(start, memoryview(content)[start : start + (1 << 18)])
        results.put(hashlib.sha256(content).hexdigest())


@pytest.mark.heavy
def test_several_processes_share_the_folder(file, address, tmp_path, monkeypatch):
    content_cache.keep_in(str(tmp_path / "kept"), 900_000)
    spawn = multiprocessing.get_context("spawn")
    together, results = spawn.Barrier(3), spawn.Queue()
    path = find_model(address, [])
    processes = [spawn.Process(target=_read_in, args=(path, together, results)) for _ in range(3)]

    for process in processes:
        process.start()
    hashes = {results.get(timeout=120) for _ in processes}
    for process in processes:
        process.join()

    assert hashes == {hashlib.sha256(file.read_bytes()).hexdigest()}
    assert size_of(tmp_path / "kept") <= 900_000 + 3 * 400_000


def test_a_size_that_is_no_number_is_an_error(file, address, monkeypatch, tmp_path):
    monkeypatch.setenv(MODELS_VARIABLE, str(tmp_path))
    monkeypatch.setenv(MODELS_SIZE_VARIABLE, "much")

    with pytest.raises(ConfigError, match="MECHA_MODELS_CACHE_SIZE: expected a number of bytes, got 'much'"):
        RemoteFile(find_model(address, []))
    assert os.environ[MODELS_SIZE_VARIABLE] == "much"
