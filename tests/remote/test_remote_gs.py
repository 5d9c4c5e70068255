"""Models in a bucket of Google Cloud Storage, on a server of gcp-storage-emulator on the loopback."""

import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save as as_bytes

from mecha_exp import merge, weighted_sum
from mecha_exp.checkpoint import load
from mecha_exp.checkpoint.remote import lookup, stores
from mecha_exp.checkpoint.upload import resumable
from mecha_exp.errors import CheckpointError, MergeError
from mecha_exp.lab.bucket import open_store
from mecha_exp.lab.content_hash import content_of, unread_bytes
from mecha_exp.lab.stored_results import StoredEvaluation, StoredMerge
from mecha_exp.sources.search import find_model

pytestmark = pytest.mark.libraries

TENSORS = {"layers.0.weight": torch.arange(240_000.0).reshape(400, 600), "layers.0.bias": torch.ones(7)}
OTHERS = {key: -tensor for key, tensor in TENSORS.items()}
ADDRESS = "gs://models/tiny/model.safetensors"


class Server(ThreadingHTTPServer):
    """A server whose clients may hang up, as gcsfs does with what it no longer needs."""

    def __init__(self, handler, storage) -> None:
        super().__init__(("127.0.0.1", 0), partial(handler, storage))
        self.ranges: list[str] = []
        self.storage = storage

    def handle_error(self, request, client_address) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    pytest.importorskip("gcsfs")
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    from gcp_storage_emulator.exceptions import NotFound
    from gcp_storage_emulator.handlers import objects
    from gcp_storage_emulator.storage import Storage

    def download(request, response, storage, **more):
        """As the service does: 404 for a generation that is no longer there, which the emulator ignores."""
        wanted = request.query.get("generation")
        web.ranges.append(request.get_header("range", "whole"))
        place = request.params["bucket_name"], request.params["object_id"]
        with contextlib.suppress(NotFound):
            if not wanted or wanted == [storage.get_file_obj(*place)["generation"]]:
                objects.download(request, response, storage, **more)
                return
        response.status = HTTPStatus.NOT_FOUND

    def cancel(request, response, storage, **more):
        """As the service does with an upload that is given up, which the emulator does not know."""
        storage.delete_resumable_file_obj(request.query["upload_id"][0])
        response.status = SimpleNamespace(value=499, phrase="Client Closed Request")

    def ours(calls):
        changed = {name: download if call is objects.download else call for name, call in calls.items()}
        return {**changed, "DELETE": cancel} if objects.upload_partial in calls.values() else changed

    patch = pytest.MonkeyPatch()
    patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # zonal buckets, which need credentials
    patch.setattr(emulator, "HANDLERS", [(path, ours(calls)) for path, calls in emulator.HANDLERS])
    web = Server(emulator.RequestHandler, Storage(use_memory_fs=True))
    Thread(target=web.serve_forever, daemon=True).start()
    yield web
    web.shutdown()
    web.server_close()
    patch.undo()


@pytest.fixture
def bucket(server: Server, monkeypatch):
    """The file system of gcsfs for a bucket `models`, with a model in it."""
    import fsspec

    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_port}")
    stores.store_of.cache_clear()
    fsspec.get_filesystem_class("gs").clear_instance_cache()
    files = fsspec.filesystem("gs")
    files.mkdir("models")
    files.pipe({"models/tiny/model.safetensors": as_bytes(TENSORS), "models/tiny/config.json": b"{}"})
    server.ranges.clear()
    yield files
    files.rm("models", recursive=True)
    fsspec.get_filesystem_class("gs").clear_instance_cache()


@pytest.mark.parametrize("address", [ADDRESS, "gs://models/tiny", "gcs://models/tiny/"])
def test_a_model_is_merged_by_its_address(address, bucket):
    merged = merge(weighted_sum(address, OTHERS, alpha=0.0))

    assert all(torch.equal(merged[key], TENSORS[key]) for key in TENSORS)


def test_headers_are_read_by_ranges(bucket, server):
    find_model(ADDRESS, [])

    assert server.ranges == [f"bytes=0-{lookup.FIRST_BYTES - 1}"]


def test_the_generation_stands_for_the_content(bucket):
    path = find_model(ADDRESS, [])

    assert unread_bytes([path]) == 0
    assert content_of(path).startswith("version-")


@pytest.mark.parametrize("happens", ["replaced", "gone"])
def test_an_object_that_changes_under_a_merge_is_an_error(happens, bucket):
    path = find_model(ADDRESS, [])
    if happens == "replaced":
        bucket.pipe_file("models/tiny/model.safetensors", as_bytes(OTHERS))
    else:
        bucket.rm_file("models/tiny/model.safetensors")

    with pytest.raises(
        CheckpointError, match=r"model\.safetensors changed after it was looked up: .* the generation"
    ):
        load(path)


