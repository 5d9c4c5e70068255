"""GGUF files: plain numbers and codes are read exactly, in parts; what is not read is refused."""

import contextlib
import os
import re
import struct
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_files import BF16, F16, F32, NVFP4, Q4_K, Q8_0, Q8_K, gguf_bytes, numbers_of_q8_0, write_gguf
from hypothesis import given
from hypothesis import strategies as st
from state_dicts import as_bytes

from mecha_exp import EngineOptions, merge, weighted_sum
from mecha_exp.checkpoint import open_stored
from mecha_exp.checkpoint.gguf.header import parse_header
from mecha_exp.checkpoint.gguf.model import GgufModel
from mecha_exp.checkpoint.gguf.types import encode_q8_0, type_of
from mecha_exp.checkpoint.positional import PositionalFile
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
    values = [half, numbers_of_q8_0(blocks).reshape(6, 96), brain, plain]
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
            gguf_bytes({"w": (Q8_K, (256,), bytes(292)), "v": (Q8_K, (256,), bytes(292))}),
            r"w, v: gguf [\d.]+ cannot dequantise the type Q8_K\. Get the model in another type",
        ),
        (
            gguf_bytes({"w": (99, (1,), bytes(4))}),
            r"w: the type 99 is not known to gguf [\d.]+: pip install --upgrade gguf\.",
        ),
        (
            gguf_bytes({"a.weight": (NVFP4, (64,), bytes(36)), "a.scale": (F32, (1,), bytes(4))}),
            r"a\.scale is a factor of the codes beside it, which is not read\. Get the model in another type",
        ),
        (gguf_bytes({"w": (Q4_K, (512,), bytes(287))})[:-1], r"'w' does not lie where its header says"),
        (
            gguf_bytes({"w": (Q4_K, (3, 128), bytes(288))}),
            r"'w' of shape \[3, 128\] has rows that are not whole blocks of 256",
        ),
        (gguf_bytes({"w": (Q4_K, (), bytes(144))}), r"'w' of shape \[\] has rows that are not whole"),
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


@given(st.integers(0, 330), st.binary(min_size=1, max_size=12), st.integers(0, 2))
def test_no_change_of_a_file_of_codes_does_harm(place: int, change: bytes, cut: int):
    content = bytearray(gguf_bytes({"w": (Q4_K, (2, 256), bytes(288)), "v": (Q8_0, (1, 32), bytes(34))}))
    content[place : place + len(change)] = change
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(content[: len(content) - 40 * cut])
        file.flush()
        with contextlib.suppress(CheckpointError), open_stored(Path(file.name)) as model:
            for key in model.keys():
                assert model.read(key).shape == model.info(key).shape


def test_a_file_that_changes_is_noticed(tmp_path: Path):
    path, _ = small_model(tmp_path / "model.gguf")

    with open_stored(path) as model:
        path.write_bytes(path.read_bytes() + b"x")
        with pytest.raises(CheckpointError, match=r"model\.gguf changed while it was being read"):
            model.check_unchanged()


def read_by_gguf(raw: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray | None:
    """Numbers by the package; None where it cannot dequantise the type."""
    try:
        with np.errstate(all="ignore"):
            return gguf.dequantize(raw, kind)
    except NotImplementedError:
        return None


@pytest.mark.parametrize("kind", gguf.GGMLQuantizationType, ids=lambda kind: kind.name)
def test_each_type_of_the_package_is_read_as_by_it_or_refused(
    kind: gguf.GGMLQuantizationType, tmp_path: Path
):
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = 3, 512 * 200
    raw = np.random.default_rng(kind).integers(0, 256, (rows, columns // block * nbytes), dtype=np.uint8)
    path = write_gguf(tmp_path / "model.gguf", {"w": (int(kind), (rows, columns), raw.tobytes())})
    expected = read_by_gguf(raw, kind) if block > 1 else raw
    if expected is None:
        with pytest.raises(CheckpointError, match=rf"w: gguf [\d.]+ cannot dequantise .* {kind.name}\."):
            open_stored(path)
        return
    whole = expected.tobytes()

    with open_stored(path) as model:
        assert model.info("w").shape == (rows, columns)
        assert dict(model.codes) == ({"w": kind.name} if block > 1 else {})
        assert as_bytes(model.read("w")) == whole
        for start, stop in [(0, 4), (1, 3), (1021, 1030), (len(whole) // 3 + 1, len(whole) - 7)]:
            view = bytearray(stop - start)
            model.read_bytes_into("w", start, memoryview(view))
            assert bytes(view) == whole[start:stop]


def test_the_page_names_the_types_that_are_read():
    page = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
    listed = page[page.index("All types that the package") : page.index("A file with codes is")]

    sizes = gguf.GGML_QUANT_SIZES.items()
    coded = {kind: np.zeros((1, nbytes), dtype=np.uint8) for kind, (block, nbytes) in sizes if block > 1}

    assert {*re.findall(r"[A-Z]+\d\w*", listed)} == {
        kind.name for kind, raw in coded.items() if read_by_gguf(raw, kind) is not None
    }


class CountedFile(PositionalFile):
    """A file that remembers the largest part that was read."""

    largest = 0

    def read_into(self, offset: int, view: memoryview) -> None:
        self.largest = max(self.largest, len(view))
        super().read_into(offset, view)


def test_a_large_tensor_is_read_in_small_parts(tmp_path: Path):
    blocks = 1 << 14
    path = write_gguf(tmp_path / "m.gguf", {"w": (Q4_K, (blocks * 256,), bytes(blocks * 144))})
    file = CountedFile(path, os.O_RDONLY)

    with GgufModel(path, file) as model:
        file.largest = 0
        assert model.read("w").count_nonzero() == 0

    assert 0 < file.largest < blocks * 144 // 10


def test_codes_without_the_package_are_refused_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plain = write_gguf(tmp_path / "plain.gguf", {"v": (F32, (1,), bytes(4))})
    path = write_gguf(tmp_path / "codes.gguf", {"w": (Q4_K, (256,), bytes(144))})
    monkeypatch.setitem(sys.modules, "gguf", None)
    type_of.cache_clear()

    with pytest.raises(
        CheckpointError,
        match=r"codes\.gguf: w: codes are read by the package gguf, .*: pip install 'mecha_exp\[gguf\]'\.",
    ):
        open_stored(path)
    with open_stored(plain) as model:
        assert model.read("v").item() == 0


def test_several_types_are_named_the_most_used_first(tmp_path: Path):
    codes = {f"w{i}": (Q4_K, (256,), bytes(144)) for i in range(2)}
    path = write_gguf(tmp_path / "m.gguf", {"v": (Q8_0, (32,), bytes(34)), **codes})

    with pytest.raises(CheckpointError, match=r"is quantised: Q4_K, Q8_0 \(GGUF\), by 'v' and 2 more"):
        merge(weighted_sum(path, path))


def test_files_and_numbers_are_those_of_the_package_gguf(tmp_path: Path):
    rng = np.random.default_rng(0)
    numbers = np.concatenate([rng.standard_normal((3, 64)) * scale for scale in (1e-6, 1, 1e4)]).astype("f4")
    numbers[0, :32], numbers[1, :4] = 0, (0.5, -0.5, 1.5, 127)
    kinds = {name: gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1")}
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
