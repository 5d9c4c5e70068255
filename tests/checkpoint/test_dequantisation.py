"""Quantised models read exactly: their numbers are those of the published formulas, bit for bit."""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantised_files import (
    FILES,
    READ,
    Quantised,
    fp8_of_comfyui,
    fp8_of_comfyui_by_layer,
    gptq,
    int8_of_comfyui,
    json_of,
    rotated_of_comfyui,
)
from safetensors.torch import load_file, save_file

import mecha_exp as mx
from mecha_exp.architectures import from_yaml, register, resolve
from mecha_exp.checkpoint import open_stored
from mecha_exp.checkpoint.quantisation import quantisation_of
from mecha_exp.cli import convert, info, merge
from mecha_exp.cli import plan as plan_verb
from mecha_exp.engine import EngineOptions, Job, plan
from mecha_exp.errors import CheckpointError
from mecha_exp.inspection.model import describe_model
from mecha_exp.inspection.model_diff import compare_by_block
from mecha_exp.sources.quantised import view
from mecha_exp.sources.quantised.layouts import READERS
from mecha_exp.sources.quantised.view import DequantisedSource, dequantised

DEQUANTISE = EngineOptions(on_quantised="dequantise")


def opened(layer: Quantised, folder: Path) -> DequantisedSource:
    source = dequantised(open_stored(layer.save(folder)))
    assert isinstance(source, DequantisedSource)
    return source


@pytest.mark.parametrize("name", READ)
def test_the_numbers_are_those_of_the_published_formula(name: str, tmp_path: Path) -> None:
    layer = READ[name]()

    with opened(layer, tmp_path) as source:
        assert source.layout.quantisation.format == layer.format
        assert set(source.keys()) == {layer.key, *(key for key in layer.tensors if key.endswith(".bias"))}
        assert (source.info(layer.key).dtype, source.info(layer.key).shape) == (
            "F32",
            tuple(layer.weight.shape),
        )
        torch.testing.assert_close(source.read(layer.key), layer.weight, rtol=0, atol=0)


