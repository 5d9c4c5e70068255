"""Models in a bucket of S3, on a server of moto on the loopback."""

import sys

import pytest
import torch
from buckets import at_first, busy, cut, short
from safetensors.torch import save as as_bytes

from mecha_exp import merge, weighted_sum
from mecha_exp.checkpoint import load
from mecha_exp.checkpoint.remote import lookup, stores
from mecha_exp.checkpoint.upload import multipart, writer
from mecha_exp.errors import CheckpointError, MergeError
from mecha_exp.lab.content_hash import content_of, is_hash, unread_bytes
from mecha_exp.sources.search import find_model

pytestmark = pytest.mark.libraries

TENSORS = {"layers.0.weight": torch.arange(600_000.0).reshape(1000, 600), "layers.0.bias": torch.ones(7)}
ADDRESS = "s3://models/tiny/model.safetensors"


@pytest.fixture
def bucket(s3_client):
    """The client of boto3 for a bucket `models` with one model in it."""
    s3_client.create_bucket(Bucket="models")
    s3_client.put_object(Bucket="models", Key="tiny/model.safetensors", Body=as_bytes(TENSORS))
    s3_client.put_object(Bucket="models", Key="tiny/config.json", Body=b"{}")
    return s3_client


@pytest.mark.parametrize("address", [ADDRESS, "s3://models/tiny", "s3://models/tiny/"])
def test_a_model_is_merged_by_its_address(address, bucket):
    merged = merge(weighted_sum(address, {key: -tensor for key, tensor in TENSORS.items()}, alpha=0.0))

    assert all(torch.equal(merged[key], TENSORS[key]) for key in TENSORS)


def test_a_checksum_of_s3_is_the_content_and_nothing_is_read_for_it(bucket, tmp_path):
    content = as_bytes(TENSORS)
    bucket.put_object(Bucket="models", Key="tiny/model.safetensors", Body=content, ChecksumAlgorithm="SHA256")
    (tmp_path / "here.safetensors").write_bytes(content)
    path = find_model(ADDRESS, [])

    assert unread_bytes([path]) == 0
    assert content_of(path) == content_of(tmp_path / "here.safetensors")


def test_without_a_checksum_of_the_whole_the_version_stands_for_the_content(bucket):
    contents = []
    for tensors in (TENSORS, {key: -tensor for key, tensor in TENSORS.items()}, TENSORS):
        bucket.put_object(Bucket="models", Key="tiny/model.safetensors", Body=as_bytes(tensors))
        lookup.forget_lookups()
        path = find_model(ADDRESS, [])
        assert unread_bytes([path]) == 0
        contents.append(content_of(path))

    assert not any(map(is_hash, contents))
    assert contents[0] == contents[2] != contents[1]


def test_an_object_of_several_parts_is_not_read_for_its_content(bucket, s3_server):
    place = {"Bucket": "models", "Key": "parts/model.safetensors"}
    content = as_bytes({"layers.0.weight": torch.ones(1_500_000)})
    upload = bucket.create_multipart_upload(**place)["UploadId"]
    parts = []
    for number, start in enumerate(range(0, len(content), 5 << 20), 1):
        body = content[start : start + (5 << 20)]
        part = bucket.upload_part(**place, UploadId=upload, PartNumber=number, Body=body)
        parts.append({"PartNumber": number, "ETag": part["ETag"]})
    bucket.complete_multipart_upload(**place, UploadId=upload, MultipartUpload={"Parts": parts})
    path = find_model("s3://models/parts/model.safetensors", [])
    _, counted = s3_server
    counted.clear()

    assert content_of(path).startswith("version-")
    assert counted.requests == []


def test_an_object_that_is_replaced_under_a_merge_is_an_error(bucket):
    path = find_model(ADDRESS, [])
    other = as_bytes({key: -tensor for key, tensor in TENSORS.items()})
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


BIG = {
    "layers.0.weight": torch.randn(1500, 1000),
    "layers.0.bias": torch.ones(7),
    "head.weight": torch.randn(800, 1000),
}


@pytest.fixture
def parts(bucket, monkeypatch):
    """Parts of the smallest size that S3 takes."""
    monkeypatch.setattr(multipart, "PART", 5 << 20)
    return bucket


def content(bucket, key: str) -> bytes:
    return bucket.get_object(Bucket="models", Key=key)["Body"].read()


def keys(bucket, prefix: str) -> list[str]:
    listed = bucket.list_objects_v2(Bucket="models", Prefix=prefix).get("Contents", ())
    return [entry["Key"].removeprefix(prefix) for entry in listed]


def uploads(bucket) -> list[object]:
    return bucket.list_multipart_uploads(Bucket="models").get("Uploads", [])


def test_an_output_is_uploaded_in_parts_and_has_the_bytes_of_a_file(parts, save, tmp_path):
    model = save("big", BIG)
    merge(weighted_sum(model, model, alpha=0.3), tmp_path / "here.safetensors")

    merge(weighted_sum(model, model, alpha=0.3), "s3://models/out/merged.safetensors")

    here = (tmp_path / "here.safetensors").read_bytes()
    assert len(here) > 5 << 20
    assert content(parts, "out/merged.safetensors") == here
    assert "-2" in parts.head_object(Bucket="models", Key="out/merged.safetensors")["ETag"]
    assert not uploads(parts)


