"""A header is never trusted: every way in which a file can be wrong has its own clear message."""

import json
import os
import struct
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mecha_exp.checkpoint import encode_header, read_header
from mecha_exp.checkpoint.safetensors.header import MAX_HEADER_BYTES, MAX_TENSORS
from mecha_exp.errors import CheckpointError

untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
posix_only = pytest.mark.skipif(sys.platform == "win32", reason="a POSIX file type")


def entry(dtype: Any = "F32", shape: Any = (2,), span: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": span}


def file_bytes(header: bytes | dict[str, Any], data: bytes = bytes(8)) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


TWICE = b'{"w":%s,"w":%s}' % ((json.dumps(entry()).encode(),) * 2)
DIGITS = b'{"w":{"dtype":"F32","shape":[%s],"data_offsets":[0,8]}}'

HOSTILE = {
    "empty": (b"", "is empty.*download"),
    "seven bytes": (b"1234567", "7 bytes, too short.*download"),
    "header longer than the file": (struct.pack("<Q", 5000) + b"{}", "5,000 bytes, the file has 2.*download"),
    "header over 100 MB": (struct.pack("<Q", 100_000_001) + b"{}", "allows 100 MB"),
    "header of 16 EiB": (b"\xff" * 8 + b"{}", "allows 100 MB"),
    "header of no bytes": (bytes(8), "not a JSON object"),
    "zip": (b"PK\x03\x04" + bytes(60), "pickle checkpoint.*convert"),
    "pickle": (b"\x80\x02}q\x00(X\x05\x00\x00" + bytes(60), "pickle checkpoint.*convert"),
    "short pickle": (b"\x80\x04}.", "too short"),
    "git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
    "web page": (b"<!DOCTYPE html><html></html>", "web page"),
    "gguf": (b"GGUF\x03\x00\x00\x00" + bytes(40), "GGUF"),
    "not UTF-8": (file_bytes(b'{"\xff":1}'), "not UTF-8"),
    "UTF-16": (file_bytes('{"a":1}'.encode("utf-16-le")), "not valid JSON"),
    "lone surrogate": (file_bytes(b'{"\\ud800":{}}'), "not valid Unicode"),
    "lone surrogate in metadata": (file_bytes(b'{"__metadata__":{"a":"\\ud800"}}'), "not valid Unicode"),
    "not JSON": (file_bytes(b'{"a":'), "not valid JSON"),
    "two objects": (file_bytes(b"{}{}"), "not valid JSON"),
    "a list": (file_bytes(b"[1]"), "not a JSON object"),
    "nested deeply": (file_bytes(b'{"a":' + b"[" * 200_000), "nested too deeply|not valid JSON"),
    "key twice": (file_bytes(TWICE), "'w' twice"),
    "field twice": (file_bytes(b'{"w":{"dtype":"F32","dtype":"F16"}}'), "'dtype' twice"),
    "metadata is a list": (file_bytes({"__metadata__": []}, b""), "__metadata__"),
    "metadata is null": (file_bytes({"__metadata__": None}, b""), "__metadata__"),
    "metadata of numbers": (file_bytes({"__metadata__": {"a": 1}}, b""), "__metadata__"),
    "entry is a list": (file_bytes({"w": [1]}), "'w' needs dtype, shape"),
    "entry without shape": (file_bytes({"w": {"dtype": "F32", "data_offsets": [0, 8]}}), "'w' needs"),
    "unknown dtype": (file_bytes({"w": entry("F23")}), "'w': unknown dtype 'F23'. Did you mean"),
    "dtype is a number": (file_bytes({"w": entry(3)}), "dtype that is not a text"),
    "dtype is a list": (file_bytes({"w": entry(["F32"])}), "dtype that is not a text"),
    "negative size": (file_bytes({"w": entry(shape=[-2])}), "'w' has a shape"),
    "size is true": (file_bytes({"w": entry("F64", [True])}), "'w' has a shape"),
    "size is a text": (file_bytes({"w": entry(shape=["2"])}), "'w' has a shape"),
    "size is 2.0": (file_bytes({"w": entry(shape=[2.0])}), "only integers"),
    "size is NaN": (file_bytes({"w": entry(shape=[float("nan")])}), "only integers"),
    "shape is a number": (file_bytes({"w": entry(shape=2)}), "'w' has a shape"),
    "65 dimensions": (file_bytes({"w": entry(shape=[1] * 64 + [2])}), "'w' has a shape"),
    "a million dimensions": (
        file_bytes({"w": entry(shape=[3] * 10**6)}),
        "'w' has more than dtype, shape and data_offsets",
    ),
    "a million digits": (file_bytes(DIGITS % (b"9" * 10**6)), "number out of range"),
    "size over 64 bits": (file_bytes({"w": entry(shape=[2**63, 0])}), "number out of range"),
    "minus zero": (file_bytes(DIGITS % b"-0"), "number out of range"),
    "more elements than 64 bits": (file_bytes({"w": entry(shape=[2**40, 2**40])}), "impossible shape"),
    "the same, times nothing": (file_bytes({"w": entry(shape=[2**40, 2**40, 0])}), "impossible shape"),
    "size does not fit": (file_bytes({"w": entry(shape=[3])}), "8 bytes by its data_offsets, but F32.*12"),
    "half a byte": (file_bytes({"w": entry("F4", [3], [0, 2])}), "12 bits, which is not whole bytes"),
    "negative offset": (file_bytes({"w": entry(span=[-8, 0])}), "data_offsets that are not"),
    "offsets reversed": (file_bytes({"w": entry(span=[8, 0])}), "data_offsets that are not"),
    "offset is true": (file_bytes({"w": entry("U8", [1], [False, True])}), "data_offsets that are not"),
    "three offsets": (file_bytes({"w": entry(span=[0, 4, 8])}), "data_offsets that are not"),
    "overlapping": (file_bytes({"v": entry(), "w": entry(span=[4, 12])}, bytes(12)), "'w' overlaps"),
    "the same place twice": (file_bytes({"v": entry(), "w": entry()}), "'w' overlaps"),
    "a hole": (file_bytes({"w": entry(span=[4, 12])}, bytes(12)), "4 bytes before tensor 'w' belong to none"),
    "a rest": (file_bytes({"w": entry()}, bytes(9)), "1 bytes after the last tensor"),
    "a rest and no tensor": (file_bytes({}, bytes(9)), "9 bytes after the last tensor"),
    "truncated": (file_bytes({"w": entry()}, bytes(7)), "truncated: 7. bytes by its header, 7. in the file"),
    "far out of range": (file_bytes({"w": entry("U8", [2**62], [0, 2**62])}), "truncated"),
}


@pytest.mark.parametrize(("content", "message"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_bad_file_is_refused_with_its_name_and_the_cause(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"bad\.safetensors: .*(?:{message})") as caught:
        read_header(path)
    assert len(str(caught.value)) < 1000


def test_a_missing_file_hints_at_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "model_v1.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"does not exist\. Did you mean 'model_v1\.safetensors'"):
        read_header(tmp_path / "modle_v1.safetensors")


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere is not a folder"):
        read_header(tmp_path / "nowhere" / "model.safetensors")


def test_a_folder_hints_at_the_files_in_it(tmp_path: Path) -> None:
    (tmp_path / "unet.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"is a folder: .*unet\.safetensors"):
        read_header(tmp_path)


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000])
def test_an_impossible_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError):
        read_header(tmp_path / name)


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_loop(path: Path) -> None:
    path.symlink_to(path)


def make_dangling(path: Path) -> None:
    path.symlink_to("gone.safetensors")


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@posix_only
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (make_pipe, "is a pipe"),
        (make_device, "is a pipe, a socket or a device"),
        (make_loop, "leads back to itself"),
        (make_dangling, r"is a link to gone\.safetensors, which does not exist"),
    ],
)
def test_what_is_no_regular_file_is_refused_without_blocking(
    tmp_path: Path, make: Callable[[Path], None], message: str
) -> None:
    make(tmp_path / "odd")
    with pytest.raises(CheckpointError, match=message):
        read_header(tmp_path / "odd")


