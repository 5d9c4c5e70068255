"""What stores may say that cannot be relied on, each refused in words."""

import sys

import pytest
import torch

from mecha_exp import merge, weighted_sum
from mecha_exp.checkpoint.remote import file_systems, lookup, web
from mecha_exp.checkpoint.remote.pin import Pin
from mecha_exp.checkpoint.remote.stores import store_at
from mecha_exp.checkpoint.shards import pack
from mecha_exp.checkpoint.upload import writer
from mecha_exp.errors import CheckpointError
from mecha_exp.sources.search import find_model

PIN = Pin("s3://bucket/a", 100, "ETag x")


def refused(message: str):
    return pytest.raises(CheckpointError, match=message)


def test_a_store_whose_package_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "adlfs", None)

    with refused(r"az:// needs another package: .*adlfs"):
        find_model("az://bucket/a", [])


def test_a_store_without_versions():
    with refused(r"ftp://host/a: the store tells neither a version nor a time of change"):
        file_systems._version({"name": "a", "size": 9}, "ftp://host/a")


def test_a_folder_without_weights():
    import fsspec

    fsspec.filesystem("memory").pipe("/texts/readme.txt", b"hello")

    with refused(r"memory://texts has no safetensors files"):
        find_model("memory://texts", [])


def test_an_index_that_is_too_large():
    with refused(
        r"https://a/model\.safetensors\.index\.json has 200,000,000 bytes: this is not an index of shards"
    ):
        web._shards(None, Pin("https://a/model.safetensors.index.json", 200_000_000))


def test_a_small_file_of_another_content_than_the_store_says(server, served):
    (served / "tokenizer.json").write_text("{}")
    address = f"{server.url}/tokenizer.json"
    store = store_at(address)
    version = store.files(f"{address}?")[""].version

    with refused(r"tokenizer\.json does not have the content that the store says: its hash differs"):
        lookup._content(store, Pin(address, 2, version, "0" * 64))


def test_more_bytes_than_were_asked_for():
    with refused(r"s3://bucket/a: the store sends more bytes than it was asked for"):
        file_systems._fill(memoryview(bytearray(3)), b"four", PIN)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ("bytes 4-13/100", r"asked for bytes from 0 on, the store sends bytes 4-13/100"),
        ("bytes 0-8/100", r"asked for bytes from 0 on, the store sends bytes 0-8/100"),
        ("bytes 0-9/200", r"changed after it was looked up: it had 100 bytes, and has 200"),
    ],
)
def test_a_wrong_range_of_s3(sent, message):
    with refused(message):
        file_systems._require_range(PIN, {"ContentRange": sent}, 0, 10)


def test_an_object_of_s3_without_the_right_to_read_it():
    error = file_systems._of_s3(PIN, PermissionError("Forbidden"))

    assert str(error) == "s3://bucket/a: no access: Forbidden."


def test_an_address_that_is_none(server):
    with refused(r"http://\[/a\.safetensors "):
        find_model("http://[/a.safetensors", [])


def test_an_output_in_another_store():
    model = {"w": torch.ones(3)}
    with refused(r"az://bucket/a\.safetensors lies elsewhere\. Outputs are written to this machine's disks"):
        merge(weighted_sum(model, model, alpha=0.3), "az://bucket/a.safetensors")


def test_an_upload_that_cannot_be_given_up_does_not_keep_the_others(monkeypatch):
    import fsspec

    files, given_up = fsspec.filesystem("memory"), []

    class Upload:
        def __init__(self, address: str, nbytes: int) -> None:
            self.address = address

        def write(self, start: int, data: memoryview) -> None:
            """Nothing: the content does not matter here."""

        def complete(self) -> None:
            if "00002" in self.address:
                raise CheckpointError("the network is gone")
            files.pipe(self.address, b"complete")

        def abort(self) -> None:
            given_up.append(self.address)
            if "00002" in self.address:
                raise CheckpointError("it cannot be given up")

    monkeypatch.setattr(writer, "upload_to", Upload)
    tensors = dict.fromkeys("abc", ("F32", (4,)))
    made = writer.UploadWriter("memory://half", pack(tensors, [], 16), {}, {})

    with refused("the network is gone"):
        made.commit()
    assert files.exists("memory://half/model-00001-of-00003.safetensors")
    with refused("it cannot be given up"):
        made.abort()

    assert len(given_up) == 3
    assert not files.exists("memory://half/model-00001-of-00003.safetensors")


@pytest.mark.parametrize(
    "address",
    [
        "ftp://127.0.0.1:1/a.safetensors",
        "dir://x/a.safetensors",
        "zip://x/a.safetensors::file:///none.zip",
        "reference://x/a.safetensors",
        "nothing://x/a.safetensors",
    ],
)
def test_any_protocol_of_fsspec_ends_in_a_sentence(address):
    with pytest.raises(CheckpointError):
        merge(weighted_sum(address, {"w": torch.ones(3)}, alpha=0.3))
