"""GGUF files: plain numbers and Q8_0 are read exactly, in parts; what is not read is refused."""

import contextlib
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_files import BF16, F16, F32, Q4_K, Q8_0, gguf_bytes, write_gguf
from hypothesis import given
from hypothesis import strategies as st
from state_dicts import as_bytes

from mecha_exp import EngineOptions, merge, weighted_sum
from mecha_exp.checkpoint import open_stored
from mecha_exp.checkpoint.gguf.header import parse_header
from mecha_exp.checkpoint.gguf.types import decode_q8_0, encode_q8_0
from mecha_exp.checkpoint.safetensors.header import open_regular
from mecha_exp.errors import CheckpointError


def small_model(path: Path, seed: int = 0) -> tuple[Path, dict[str, torch.Tensor]]:
    """A file with a tensor of each type, and what it stands for."""
    torch.manual_seed(seed)
    half, brain = torch.randn(3, 5).half(), torch.randn(2, 3, 4).bfloat16()
    plain, numbers = torch.randn(7), torch.randn(6, 96)
    blocks = encode_q8_0(numbers)
    tensors = {
        "token_embd.weight": (F16, (3, 5), as_bytes(half)),
        "blk.0.attn_q.weight": (Q8_0, (6, 96), as_bytes(blocks)),
        "blk.0.ffn_up.weight": (BF16, (2, 3, 4), as_bytes(brain)),
        "output_norm.weight": (F32, (7,), as_bytes(plain)),
    }
    values = [half, decode_q8_0(blocks).reshape(6, 96), brain, plain]
    fields = {"llama.block_count": 1, "tokenizer.ggml.tokens": ["<s>", "ä", ""], "mecha_origin": "{}"}
    return write_gguf(path, tensors, fields), dict(zip(tensors, values, strict=True))


def test_a_file_is_read_as_what_it_stands_for(tmp_path: Path):
    path, expected = small_model(tmp_path / "model.gguf")

    with open_stored(path) as model:
        assert list(model.keys()) == list(expected)
        for key, tensor in expected.items():
            assert torch.equal(model.read(key), tensor)
            assert model.read(key).dtype is tensor.dtype
        assert model.metadata == {"mecha_origin": "{}"}


def test_parts_are_read_from_any_byte_to_any_other(tmp_path: Path):
    path, expected = small_model(tmp_path / "model.gguf")
    whole = as_bytes(expected["blk.0.attn_q.weight"])

    with open_stored(path) as model:
        for start, stop in [(0, 4), (1, 2), (126, 131), (500, 2304), (2300, 2304), (128, 256)]:
            view = bytearray(stop - start)
            model.read_bytes_into("blk.0.attn_q.weight", start, memoryview(view))
            assert bytes(view) == whole[start:stop]


def test_files_of_codes_are_merged_where_that_is_said(tmp_path: Path):
    (a, first), (b, second) = (small_model(tmp_path / f"{i}.gguf", i) for i in range(2))
    recipe = weighted_sum(a, b, alpha=0.25)

    with pytest.raises(CheckpointError, match=r"is quantised: Q8_0 \(GGUF\), by 'blk\.0\.attn_q"):
        merge(recipe)
    merged = merge(recipe, options=EngineOptions(on_quantised="dequantise"))

    key = "blk.0.attn_q.weight"
    assert torch.equal(merged[key], torch.lerp(first[key], second[key], 0.25))
    assert merged["token_embd.weight"].dtype is torch.float16


