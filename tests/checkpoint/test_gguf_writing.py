"""GGUF in, GGUF out: fields and names of the first input, numbers of the merge."""

import shlex
import struct
from pathlib import Path

import gguf
import pytest
import torch
from gguf_files import BF16, F16, F32, Q4_0, Q4_K, Q8_0, numbers_of_q8_0, write_gguf
from state_dicts import as_bytes, numbers_of

from mecha_exp import EngineOptions, Job, merge, merge_many, weighted_sum
from mecha_exp.checkpoint import Destination
from mecha_exp.checkpoint.gguf.model import GgufModel
from mecha_exp.checkpoint.gguf.types import encode_q8_0
from mecha_exp.checkpoint.gguf.writer import GgufTemplate
from mecha_exp.errors import CheckpointError, ConfigError
from mecha_exp.graph.nodes import call

TOKENS = ["<s>", "a", "b"]
DEQUANTISE = EngineOptions(on_quantised="dequantise")


def llama(path: Path, seed: int, kind: int = F16, alignment: int = 32) -> Path:
    """A file of a few tensors of a Llama, as llama.cpp's converter writes them."""
    torch.manual_seed(seed)
    matrices = {"token_embd.weight": (3, 64), "blk.0.attn_q.weight": (64, 64), "output.weight": (3, 64)}
    numbers = {name: torch.randn(shape) for name, shape in matrices.items()}
    encode = {
        F32: lambda t: t,
        F16: lambda t: t.half(),
        BF16: lambda t: t.bfloat16(),
        Q8_0: lambda t: encode_q8_0(t.flatten()),
        Q4_0: lambda t: torch.from_numpy(gguf.quantize(t.numpy(), gguf.GGMLQuantizationType.Q4_0)),
    }[kind]
    tensors = {name: (kind, tuple(t.shape), as_bytes(encode(t))) for name, t in numbers.items()}
    tensors["output_norm.weight"] = (F32, (5,), as_bytes(torch.randn(5)))
    fields = {"llama.block_count": 1, "general.file_type": {F32: 0, F16: 1, Q4_0: 2, Q8_0: 7, BF16: 32}[kind]}
    fields |= {"tokenizer.ggml.tokens": TOKENS, "general.alignment": alignment}
    return write_gguf(path, tensors, fields, alignment=alignment)


@pytest.mark.parametrize("kind", [F32, F16, BF16])
@pytest.mark.parametrize("alignment", [32, 128])
def test_a_merge_of_plain_numbers_is_the_merge_of_their_tensors(kind: int, alignment: int, tmp_path: Path):
    a, b = (llama(tmp_path / f"{i}.gguf", i, kind, alignment) for i in range(2))
    recipe = weighted_sum(a, b, alpha=0.3)

    merged = merge(recipe, tmp_path / "merged.gguf")

    expected = merge(recipe)
    written = numbers_of(merged)
    assert list(written) == list(numbers_of(a))
    assert all(torch.equal(written[key], expected[key]) for key in expected)
    assert all(written[key].dtype is tensor.dtype for key, tensor in numbers_of(a).items())
    with GgufModel(a) as first, GgufModel(merged) as made:
        theirs = {k: v for k, v in made.header.fields.items() if not k.startswith("mecha_")}
        assert theirs == dict(first.header.fields)
        assert made.header.alignment == alignment
        assert "weighted_sum" in made.metadata["mecha_recipe"]


def test_codes_are_the_nearest_to_the_merged_numbers(tmp_path: Path):
    a, b = (llama(tmp_path / f"{i}.gguf", i, Q8_0) for i in range(2))
    recipe = weighted_sum(a, b, alpha=0.3)

    merged = merge(recipe, tmp_path / "merged.gguf", DEQUANTISE)

    expected, written = merge(recipe, options=DEQUANTISE), numbers_of(merged)
    for key, tensor in expected.items():
        if tensor.ndim == 1:
            assert torch.equal(written[key], tensor)
            continue
        assert torch.equal(written[key].flatten(), numbers_of_q8_0(encode_q8_0(tensor.flatten())))
        blocks = tensor.reshape(-1, 32)
        step = blocks.abs().amax(dim=1, keepdim=True) / 127
        error = (written[key].reshape(-1, 32) - blocks).abs()
        assert (error <= step / 2 + blocks.abs() * 2**-10).all()
    assert merged.stat().st_size == a.stat().st_size + _more_bytes_in_header(a, merged)


def _more_bytes_in_header(a: Path, b: Path) -> int:
    with GgufModel(a) as first, GgufModel(b) as second:
        starts = [min(t.offset for t in model.header.tensors.values()) for model in (first, second)]
    return starts[1] - starts[0]


def test_the_same_codes_come_out_where_nothing_changes(tmp_path: Path):
    a = llama(tmp_path / "a.gguf", 0, Q8_0)

    merged = merge(weighted_sum(a, a, alpha=0.0), tmp_path / "merged.gguf", DEQUANTISE)

    with GgufModel(a) as first, GgufModel(merged) as second:
        for key in first.keys():
            parts = []
            for path, model in ((a, first), (merged, second)):
                tensor = model.header.tensors[key]
                parts.append(path.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes])
            assert parts[0] == parts[1]