@posix_only
def test_a_file_without_read_permission_says_so(tmp_path: Path) -> None:
    path = tmp_path / "secret.safetensors"
    path.write_bytes(file_bytes({"w": entry()}))
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(CheckpointError, match="no permission"):
        read_header(path)


def test_a_sparse_file_that_claims_a_huge_header_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 2**40) + b"{")
        file.truncate(2**41)
    with pytest.raises(CheckpointError, match="allows 100 MB"):
        read_header(path)


@pytest.mark.parametrize("length", [0x80, 0x180, 0x4B50])
def test_a_length_that_looks_like_a_pickle_is_still_a_length(tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_bytes(json.dumps({"w": entry()}).encode().ljust(length)))
    assert list(read_header(path).tensors) == ["w"]


def test_the_header_of_a_real_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"b": torch.zeros(2, 3), "a": torch.zeros(4).half()}, path, metadata={"format": "pt"})
    header = read_header(path)
    assert header.metadata == {"format": "pt"}
    assert header.file_size == path.stat().st_size
    assert list(header.tensors) == ["b", "a"]  # as they lie in the file
    assert header.tensors["b"].shape == (2, 3)
    assert header.tensors["b"].offset == header.data_start
    assert header.tensors["a"].offset == header.data_start + 24
    assert header.tensors["a"].nbytes == 8
    assert header.tensors["a"].numel == 4