def test_a_file_with_as_many_tensors_as_a_brace_is_no_safetensors_file(tmp_path: Path):
    tensors = {f"t{i}": (F32, (1,), struct.pack("<f", i)) for i in range(ord("{"))}

    with open_stored(write_gguf(tmp_path / "model.bin", tensors)) as model:
        assert model.read("t7").item() == 7


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            gguf_bytes({"w": (Q4_K, (256,), bytes(144))}),
            r"1 tensor is Q4_K \('w'\), which is not read\.",
        ),
        (gguf_bytes({"w": (99, (1,), bytes(4))}), r"1 tensor is of the unknown type 99"),
        (
            gguf_bytes({}, {"split.count": 3}),
            r"one of 3 parts of a model\. Join them first: llama-gguf",
        ),
        (
            gguf_bytes({"w": (Q8_0, (2, 16), bytes(34))}),
            r"'w' of shape \[2, 16\] has rows that are not",
        ),
        (gguf_bytes({}, {"general.alignment": 3}), r"general\.alignment is 3, and should be a power of two"),
        (gguf_bytes({}, {"general.alignment": "a"}), r"general\.alignment is not a whole number"),
        (gguf_bytes({"w": (F32, (64,), bytes(256))})[:-1], r"'w' does not lie where its header says"),
        (gguf_bytes({"w": (F32, (1 << 60, 1 << 60), b"")}), r"'w' does not lie where its header says"),
        (gguf_bytes({"w": (F32, (1,) * 9, bytes(4))}), r"'w' has 9 axes"),
        (b"GGUF" + struct.pack("<IQQ", 7, 0, 0), r"version 7 of GGUF, or big endian: 2 and 3 are read"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 62, 0), r"4,611,686,018,427,387,904 tensors and 0 fields"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62), r"its header ends beyond byte 32"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<I", 77), r"the unknown type 77"),
        (b"GGUF" + struct.pack("<I", 3), r"its header ends beyond byte 8"),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"\xff" + struct.pack("<II", 4, 0),
            r"a name in its header is not text in UTF-8\. It is damaged or was not fully copied",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_in_a_sentence(content: bytes, message: str, tmp_path: Path):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)

    with pytest.raises(CheckpointError, match=r"model\.gguf: .*" + message):
        open_stored(path)


def test_two_tensors_of_one_name_are_refused(tmp_path: Path):
    tensors = {"aa": (F32, (64,), bytes(256)), "ab": (F32, (1,), bytes(4))}
    (tmp_path / "model.gguf").write_bytes(gguf_bytes(tensors).replace(b"ab", b"aa"))

    with pytest.raises(CheckpointError, match="the header has 'aa' twice"):
        open_stored(tmp_path / "model.gguf")


@given(st.binary(max_size=400))
def test_no_bytes_after_the_magic_do_harm(content: bytes):
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(b"GGUF\x03\0\0\0" + content)
        file.flush()
        with open_regular(file.name) as opened, contextlib.suppress(CheckpointError):
            parse_header(opened)


def test_a_file_that_changes_is_noticed(tmp_path: Path):
    path, _ = small_model(tmp_path / "model.gguf")

    with open_stored(path) as model:
        path.write_bytes(path.read_bytes() + b"x")
        with pytest.raises(CheckpointError, match=r"model\.gguf changed while it was being read"):
            model.check_unchanged()


@pytest.mark.libraries
def test_files_and_numbers_are_those_of_the_package_gguf(tmp_path: Path):
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(0)
    numbers = np.concatenate([rng.standard_normal((3, 64)) * scale for scale in (1e-6, 1, 1e4)]).astype("f4")
    numbers[0, :32], numbers[1, :4] = 0, (0.5, -0.5, 1.5, 127)
    kinds = {name: gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0")}
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_bool("a.flag", True)
    for name, kind in kinds.items():
        writer.add_tensor(name, gguf.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    with open_stored(tmp_path / "model.gguf") as model:
        for name, kind in kinds.items():
            expected = gguf.dequantize(theirs[name].data, kind)
            assert np.array_equal(model.read(name).float().numpy(), expected)
    assert encode_q8_0(torch.from_numpy(numbers)).numpy().tobytes() == theirs["Q8_0"].data.tobytes()


def test_files_whose_tokens_differ_are_not_merged(tmp_path):
    rows = {"token_embd.weight": (F32, (2, 4), as_bytes(torch.ones(2, 4)))}
    a, same, swapped = (
        write_gguf(tmp_path / f"{name}.gguf", rows, {"tokenizer.ggml.tokens": tokens})
        for name, tokens in (("a", ["x", "é"]), ("same", ["x", "é"]), ("swapped", ["é", "x"]))
    )

    assert merge(weighted_sum(a, same, alpha=0.5)).keys() == {"token_embd.weight"}
    with pytest.raises(CheckpointError, match=r"the tokenizers beside .* differ, .* token 0 is 'x' and 'é'"):
        merge(weighted_sum(a, swapped, alpha=0.5))
    assert len(merge(weighted_sum(a, swapped, alpha=0.5), options=EngineOptions(on_tokens="merge"))) == 1