def test_codes_become_plain_numbers_of_a_dtype_that_is_asked_for(tmp_path: Path):
    a, b = (llama(tmp_path / f"{i}.gguf", i, Q8_0) for i in range(2))
    dtype = {"output_norm.weight": "input", "default": "bfloat16"}

    merged = merge(weighted_sum(a, b, alpha=0.3), tmp_path / "merged.gguf", DEQUANTISE, output_dtype=dtype)

    assert numbers_of(merged)["output.weight"].dtype is torch.bfloat16
    with GgufModel(merged) as made:
        assert not made.codes
        assert made.header.fields["general.file_type"] == struct.pack("<II", 4, 32)


def matrix(path: Path, numbers: torch.Tensor) -> Path:
    """A file of one matrix of Q8_0."""
    blocks = encode_q8_0(numbers.flatten())
    return write_gguf(path, {"w.weight": (Q8_0, tuple(numbers.shape), as_bytes(blocks))})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_recipe_that_casts_codes_gives_plain_numbers_of_that_dtype(dtype: torch.dtype, tmp_path: Path):
    torch.manual_seed(0)
    a, b = (matrix(tmp_path / f"{name}.gguf", torch.randn(8, 64)) for name in "ab")
    recipe = weighted_sum(a, b, alpha=0.3)

    merged = merge(recipe.to(dtype=dtype), tmp_path / "merged.gguf", DEQUANTISE)

    expected = merge(recipe, options=DEQUANTISE)["w.weight"].to(dtype)
    assert numbers_of(merged)["w.weight"].dtype is dtype
    assert torch.equal(numbers_of(merged)["w.weight"], expected)


def test_numbers_that_codes_cannot_hold_are_refused(tmp_path: Path):
    a = matrix(tmp_path / "a.gguf", torch.full((8, 64), 8e6))
    recipe = call("linear", a, a, weights=[1.0, 1.0], normalize=False)

    with pytest.raises(CheckpointError, match=r"w\.weight has values that Q8_0 cannot hold.*beyond 8\.3 mil"):
        merge(recipe, tmp_path / "merged.gguf", DEQUANTISE)

    assert not (tmp_path / "merged.gguf").exists()


@pytest.mark.parametrize("size", [1, 7, 31, 33, 50, 96])
def test_blocks_are_whole_however_the_numbers_come(size: int, tmp_path: Path):
    a = llama(tmp_path / "a.gguf", 0, Q8_0)
    layout = {key: ("F32", tuple(tensor.shape)) for key, tensor in numbers_of(a).items()}
    values = {key: torch.randn(shape).flatten() for key, (_, shape) in layout.items()}
    with GgufModel(a) as first:
        template = GgufTemplate.of(first, keeps_codes=True)
    writer = Destination(tmp_path / "out.gguf", layout, gguf=template).open({}, False, None)

    with writer:
        for key, numbers in values.items():
            starts = list(range(0, len(numbers), size))
            for start in starts[1::2] + starts[::2]:
                writer.write(key, start, numbers[start : start + size])
        writer.commit()

    for key, tensor in numbers_of(tmp_path / "out.gguf").items():
        numbers = values[key]
        expected = numbers if tensor.ndim == 1 else numbers_of_q8_0(encode_q8_0(numbers))
        assert torch.equal(tensor.flatten(), expected)


def test_an_interrupted_merge_goes_on(tmp_path: Path):
    a, b = (llama(tmp_path / f"{i}.gguf", i, Q8_0) for i in range(2))
    job = Job(weighted_sum(a, b, alpha=0.3), tmp_path / "merged.gguf")
    whole = merge(weighted_sum(a, b, alpha=0.3), tmp_path / "whole.gguf", DEQUANTISE).read_bytes()
    done = []

    def interrupt(key: str, nbytes: int) -> None:
        done.append(key)
        if len(done) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_many([job], EngineOptions(on_quantised="dequantise", workers=1), interrupt)
    report = merge_many([job], DEQUANTISE)

    assert report.resumed_keys > 0
    assert (tmp_path / "merged.gguf").read_bytes() == whole


def test_a_merged_file_is_made_again_from_itself(tmp_path: Path, app):
    for i, name in enumerate("ab"):
        llama(tmp_path / f"{name}.gguf", i)
    recipe = weighted_sum("a.gguf", "b.gguf", alpha=0.3)
    (tmp_path / "recipe.mecha").write_text(_text_of(recipe))

    first = app("merge", "recipe.mecha", "-o", "merged.gguf", cwd=tmp_path)
    second = app("merge", "merged.gguf", "-o", "again.gguf", cwd=tmp_path)

    assert first.status == second.status == 0, first.err + second.err
    assert (tmp_path / "merged.gguf").read_bytes() == (tmp_path / "again.gguf").read_bytes()


def _text_of(recipe) -> str:
    from mecha_exp import serialize

    return serialize(recipe)


