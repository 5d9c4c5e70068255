"""Models in a bucket of Google Cloud Storage, on a server of gcp-storage-emulator on the loopback."""

import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from threading import Thread

import pytest
import torch
from safetensors.torch import save as as_bytes

from mecha_exp import merge, weighted_sum
from mecha_exp.checkpoint import load
from mecha_exp.checkpoint.remote import lookup, stores
from mecha_exp.errors import CheckpointError, MergeError
from mecha_exp.lab.bucket import open_store
from mecha_exp.lab.content_hash import content_of, unread_bytes
from mecha_exp.lab.stored import StoredEvaluation, StoredMerge
from mecha_exp.sources.search import find_model

pytestmark = pytest.mark.libraries

TENSORS = {"layers.0.weight": torch.arange(240_000.0).reshape(400, 600), "layers.0.bias": torch.ones(7)}
OTHERS = {key: -tensor for key, tensor in TENSORS.items()}
ADDRESS = "gs://models/tiny/model.safetensors"


class Server(ThreadingHTTPServer):
    """A server whose clients may hang up, as gcsfs does with what it no longer needs."""

    def __init__(self, handler) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.ranges: list[str] = []

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

    routes = [
        (path, {name: download if call is objects.download else call for name, call in calls.items()})
        for path, calls in emulator.HANDLERS
    ]
    patch = pytest.MonkeyPatch()
    patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # zonal buckets, which need credentials
    patch.setattr(emulator, "HANDLERS", routes)
    web = Server(partial(emulator.RequestHandler, Storage(use_memory_fs=True)))
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


def test_the_content_is_that_of_what_is_read(bucket, tmp_path):
    (tmp_path / "here.safetensors").write_bytes(as_bytes(TENSORS))
    path = find_model(ADDRESS, [])

    assert unread_bytes([path]) == len(as_bytes(TENSORS))
    assert content_of(path) == content_of(tmp_path / "here.safetensors")


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


def test_an_output_is_refused_before_the_work(bucket):
    with pytest.raises((CheckpointError, MergeError), match=r"this machine's disks or to s3://"):
        merge(weighted_sum(ADDRESS, OTHERS, alpha=0.0), "gs://models/out.safetensors")


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