@pytest.mark.parametrize("address", ["gs://models/none", "gs://none/tiny", "gs://models/none.safetensors"])
def test_what_is_not_there_is_said(address, bucket):
    with pytest.raises(CheckpointError, match=rf"{address} (does not exist, or is empty|cannot be read)"):
        find_model(address, [])


@pytest.fixture
def chunks(bucket, server, monkeypatch):
    """The file system of a bucket, with chunks of the smallest size that Google takes."""
    monkeypatch.setattr(resumable, "CHUNK", 1 << 18)
    yield bucket
    assert not server.storage.resumable  # every upload was completed, or given up


def test_an_output_is_uploaded_in_chunks_and_has_the_bytes_of_a_file(chunks, save, tmp_path):
    model = save("model", TENSORS)
    merge(weighted_sum(model, model, alpha=0.3), tmp_path / "here.safetensors")

    merge(weighted_sum(model, model, alpha=0.3), "gs://models/out/merged.safetensors")

    here = (tmp_path / "here.safetensors").read_bytes()
    assert len(here) > 3 * resumable.CHUNK
    assert chunks.cat_file("models/out/merged.safetensors") == here


def test_bytes_that_come_early_wait(chunks):
    content = bytes(range(256)) * 4096
    upload = resumable.ResumableUpload("gs://models/out.bin", len(content))

    for start in range(len(content) - 100_000, -100_000, -100_000):
        upload.write(max(start, 0), memoryview(content)[max(start, 0) : start + 100_000])
    assert not chunks.exists("models/out.bin")
    upload.complete()

    assert chunks.cat_file("models/out.bin") == content


def test_a_folder_of_shards_is_uploaded_with_its_small_files(chunks, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(as_bytes(TENSORS))
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    recipe = weighted_sum(str(folder), str(folder), alpha=0.3)
    merge(recipe, tmp_path / "here", shard_size="900KB")

    merge(recipe, "gs://models/merged/", shard_size="900KB")

    here = {path.name: path.read_bytes() for path in (tmp_path / "here").iterdir()}
    assert len([name for name in here if name.startswith("model-")]) == 2
    assert {name: chunks.cat_file(f"models/merged/{name}") for name in here} == here
    with pytest.raises(CheckpointError, match="holds files already, and a bucket cannot replace a folder"):
        merge(recipe, "gs://models/merged", shard_size="900KB")


def test_after_an_error_nothing_is_there_and_the_old_file_stays(chunks, save):
    chunks.pipe_file("models/out.safetensors", b"old")
    model = save("model", TENSORS)
    broken = save("broken", {**TENSORS, "layers.0.bias": torch.full((7,), torch.nan)})

    with pytest.raises(MergeError, match="bias"):
        merge(weighted_sum(model, broken, alpha=0.3), "gs://models/out.safetensors")

    assert chunks.cat_file("models/out.safetensors") == b"old"


def test_a_chunk_that_the_store_refuses_is_an_error(chunks, save, monkeypatch):
    from gcsfs import core

    async def refuse(*about):
        raise OSError("no more room")

    model = save("model", TENSORS)
    monkeypatch.setattr(core, "upload_chunk", refuse)

    with pytest.raises(CheckpointError, match=r"out\.safetensors cannot be written: no more room"):
        merge(weighted_sum(model, model, alpha=0.3), "gs://models/out.safetensors")
    assert not chunks.exists("models/out.safetensors")


def test_a_place_where_nothing_can_be_written_is_refused_before_the_work(chunks, save):
    model = save("model", TENSORS)
    with pytest.raises(CheckpointError, match=r"gs://nowhere/out\.safetensors cannot be written"):
        merge(weighted_sum(model, model, alpha=0.3), "gs://nowhere/out.safetensors")


def test_results_are_kept_in_a_bucket(bucket):
    store = open_store("gs://models/study")
    merged = StoredMerge("f" * 64, {"recipe": "x"}, metrics={"x": 1.0})
    store.put(merged)
    store.put_evaluation("digits-1", StoredEvaluation({"accuracy": 0.5}, b"outcomes", {}), "f" * 64)
    store.flush()

    again = open_store("gs://models/study")
    assert again.get("f" * 64) == merged
    found = again.evaluation("digits-1", "f" * 64)
    assert found is not None and found.outcomes == b"outcomes"


def test_without_the_library_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    stores.store_of.cache_clear()
    lookup.forget_lookups()

    with pytest.raises(
        CheckpointError, match=r"gcsfs, which is not installed: pip install 'mecha_exp\[gs\]'"
    ):
        find_model(ADDRESS, [])