def test_a_folder_of_shards_is_uploaded_with_its_small_files(parts, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(as_bytes(BIG))
    (folder / "config.json").write_text('{"model_type": "tiny", "torch_dtype": "float32"}')
    recipe = weighted_sum(str(folder), str(folder), alpha=0.3)
    merge(recipe, tmp_path / "here", shard_size="4MB")

    merge(recipe, "s3://models/merged/", shard_size="4MB")

    names = sorted(path.name for path in (tmp_path / "here").iterdir())
    assert sorted(keys(parts, "merged/")) == names
    assert all(content(parts, f"merged/{name}") == (tmp_path / "here" / name).read_bytes() for name in names)
    with pytest.raises(CheckpointError, match="holds files already, and a bucket cannot replace a folder"):
        merge(recipe, "s3://models/merged", shard_size="4MB")


def test_after_an_error_nothing_is_there_and_the_old_file_stays(parts, save):
    parts.put_object(Bucket="models", Key="out.safetensors", Body=b"old")
    odd = {**BIG, "layers.0.bias": torch.full((7,), torch.nan)}
    model, broken = save("model", BIG), save("broken", odd)

    with pytest.raises(MergeError, match="bias"):
        merge(weighted_sum(model, broken, alpha=0.3), "s3://models/out.safetensors")

    assert content(parts, "out.safetensors") == b"old"
    assert not uploads(parts)


def test_a_part_that_the_store_refuses_is_an_error(parts, save, monkeypatch):
    model, call = save("model", BIG), multipart.MultipartUpload._call

    def refused(self, name, **arguments):
        if name == "upload_part":
            raise CheckpointError(f"{self.address} cannot be written: no more room.")
        return call(self, name, **arguments)

    monkeypatch.setattr(multipart.MultipartUpload, "_call", refused)
    with pytest.raises(CheckpointError, match="cannot be written: no more room"):
        merge(weighted_sum(model, model, alpha=0.3), "s3://models/out.safetensors")
    assert not keys(parts, "out") and not uploads(parts)


@pytest.mark.parametrize("refused", ["model-00001", "model-00002", "config.json", "index.json"])
def test_a_folder_that_cannot_be_committed_leaves_nothing(refused, parts, tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(as_bytes(BIG))
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    call, file_system = multipart.MultipartUpload._call, writer.opened("s3://models")[0]
    pipe_file = file_system.pipe_file

    def complete(self, name, **arguments):
        if name == "complete_multipart_upload" and refused in self.address:
            raise CheckpointError(f"{self.address} cannot be written: no more room.")
        return call(self, name, **arguments)

    def put(path, content):
        if path.endswith(refused):
            raise OSError("no more room")
        return pipe_file(path, content)

    monkeypatch.setattr(multipart.MultipartUpload, "_call", complete)
    monkeypatch.setattr(file_system, "pipe_file", put)
    recipe = weighted_sum(str(folder), str(folder), alpha=0.3)
    with pytest.raises(CheckpointError, match=rf"{refused}.* cannot be written: no more room"):
        merge(recipe, "s3://models/merged", shard_size="4MB")
    assert not keys(parts, "merged") and not uploads(parts)


def test_files_that_cannot_be_deleted_are_named(parts, save, monkeypatch):
    model = save("model", BIG)
    file_system = writer.opened("s3://models")[0]

    def refuse(*_, **__):
        raise OSError("access is denied")

    monkeypatch.setattr(file_system, "pipe_file", refuse)
    monkeypatch.setattr(file_system, "rm", refuse)
    with pytest.raises(CheckpointError, match=r"cannot be deleted: access is denied\. Delete them: model-"):
        merge(weighted_sum(model, model, alpha=0.3), "s3://models/merged", shard_size="4MB")


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (
            "s3://nowhere/out.safetensors",
            "nowhere/out.safetensors cannot be written: .*bucket does not exist",
        ),
        ("s3://models/out.gguf", "GGUF is written to this machine's disks only"),
        (ADDRESS, f"the output {ADDRESS} is an input, which would be replaced"),
    ],
)
def test_outputs_that_cannot_be_uploaded_are_refused_before_the_work(output, words, bucket):
    with pytest.raises(CheckpointError, match=words):
        merge(weighted_sum(ADDRESS, ADDRESS, alpha=0.3), output)


def test_an_upload_is_not_made_by_many(bucket, save):
    model = save("model", BIG)
    with pytest.raises(MergeError, match=r"make their files on a disk, and s3://models/many is not one"):
        merge(weighted_sum(model, model, alpha=0.3), "s3://models/many", shard_size="4MB", across=2)


@pytest.mark.parametrize("fault", [busy, cut, short])
def test_an_answer_that_fails_for_a_moment_is_asked_for_again(fault, bucket, s3_server):
    find_model(ADDRESS, [])
    _, counted = s3_server
    counted.fault = at_first(fault, 2, "GET")

    merged = merge(weighted_sum(ADDRESS, {key: -tensor for key, tensor in TENSORS.items()}, alpha=0.0))

    assert all(torch.equal(merged[key], TENSORS[key]) for key in TENSORS)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (busy, r"Reduce your request rate\.$"),
        (cut, "Not enough data to satisfy content length header"),
        (short, "the answer has 1,195,998 bytes of those that it names, bytes 8192-2400187/2400188"),
    ],
)
def test_a_store_that_always_fails_is_an_error(fault, message, bucket, s3_server, monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    find_model(ADDRESS, [])
    _, counted = s3_server
    counted.fault = at_first(fault, 10_000, "GET")

    with pytest.raises(CheckpointError, match=f"{ADDRESS} cannot be read, tried 6 times: .*{message}"):
        merge(weighted_sum(ADDRESS, TENSORS, alpha=0.5))