def commands_of_the_page() -> list[str]:
    """The commands of docs/formats.md that name GGUF files, each on one line."""
    page = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
    lines = page.replace(" \\\n", " ").splitlines()
    return [line for line in lines if line.startswith("python -m mecha_exp ") and ".gguf" in line]


@pytest.mark.heavy
@pytest.mark.parametrize("command", commands_of_the_page())
def test_the_commands_of_the_page_run(command: str, tmp_path: Path, app):
    for seed, name in enumerate(("base", "a", "b")):
        llama(tmp_path / f"{name}-f16.gguf", seed)
        llama(tmp_path / f"{name}-q8_0.gguf", seed, Q8_0)
        llama(tmp_path / f"{name}-q4_0.gguf", seed, Q4_0)
    words = shlex.split(command)[3:]
    untracked = [] if words[0] == "info" else ["tracking=none"]

    outcome = app(*words, *untracked, cwd=tmp_path)

    assert outcome.status == 0, outcome.err
    if "output.path=merged.gguf" in words:
        assert "output_norm.weight" in numbers_of(tmp_path / "merged.gguf")


def test_other_architectures_are_left_to_the_converter(tmp_path: Path, save):
    a, b = (save(name, {"w": torch.randn(2, 3)}) for name in "ab")

    with pytest.raises(CheckpointError, match=r"the first input, which is not a GGUF file\. Convert the"):
        merge(weighted_sum(a, b, alpha=0.3), tmp_path / "merged.gguf")


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ("bfloat16", r"llama\.cpp computes with vectors in F32, and output_norm\.weight would be narrower"),
        ("float8_e4m3fn", r"token_embd\.weight \(F8_E4M3\).* cannot be written: GGUF has F32, F16, BF16"),
    ],
)
def test_dtypes_that_llama_cpp_does_not_have_are_refused(dtype: str, message: str, tmp_path: Path):
    a, b = (llama(tmp_path / f"{i}.gguf", i) for i in range(2))

    with pytest.raises(CheckpointError, match=message):
        merge(weighted_sum(a, b, alpha=0.3), tmp_path / "merged.gguf", output_dtype=dtype)


def test_other_keys_and_shapes_than_the_fields_say_are_refused(tmp_path: Path):
    a = llama(tmp_path / "a.gguf", 0)
    layout = {key: ("F32", tuple(tensor.shape)) for key, tensor in numbers_of(a).items()}
    changed = {**layout, "token_embd.weight": ("F32", (4, 64)), "more": ("F32", (1, 1))}
    with GgufModel(a) as first:
        template = GgufTemplate.of(first, keeps_codes=True)

    with pytest.raises(CheckpointError) as caught:
        Destination(tmp_path / "out.gguf", changed, gguf=template).check()

    assert "the first input and the result differ in 1 key: more." in str(caught.value)
    assert "token_embd.weight have other shapes than the fields of the first input say." in str(caught.value)


def test_scaled_fp8_has_no_place_in_a_gguf_file(tmp_path: Path):
    a = llama(tmp_path / "a.gguf", 0)

    with pytest.raises(ConfigError, match=r"writes ComfyUI's layout, which is one file: name an output"):
        Job(weighted_sum(a, a, alpha=0.3), tmp_path / "merged.gguf", quantize="fp8_scaled")


def test_codes_of_other_types_become_plain_numbers(tmp_path: Path):
    torch.manual_seed(0)
    raw = torch.randint(0, 60, (8 * 2 * 144,), dtype=torch.uint8)
    tensors = {"w.weight": (Q4_K, (8, 512), as_bytes(raw)), "v.weight": (F32, (4,), bytes(16))}
    a = write_gguf(tmp_path / "a.gguf", tensors, {"general.file_type": 15})
    recipe = weighted_sum(a, a, alpha=0.5)

    merged = merge(recipe, tmp_path / "merged.gguf", DEQUANTISE)

    expected = merge(recipe, options=DEQUANTISE)
    with GgufModel(merged) as made:
        assert {key: tensor.kind for key, tensor in made.header.tensors.items()} == dict.fromkeys(
            tensors, F32
        )
        assert made.header.fields["general.file_type"] == struct.pack("<II", 4, 0)
        assert all(torch.equal(made.read(key), expected[key]) for key in tensors)


@pytest.mark.parametrize("kind", [F16, Q8_0])
def test_the_package_gguf_reads_what_is_written(kind: int, tmp_path: Path):
    a, b = (llama(tmp_path / f"{i}.gguf", i, kind) for i in range(2))
    merged = merge(weighted_sum(a, b, alpha=0.3), tmp_path / "merged.gguf", DEQUANTISE)

    reader = gguf.GGUFReader(merged)

    assert reader.fields["tokenizer.ggml.tokens"].contents() == TOKENS
    assert reader.fields["general.architecture"].contents() == "llama"
    ours = numbers_of(merged)
    for tensor in reader.tensors:
        theirs = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        assert torch.equal(theirs, ours[tensor.name].float())