@pytest.mark.parametrize("name", READ)
def test_any_part_is_that_of_the_whole(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = READ[name]()
    whole = layer.weight.reshape(-1)
    monkeypatch.setattr(view, "DECODED", 1000)

    with opened(layer, tmp_path) as source:

        @given(st.integers(0, whole.numel()), st.integers(0, whole.numel()))
        @settings(max_examples=25, deadline=None)
        def part(a: int, b: int) -> None:
            start, stop = sorted((a, b))
            out = torch.empty(stop - start)
            source.read_into(layer.key, start, out)
            assert torch.equal(out, whole[start:stop])

        part()


def test_bytes_need_not_begin_with_a_number(tmp_path: Path) -> None:
    layer = fp8_of_comfyui()
    expected = layer.weight.numpy().tobytes()

    with opened(layer, tmp_path) as source:
        read = bytearray(10)
        source.read_bytes_into("a.weight", 3, memoryview(read))

    assert bytes(read) == expected[3:13]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("name", READ)
def test_a_mix_with_a_plain_model_is_that_of_the_numbers(name: str, is_first: bool, tmp_path: Path) -> None:
    layer = READ[name]()
    rest = {key: tensor for key, tensor in layer.tensors.items() if key.endswith(".bias")}
    other = torch.randn(layer.weight.shape).bfloat16()
    save_file({layer.key: other, **rest}, tmp_path / "plain.safetensors")
    stored = layer.save(tmp_path / "quantised")
    inputs = [str(stored), str(tmp_path / "plain.safetensors")]
    numbers = [{layer.key: layer.weight, **rest}, {layer.key: other, **rest}]
    step = 1 if is_first else -1

    merged = mx.merge(mx.weighted_sum(*inputs[::step], alpha=0.25), options=DEQUANTISE)

    assert merged.keys() == {layer.key, *rest}
    dense = mx.merge(mx.weighted_sum(*numbers[::step], alpha=0.25))[layer.key]
    assert merged[layer.key].dtype is (torch.float32 if is_first else torch.bfloat16)
    assert torch.equal(merged[layer.key], dense)
    alpha = 0.25 if is_first else 0.75
    expected = (1 - alpha) * layer.weight + alpha * other.float()
    torch.testing.assert_close(dense, expected.to(dense.dtype), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("on_missing", ["error", "skip", "base"])
def test_a_plain_base_keeps_its_dtype_beside_a_scaled_copy(on_missing: str, tmp_path: Path) -> None:
    layer = fp8_of_comfyui()
    base = layer.weight.bfloat16()
    recipe = mx.weighted_sum({"a.weight": base}, str(layer.save(tmp_path)), alpha=0.5)

    merged = mx.merge(recipe, options=EngineOptions(on_quantised="dequantise", on_missing=on_missing))

    assert merged.keys() == {"a.weight"}
    assert merged["a.weight"].dtype is torch.bfloat16
    assert torch.equal(merged["a.weight"], (0.5 * base.float() + 0.5 * layer.weight).bfloat16())


@pytest.mark.parametrize("name", READ)
def test_the_default_is_an_error_that_names_the_option(name: str, tmp_path: Path) -> None:
    layer = READ[name]()
    stored = str(layer.save(tmp_path))

    with pytest.raises(CheckpointError, match=r" on_quantised=dequantise \(convert --dequantise\)") as error:
        mx.merge(mx.weighted_sum(stored, stored))

    assert f"is quantised: {layer.format}" in str(error.value)


@pytest.mark.parametrize("tile_size", [1000, 1 << 19])
def test_sharded_models_and_methods_of_several_passes_are_read_too(tile_size: int, tmp_path: Path) -> None:
    layer = gptq()
    plain = {"a.weight": layer.weight, "a.bias": layer.tensors["a.bias"]}
    folder = layer.save(tmp_path / "q").parent
    (folder / "model.safetensors").unlink()
    names = {key: f"model-0000{1 + (i > 1)}-of-00002.safetensors" for i, key in enumerate(layer.tensors)}
    for name in set(names.values()):
        save_file({key: layer.tensors[key] for key in names if names[key] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    base = {key: torch.randn(tensor.shape) for key, tensor in plain.items()}
    options = EngineOptions(on_quantised="dequantise", tile_size=tile_size)

    merged = mx.merge(mx.slerp(base, str(folder), alpha=0.3), options=options)

    dense = mx.merge(mx.slerp(base, plain, alpha=0.3))
    assert all(torch.equal(merged[key], dense[key]) for key in plain)


def test_a_folder_is_written_without_its_quantisation(tmp_path: Path) -> None:
    layer = gptq()
    folder = layer.save(tmp_path / "q").parent
    (folder / "quantize_config.json").write_text(json.dumps(layer.config))
    (folder / "tokenizer.json").write_text("{}")
    job = Job(mx.weighted_sum(str(folder), str(folder)), tmp_path / "merged", torch.bfloat16)

    mx.merge_many([job], DEQUANTISE)

    assert json.loads((tmp_path / "merged" / "config.json").read_text()) == {"torch_dtype": "bfloat16"}
    assert sorted(path.name for path in (tmp_path / "merged").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    with open_stored(tmp_path / "merged") as model:
        assert quantisation_of(model) is None
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert torch.equal(merged["a.weight"], layer.weight.bfloat16())


def test_the_plan_says_what_is_dequantised_and_left_out(tmp_path: Path) -> None:
    stored = str(fp8_of_comfyui().save(tmp_path))

    with plan([Job(mx.weighted_sum(stored, stored), {})], DEQUANTISE) as planned:
        (warning,) = planned.warnings

    assert "is quantised: scaled fp8 (ComfyUI), by 'a.scale_weight' and 1 more" in warning
    assert "1 tensor is read as float32, code times scale; 1 scale of activations is left out" in warning


def test_info_says_whether_it_can_be_read_and_knows_the_model_by_its_plain_keys(tmp_path: Path) -> None:
    with open_stored(fp8_of_comfyui().save(tmp_path)) as model:
        described = describe_model(model)

    (line,) = [line for line in described["anomalies"] if line.startswith("quantised")]
    assert "engine.on_quantised=dequantise" in line


def broken(**changes: torch.Tensor | None) -> Quantised:
    layer = gptq()
    tensors = {**layer.tensors, **{f"a.{name}": tensor for name, tensor in changes.items()}}
    return Quantised(
        layer.format, {k: t for k, t in tensors.items() if t is not None}, layer.weight, layer.config
    )


def changed(layer: Quantised, config: dict[str, object] | None = None, **more: torch.Tensor) -> Quantised:
    plain = {name.replace("__", "."): tensor for name, tensor in more.items()}
    names = {name.replace("bytes.nf4", "bytes__nf4"): tensor for name, tensor in plain.items()}
    return replace(layer, tensors=layer.tensors | names, config=layer.config | (config or {}))


def without(tensors: dict[str, torch.Tensor], key: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name != key}


def described(content: object, **more: torch.Tensor) -> Quantised:
    """An int8 layer with another description by ComfyUI."""
    return changed(int8_of_comfyui(48, 1), a__comfy_quant=json_of(content), **more)


def rotated(group: object, *shape: int) -> Quantised:
    content = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": group}
    codes = torch.zeros(shape or (8, 64), dtype=torch.int8)
    return described(content, a__weight=codes, a__weight_scale=torch.ones(()))


def with_metadata(text: str) -> Quantised:
    return replace(int8_of_comfyui(48, 1, in_metadata=True), metadata={"_quantization_metadata": text})


INEXACT = {
    "GPTQ without scales": (broken(scales=None), "a.scales is missing"),
    "GPTQ with groups that are not there": (
        broken(g_idx=torch.zeros(5, dtype=torch.int32)),
        "a.g_idx does not have 96 entries",
    ),
    "GPTQ for a GPU": (changed(gptq(), {"checkpoint_format": "marlin"}), "its checkpoint_format is 'marlin'"),
    "GPTQ by nothing": (
        Quantised("GPTQ", gptq().tensors, gptq().weight),
        "only the quantization_config of a config.json",
    ),
    "GPTQ of 3 bits": (
        broken(qzeros=torch.zeros(3, 6, dtype=torch.int32)),
        "a has codes of 3 bits, and 2, 4 and 8 can be read",
    ),
    "AWQ of another layout": (
        changed(READ["AWQ"](), {"version": "gemv"}),
        "it is version 'gemv'",
    ),
    "int8 in the order of a GPU": (
        changed(READ["int8 of bitsandbytes"](), a__weight_format=torch.tensor(2, dtype=torch.uint8)),
        "a.weight_format is not 0",
    ),
    "fp8 without a scale": (
        changed(READ["fp8 by row"](), b__weight=torch.zeros(4, 4, dtype=torch.float8_e4m3fn)),
        "b.weight has codes without scales",
    ),
    "scaled inputs": (
        changed(READ["fp8 by row"](), a__pre_quant_scale=torch.ones(80)),
        "its inputs are scaled",
    ),
    "columns in another order": (
        changed(READ["int8 by group"](), a__weight_g_idx=torch.zeros(80, dtype=torch.int32)),
        "its columns are in another order",
    ),
    "rotated": (changed(READ["fp8 in blocks by config"](), {"transform_config": {"R1": {}}}), "are rotated"),
    "scales of no size": (
        changed(READ["fp8 by row"](), a__weight_scale=torch.ones(7, 3)),
        "do not fit each other: [48, 80] and [7, 3]",
    ),
    "blocks of an unknown size": (
        changed(READ["fp8 in blocks of 128"](), a__weight_scale_inv=torch.ones(19, 13)),
        "do not fit each other: [300, 200] and [19, 13]",
    ),
    "MXFP8 of other groups": (
        changed(READ["MXFP8, bytes"](), a__weight_scale=torch.zeros(48, 6, dtype=torch.uint8)),
        "is not a scale for each 32",
    ),
    "quanto of fewer bits": (
        changed(READ["quanto int8"](), a__weight___shift=torch.zeros(48, 1)),
        "has codes of less than 8 bits",
    ),
    "NF4 without a table": (
        changed(READ["NF4"](), a__weight__quant_map=torch.zeros(4)),
        "a.weight.quant_map has 4 elements instead of 16",
    ),
    "NF4 of broken JSON": (
        changed(READ["NF4"](), a__weight__quant_state__bitsandbytes__nf4=torch.zeros(4, dtype=torch.uint8)),
        "is not JSON",
    ),
    "ComfyUI's nvfp4": (described({"format": "nvfp4"}), "a is 'nvfp4' of ComfyUI, and float8_e4m3fn, "),
    "ComfyUI's mxfp8": (described({"format": "mxfp8"}), "a is 'mxfp8' of ComfyUI"),
    "ComfyUI's rotated int4": (described({"format": "convrot_w4a4"}), "a is 'convrot_w4a4' of ComfyUI"),
    "ComfyUI's layer of no format": (described({}), "a is None of ComfyUI"),
    "ComfyUI's layer of two formats": (described({"format": ["nvfp4"]}), "a is ['nvfp4'] of ComfyUI"),
    "ComfyUI's list of formats": (
        described(["int8_tensorwise"]),
        "a.comfy_quant does not describe a in JSON",
    ),
    "ComfyUI's broken JSON": (
        changed(int8_of_comfyui(1), a__comfy_quant=torch.full((9,), 200, dtype=torch.uint8)),
        "a.comfy_quant does not describe a in JSON",
    ),
    "ComfyUI's fp8 that is int8": (
        described({"format": "float8_e5m2"}),
        "a.weight is I8, and ComfyUI's float8_e5m2 is F8_E5M2",
    ),
    "ComfyUI's int8 in bfloat16": (
        described({"format": "int8_tensorwise"}, a__weight=torch.zeros(48, 80).bfloat16()),
        "a.weight is BF16, and ComfyUI's int8_tensorwise is I8",
    ),
    "ComfyUI's int8 without a scale": (
        replace(int8_of_comfyui(1), tensors=without(int8_of_comfyui(1).tensors, "a.weight_scale")),
        "a.weight_scale is missing",
    ),
    "ComfyUI's int8 with a scale for each column or row": (
        described({"format": "int8_tensorwise"}, a__weight_scale=torch.ones(48)),
        "a.weight_scale [48] is neither one scale nor one for each row of [48, 80]",
    ),
    "ComfyUI's rotation of no power of 4": (
        rotated(32),
        "is rotated in groups of 32, which is not a power of 4",
    ),
    "ComfyUI's rotation of one": (rotated(1), "is rotated in groups of 1, which is not a power of 4"),
    "ComfyUI's rotation of words": (rotated("64"), "a has the convrot_groupsize '64'"),
    "ComfyUI's rotation of a huge group": (rotated(4**40), f"is rotated in groups of {4**40}"),
    "ComfyUI's rotation of half a group": (
        rotated(64, 8, 96),
        "a.weight [8, 96] does not consist of rotated groups of 64",
    ),
    "ComfyUI's rotation of a convolution": (
        rotated(64, 8, 64, 1, 1),
        "a.weight [8, 64, 1, 1] does not consist of rotated groups of 64",
    ),
    "ComfyUI's description of other layers": (
        with_metadata('{"layers": {"a": {"format": "int8_tensorwise"}, "b": {}}}'),
        "its metadata describe b, which it does not have",
    ),
    "ComfyUI's description of a layer by a word": (
        with_metadata('{"layers": {"a": "int8_tensorwise"}}'),
        "_quantization_metadata does not describe a in JSON",
    ),
    "a plain weight beside the codes": (
        changed(gptq(), a__weight=torch.zeros(64, 96)),
        "a.weight is there beside a.qweight",
    ),
}


@pytest.mark.parametrize("name", INEXACT)
def test_what_cannot_be_read_exactly_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    layer, reason = INEXACT[name]
    stored = str(layer.save(tmp_path))

    with pytest.raises(CheckpointError) as error:
        mx.merge(mx.weighted_sum(stored, stored), options=DEQUANTISE)

    assert f"is quantised: {layer.format}" in str(error.value)
    assert "It cannot be read exactly: " in str(error.value)
    assert reason in str(error.value)
    assert "Use the model as it was before it was quantised" in str(error.value)


@pytest.mark.parametrize("text", ["{", "[]", '{"layers": []}', "[" * 100_000])
def test_metadata_that_describe_no_layers_are_refused_in_a_sentence(text: str, tmp_path: Path) -> None:
    stored = str(with_metadata(text).save(tmp_path))

    with pytest.raises(CheckpointError, match=r"the field _quantization_metadata of its metadata does not"):
        mx.merge(mx.weighted_sum(stored, stored), options=DEQUANTISE)


def test_rotated_codes_need_their_description_to_be_what_they_are(tmp_path: Path) -> None:
    layer = rotated_of_comfyui(64)
    with opened(layer, tmp_path / "rotated") as source:
        turned_back = source.read("a.weight")
    plain = {"format": "int8_tensorwise"}
    with opened(changed(layer, a__comfy_quant=json_of(plain)), tmp_path / "as_it_is") as source:
        as_it_is = source.read("a.weight")

    assert not torch.allclose(turned_back, as_it_is, rtol=0.1)
    torch.testing.assert_close(turned_back.norm(), as_it_is.norm())


def test_fp8_that_comfyui_does_not_describe_is_plain_numbers(tmp_path: Path) -> None:
    more = torch.tensor([[1.5, -2.0]]).to(torch.float8_e4m3fn)
    layer = changed(fp8_of_comfyui_by_layer(), b__weight=more)

    with opened(layer, tmp_path) as source:
        assert source.keys() == {"a.weight", "b.weight"}
        assert torch.equal(source.read("b.weight").float(), more.float())


def test_a_dequantised_copy_describes_no_layers(tmp_path: Path) -> None:
    register(from_yaml("identifier: one-a\ncomponents: {m: {keys: {a.weight: [48, 80]}, blocks: A}}"))
    layer = int8_of_comfyui(48, 1, in_metadata=True)
    output = tmp_path / "out.safetensors"

    convert.main([str(layer.save(tmp_path)), "--to", "one-a", "-o", str(output), "--dequantise"])

    with open_stored(output) as model:
        assert "_quantization_metadata" not in model.metadata
        assert torch.equal(model.read("a.weight"), layer.weight)


def scaled_flux(path: Path) -> list[str]:
    """A Flux file in scaled fp8, in its real shapes, that takes no room on the disk; its plain keys."""
    header: dict[str, object] = {}
    end, keys = 0, []

    def add(key: str, dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
        nonlocal end
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes

    for key, known in resolve("flux-flux").keys().items():
        if known.optional or not key.startswith("model.diffusion_model."):
            continue
        keys.append(key)
        count, is_matrix = math.prod(known.shape), len(known.shape) == 2
        add(key, "F8_E4M3" if is_matrix else "BF16", known.shape, count if is_matrix else 2 * count)
        if is_matrix:
            add(key.removesuffix("weight") + "scale_weight", "F32", (), 4)
    add("model.diffusion_model.scaled_fp8", "F8_E4M3", (2,), 2)
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return keys


@pytest.mark.parametrize("on_extra", ["skip", "keep", "error"])
def test_the_scales_of_a_known_model_are_never_left_out_as_extra_keys(on_extra: str, tmp_path: Path) -> None:
    keys = scaled_flux(tmp_path / "flux.safetensors")
    job = Job(mx.weighted_sum(*[str(tmp_path / "flux.safetensors")] * 2), {})

    with (
        pytest.raises(CheckpointError, match=r"is quantised: scaled fp8 \(ComfyUI\)"),
        plan([job], EngineOptions(on_extra=on_extra)),
    ):
        pass
    with plan([job], EngineOptions(on_extra=on_extra, on_quantised="dequantise")) as planned:
        layout, warnings = planned.layouts[0], planned.warnings

    assert set(layout) == set(keys)
    assert all(dtype == ("F32" if len(shape) == 2 else "BF16") for dtype, shape in layout.values())
    assert not any("not in its model config" in warning for warning in warnings)
    with open_stored(tmp_path / "flux.safetensors") as model:
        assert describe_model(model)["config"] == "flux-flux"
        assert describe_model(model)["extra"] == []


REFUSED = [format for format in FILES if format not in READERS]


def test_the_table_has_every_format() -> None:
    assert {READ[name]().format for name in READ} == READERS.keys()
    assert len(REFUSED) + len(READERS) == len(FILES)


@pytest.mark.parametrize("format", [*REFUSED, *READ])
def test_no_verb_passes_over_a_format_in_silence(
    format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of merge, plan, convert and info names the format; with the option it is read or refused."""
    layer = READ[format]() if format in READ else None
    name = layer.format if layer else format
    path = tmp_path / "q" / "model.safetensors"
    if layer:
        layer.save(path.parent)
    else:
        path.parent.mkdir()
        save_file(FILES[format], path)
    recipe = mx.weighted_sum(str(path), str(path))
    (tmp_path / "recipe.mecha").write_text(mx.serialize(recipe))
    output = str(tmp_path / "output.safetensors")
    named = re.escape(f"is quantised: {name}, by ")

    with pytest.raises(CheckpointError, match=named):
        merge.main([str(tmp_path / "recipe.mecha"), "-o", output])
    with pytest.raises(CheckpointError, match=named):
        plan_verb.main([str(tmp_path / "recipe.mecha")])
    with pytest.raises(CheckpointError, match=named):
        convert.main([str(path), "--to", "sdxl-diffusers", "-o", output])
    assert not Path(output).exists()
    info.main([str(path)])
    assert f"quantised: {name}, by " in " ".join(capsys.readouterr().out.split())
    if layer:
        assert torch.equal(mx.merge(recipe, options=DEQUANTISE)[layer.key], layer.weight)
    else:
        with pytest.raises(CheckpointError, match=named):
            mx.merge(recipe, options=DEQUANTISE)


def test_a_conversion_writes_the_numbers_of_a_quantised_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register(from_yaml("identifier: one-a\ncomponents: {m: {keys: {a.weight: [48, 80]}, blocks: A}}"))
    layer = fp8_of_comfyui()
    output = tmp_path / "out.safetensors"

    convert.main([str(layer.save(tmp_path)), "--to", "one-a", "-o", str(output), "--dequantise"])

    assert torch.equal(load_file(output)["a.weight"], layer.weight)
    assert "1 tensor is read as float32, code times scale" in " ".join(capsys.readouterr().out.split())


def test_two_quantised_models_are_compared_by_their_numbers(tmp_path: Path) -> None:
    layer = fp8_of_comfyui()
    stored = str(layer.save(tmp_path / "q"))
    save_file({"a.weight": layer.weight}, tmp_path / "plain.safetensors")

    compared = compare_by_block(stored, str(tmp_path / "plain.safetensors"))

    assert compared["all"]["distance"] == 0
    assert compared["notes"] == [
        f"{stored} is quantised: scaled fp8 (ComfyUI), by 'a.scale_weight' and 1 more. 1 tensor is read as "
        "float32, code times scale; 1 scale of activations is left out"
    ]
