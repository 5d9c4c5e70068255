"""Models in a bucket of S3, on a server of moto on the loopback."""

import sys
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import save

from mecha_exp import merge, weighted_sum
from mecha_exp.checkpoint import load
from mecha_exp.checkpoint.remote import lookup, stores
from mecha_exp.errors import CheckpointError
from mecha_exp.lab.content_hash import content_of, unread_bytes
from mecha_exp.sources.search import find_model

pytestmark = pytest.mark.libraries

TENSORS = {"layers.0.weight": torch.arange(600_000.0).reshape(1000, 600), "layers.0.bias": torch.ones(7)}
ADDRESS = "s3://models/tiny/model.safetensors"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(endpoint: str, monkeypatch):
    """The client of boto3 for an empty bucket `models`, with a model in it."""
    import boto3
    import fsspec

    for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    stores.store_of.cache_clear()
    fsspec.filesystem("s3").clear_instance_cache()
    client = boto3.client("s3", endpoint_url=endpoint)
    client.create_bucket(Bucket="models")
    client.put_object(Bucket="models", Key="tiny/model.safetensors", Body=save(TENSORS))
    client.put_object(Bucket="models", Key="tiny/config.json", Body=b"{}")
    yield client
    for entry in client.list_objects_v2(Bucket="models").get("Contents", ()):
        client.delete_object(Bucket="models", Key=entry["Key"])
    client.delete_bucket(Bucket="models")


@pytest.mark.parametrize("address", [ADDRESS, "s3://models/tiny", "s3://models/tiny/"])
def test_a_model_is_merged_by_its_address(address, bucket):
    merged = merge(weighted_sum(address, {key: -tensor for key, tensor in TENSORS.items()}, alpha=0.0))

    assert all(torch.equal(merged[key], TENSORS[key]) for key in TENSORS)


def test_a_checksum_of_s3_is_the_content_and_nothing_is_read_for_it(bucket, tmp_path):
    content = save(TENSORS)
    bucket.put_object(Bucket="models", Key="tiny/model.safetensors", Body=content, ChecksumAlgorithm="SHA256")
    (tmp_path / "here.safetensors").write_bytes(content)
    path = find_model(ADDRESS, [])

    assert unread_bytes([path]) == 0
    assert content_of(path) == content_of(tmp_path / "here.safetensors")


def test_without_a_checksum_the_content_is_read(bucket, tmp_path):
    (tmp_path / "here.safetensors").write_bytes(save(TENSORS))
    path = find_model(ADDRESS, [])

    assert unread_bytes([path]) == len(save(TENSORS))
    assert content_of(path) == content_of(tmp_path / "here.safetensors")


def test_an_object_that_is_replaced_under_a_merge_is_an_error(bucket):
    path = find_model(ADDRESS, [])
    other = save({key: -tensor for key, tensor in TENSORS.items()})
    bucket.put_object(Bucket="models", Key="tiny/model.safetensors", Body=other)

    with pytest.raises(
        CheckpointError, match=r"model\.safetensors changed after it was looked up: .* the ETag"
    ):
        load(path)


def test_an_object_that_is_gone_is_an_error(bucket):
    path = find_model(ADDRESS, [])
    bucket.delete_object(Bucket="models", Key="tiny/model.safetensors")

    with pytest.raises(CheckpointError, match=r"changed after it was looked up: it is gone"):
        load(path)


@pytest.mark.parametrize("address", ["s3://models/none", "s3://none/tiny", "s3://models/none.safetensors"])
def test_what_is_not_there_is_said(address, bucket):
    with pytest.raises(CheckpointError, match=rf"{address} (does not exist, or is empty|cannot be read)"):
        find_model(address, [])


def test_without_the_library_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    stores.store_of.cache_clear()
    lookup.forget_lookups()

    with pytest.raises(CheckpointError, match=r"s3fs, which is not installed: pip install 'mecha_exp\[s3\]'"):
        find_model(ADDRESS, [])