def test_packed_numbers_are_sized_by_their_bits(tmp_path: Path) -> None:
    path = tmp_path / "packed.safetensors"
    path.write_bytes(
        file_bytes({"w": entry("F4", [3, 2], [0, 3]), "v": entry("F6_E2M3", [4], [3, 6])}, bytes(6))
    )
    assert [info.nbytes for info in read_header(path).tensors.values()] == [3, 3]


def test_an_encoded_header_is_aligned_and_deterministic() -> None:
    tensors = {"odd": ("U8", (3,)), "wide": ("F64", (2,)), "none": ("F16", (0, 5)), "scalar": ("F16", ())}
    raw, offsets = encode_header(tensors, {"ключ": "値"})
    assert (raw, offsets) == encode_header(dict(tensors), {"ключ": "値"})
    assert len(raw) % 64 == 0
    assert struct.unpack("<Q", raw[:8])[0] == len(raw) - 8
    assert list(json.loads(raw[8:])) == ["__metadata__", *tensors]
    assert offsets["wide"] == len(raw)
    assert offsets["odd"] == len(raw) + 16 + 2  # last: every wider tensor stays aligned


def test_an_encoded_header_is_the_json_of_its_entries() -> None:
    tensors = {'a "quoted" \\ key': ("F16", (2, 3)), "ключ": ("F32", ()), "c\n": ("F16", (2, 3))}
    raw, _ = encode_header(tensors, {"k\t": '"v"'})
    spans = [[4, 16], [0, 4], [16, 28]]
    entries = {
        key: {"dtype": dtype, "shape": shape, "data_offsets": span}
        for (key, (dtype, shape)), span in zip(tensors.items(), spans, strict=True)
    }
    content = {"__metadata__": {"k\t": '"v"'}, **entries}
    assert raw[8:].rstrip(b" ") == json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def test_an_encoded_header_is_read_by_safetensors(tmp_path: Path) -> None:
    raw, offsets = encode_header({"odd": ("U8", (3,)), "wide": ("F64", (2,))}, {"a": "b"})
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw + bytes(19))
    assert load_file(path)["wide"].tolist() == [0.0, 0.0]
    assert {key: info.offset for key, info in read_header(path).tensors.items()} == offsets
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"a": "b"}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"__metadata__": ("F32", (1,))}, "reserved"),
        ({"\ud800": ("F32", (1,))}, "Unicode"),
        ({"w": ("F99", (1,))}, "unknown dtype 'F99'"),
        ({"w": ("F4", (3,))}, "whole bytes"),
    ],
)
def test_a_header_that_could_not_be_read_is_not_written(
    tensors: dict[str, tuple[str, tuple[int, ...]]], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        encode_header(tensors, {})


VALID = file_bytes({"__metadata__": {"k": "v"}, "a": entry(), "b": entry("BF16", [2, 1], [8, 12])}, bytes(12))


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    """A valid file with some bytes changed, cut out or put in, most of them in the header."""
    content = bytearray(VALID)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(content)))
        cut = draw(st.integers(0, 3))
        put = draw(
            st.one_of(st.binary(max_size=4), st.sampled_from([b"0", b"9" * 30, b"[", b'"', b"{}", b"-"]))
        )
        content[at : at + cut] = put
    if draw(st.booleans()):  # keep the length true, so that the parser gets past it
        content[:8] = struct.pack("<Q", max(len(content) - 20, 0))
    return bytes(content)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("F32"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
json_headers = st.dictionaries(
    st.sampled_from(["__metadata__", "a", "b"]),
    json_values
    | st.fixed_dictionaries({"dtype": json_values, "shape": json_values, "data_offsets": json_values}),
).map(file_bytes)


@untimed
@given(content=st.one_of(st.binary(max_size=200), mutations(), json_headers))
def test_no_content_raises_anything_but_a_checkpoint_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    path.write_bytes(content)
    try:
        header = read_header(path)
    except CheckpointError as error:
        assert "fuzz.safetensors" in str(error)
    else:
        end = header.data_start + sum(info.nbytes for info in header.tensors.values())
        assert end == header.file_size == len(content)


@untimed
@given(content=mutations())
def test_what_we_accept_safetensors_accepts(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "agree.safetensors"
    path.write_bytes(content)
    try:
        header = read_header(path)
    except CheckpointError:
        return
    with safetensors.safe_open(path, "np") as file:
        assert set(file.keys()) == set(header.tensors)


def test_more_tensors_or_metadata_than_any_model_has_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mecha_exp.checkpoint.safetensors.header.MAX_TENSORS", 3)
    path = tmp_path / "many.safetensors"
    empty = {str(i): entry("U8", [0], [0, 0]) for i in range(4)}
    for content, message in [
        (empty, "the header has more than 3 tensors, which no model has"),
        ({"__metadata__": dict.fromkeys("abcd", "")}, "__metadata__ has more than 3 entries"),
    ]:
        path.write_bytes(file_bytes(content, b""))
        with pytest.raises(CheckpointError, match=message):
            read_header(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b'{"w":[' + b"[]," * 20_000_000 + b"[]]}", "'w' has more than dtype, shape and data_offsets"),
        (b'{"__metadata__":{"a":[' + b"[]," * 20_000_000 + b"[]]}}", "not a map of texts to texts"),
        (b"{" + b" " * 60_000_000 + b"]", "a text is expected at byte 60000001"),
        ('{"__metadata__":{"a":"\U0001f600'.encode() + b"a" * 60_000_000 + b'"}}', "a text of 60,000,006"),
        (b'{"' + b"a" * 65_000_000 + b'":0}', "the header has a text of 65,000,002 bytes, which no model"),
    ],
    ids=["lists in an entry", "lists in the metadata", "spaces", "a wide text", "a long name"],
)
def test_a_header_that_would_be_huge_in_memory_is_not_taken_in(
    tmp_path: Path, header: bytes, message: str
) -> None:
    path = tmp_path / "huge.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=message):
            read_header(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * len(header), "as JSON it would take fifty times its size"


@pytest.mark.heavy
@pytest.mark.parametrize(("first", "length"), [("a", 190), ("\U0001f600", 39)], ids=["narrow", "wide"])
def test_the_largest_header_that_is_accepted_takes_less_than_300_mb(
    tmp_path: Path, first: str, length: int
) -> None:
    """As many tensors as are allowed with the longest names, in a header of 100 MB."""
    count = MAX_TENSORS
    entries = (
        b'"%s":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}'
        % (f"{first}{i:0{length}d}".encode(), i, i + 1)
        for i in range(count)
    )
    header = (b"{" + b",".join(entries)).ljust(MAX_HEADER_BYTES - 1) + b"}"
    path = tmp_path / "large.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(count))
    del header
    tracemalloc.start()
    try:
        read = read_header(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(read.tensors) == count
    assert peak < 300_000_000


def test_a_text_that_could_not_be_read_is_not_written() -> None:
    with pytest.raises(CheckpointError, match=r"a text of 10,000,004 bytes, which no model has"):
        encode_header({"w": ("U8", (1,))}, {"recipe": "\U0001f600" + "a" * 10_000_000})
