"""Quantised models are recognised by their headers, named by `info`, and refused by every merge."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import mecha_exp as mx
from mecha_exp.checkpoint import open_stored
from mecha_exp.checkpoint.quantisation import quantisation_of
from mecha_exp.cli import convert
from mecha_exp.errors import CheckpointError
from mecha_exp.inspection.model import describe_model

FP8, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
LINEAR = (64, 64)


def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


FILES = {
    "comfy_quant (ComfyUI)": {
        "a.weight": zeros(torch.int8, *LINEAR),
        "a.weight_scale": zeros(torch.float32),
        "a.comfy_quant": zeros(torch.uint8, 30),
    },
    "scaled fp8 (ComfyUI)": {
        "scaled_fp8": zeros(FP8, 0),
        "a.weight": zeros(FP8, *LINEAR),
        "a.scale_weight": zeros(torch.float32),
    },
    "fp8 in blocks (DeepSeek, transformers)": {
        "a.weight": zeros(FP8, 256, 256),
        "a.weight_scale_inv": zeros(torch.float32, 2, 2),
    },
    "MXFP8": {"a.weight": zeros(FP8, *LINEAR), "a.weight_scale": zeros(torch.uint8, 64, 2)},
    "scaled fp8 (compressed-tensors, ModelOpt)": {
        "a.weight": zeros(FP8, *LINEAR),
        "a.weight_scale": zeros(torch.bfloat16, 64, 1),
        "a.input_scale": zeros(torch.float32),
    },
    "scaled int8 (compressed-tensors)": {
        "a.weight": zeros(torch.int8, *LINEAR),
        "a.weight_scale": zeros(torch.float32, 64, 1),
    },
    "NVFP4 (ModelOpt)": {
        "a.weight": zeros(torch.uint8, 64, 32),
        "a.weight_scale": zeros(FP8, 64, 4),
        "a.weight_scale_2": zeros(torch.float32),
    },
    "NVFP4 (compressed-tensors)": {
        "a.weight_packed": zeros(torch.uint8, 64, 32),
        "a.weight_scale": zeros(FP8, 64, 4),
        "a.weight_global_scale": zeros(torch.float32, 1),
    },
    "packed integers (compressed-tensors)": {
        "a.weight_packed": zeros(torch.int32, 64, 8),
        "a.weight_scale": zeros(torch.bfloat16, 64, 1),
        "a.weight_shape": zeros(torch.int64, 2),
    },
    "GPTQ": {
        "a.qweight": zeros(torch.int32, 8, 64),
        "a.qzeros": zeros(torch.int32, 1, 8),
        "a.scales": zeros(torch.float16, 1, 64),
        "a.g_idx": zeros(torch.int32, 64),
    },
    "AWQ, or GPTQ without g_idx": {
        "a.qweight": zeros(torch.int32, 64, 8),
        "a.qzeros": zeros(torch.int32, 1, 8),
        "a.scales": zeros(torch.float16, 1, 64),
    },
    "EETQ": {"a.weight": zeros(torch.int8, *LINEAR), "a.weight_scales": zeros(torch.float16, 64)},
    "SVDQuant (nunchaku)": {"a.qweight": zeros(torch.int8, 64, 32), "a.wscales": zeros(torch.float16, 1, 64)},
    "int8 (bitsandbytes)": {
        "a.weight": zeros(torch.int8, *LINEAR),
        "a.SCB": zeros(torch.float32, 64),
        "a.weight_format": zeros(torch.uint8),
    },
    "NF4 (bitsandbytes)": {
        "a.weight": zeros(torch.uint8, 2048, 1),
        "a.weight.absmax": zeros(torch.uint8, 64),
        "a.weight.nested_absmax": zeros(torch.float32, 1),
        "a.weight.quant_map": zeros(torch.float32, 16),
        "a.weight.quant_state.bitsandbytes__nf4": zeros(torch.uint8, 80),
    },
    "FP4 (bitsandbytes)": {
        "a.weight": zeros(torch.uint8, 2048, 1),
        "a.weight.absmax": zeros(torch.float32, 64),
        "a.weight.quant_state.bitsandbytes__fp4": zeros(torch.uint8, 80),
    },
    "4-bit (bitsandbytes)": {
        "a.weight": zeros(torch.uint8, 2048, 1),
        "a.weight.absmax": zeros(torch.float32, 64),
    },
    "MXFP4 (gpt-oss)": {
        "experts.gate_up_proj_blocks": zeros(torch.uint8, 2, 64, 2, 16),
        "experts.gate_up_proj_scales": zeros(torch.uint8, 2, 64, 2),
    },
    "quanto": {"a.weight._data": zeros(torch.int8, *LINEAR), "a.weight._scale": zeros(torch.float32, 64, 1)},
    "torchao": {
        "a._weight_qdata": zeros(torch.int8, *LINEAR),
        "a._weight_scale": zeros(torch.float32, 64),
    },
    "HQQ": {"a.W_q": zeros(torch.uint8, 32, 64), "a.scale": zeros(torch.float16, 64, 1)},
    "AQLM": {
        "a.codes": zeros(torch.int8, 64, 8, 1),
        "a.codebooks": zeros(torch.float16, 1, 256, 1, 8),
        "a.scales": zeros(torch.float16, 64, 1, 1, 1),
    },
    "ExLlamaV2": {"a.q_weight": zeros(torch.int32, 8, 64), "a.q_scale": zeros(torch.int32, 1, 8)},
    "ExLlamaV3": {"a.trellis": zeros(torch.int16, 4, 4, 64), "a.suh": zeros(torch.float16, 64)},
}
"""The tensors of one layer, as each project stores them."""

PLAIN = {
    "bfloat16": {"a.weight": zeros(torch.bfloat16, *LINEAR), "a.scale": zeros(torch.bfloat16, 64)},
    "fp8 without scales": {"a.weight": zeros(FP8, *LINEAR)},
    "counters": {
        "bn.weight": zeros(torch.float32, 4),
        "bn.num_batches_tracked": zeros(torch.int64),
        "position_ids": zeros(torch.int64, 1, 77),
    },
    "a scale of its own": {
        "logit.weight_scale": zeros(torch.float32),
        "logit.weight": zeros(torch.float16, 4),
    },
    "bytes beside a scale": {"a.mask": zeros(torch.uint8, 4), "a.scale": zeros(torch.float32, 4)},
}


def found(path: Path) -> str | None:
    with open_stored(path) as model:
        quantisation = quantisation_of(model)
    return quantisation and quantisation.format


@pytest.mark.parametrize("format", FILES)
def test_a_quantised_file_is_recognised_by_its_tensors(format: str, tmp_path: Path) -> None:
    head = {"lm_head.weight": zeros(torch.bfloat16, *LINEAR)}
    save_file(FILES[format] | head, tmp_path / "model.safetensors")

    assert found(tmp_path / "model.safetensors") == format


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_numbers_and_counters_are_not_codes(kind: str, tmp_path: Path) -> None:
    save_file(PLAIN[kind], tmp_path / "model.safetensors")

    assert found(tmp_path / "model.safetensors") is None


def test_a_format_without_known_tensors_is_named_by_config_json(tmp_path: Path) -> None:
    save_file({"a.packed_codes": zeros(torch.uint8, 64)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "vptq"}}))

    assert found(tmp_path / "model.safetensors") == "vptq"


@pytest.mark.parametrize("content", ["", "[]", "{", '{"quantization_config": 3}', "\udcff"])
def test_a_config_json_that_says_nothing_of_it_does_no_harm(content: str, tmp_path: Path) -> None:
    save_file({"a.codes_of_something": zeros(torch.uint8, 64)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))

    assert found(tmp_path / "model.safetensors") is None


@pytest.mark.parametrize("format", FILES)
def test_a_merge_refuses_a_quantised_model_and_names_its_format(format: str, tmp_path: Path) -> None:
    save_file(FILES[format], tmp_path / "model.safetensors")
    plain = {key: zeros(torch.bfloat16, *tensor.shape) for key, tensor in FILES[format].items()}
    recipe = mx.weighted_sum(str(tmp_path / "model.safetensors"), plain)

    with pytest.raises(
        CheckpointError, match=re.escape(f"model.safetensors is quantised: {format}, by ")
    ) as e:
        mx.merge(recipe)

    assert "dequantised copy" in str(e.value)


def test_all_quantised_inputs_are_named_at_once_those_in_memory_too(tmp_path: Path) -> None:
    save_file(FILES["GPTQ"], tmp_path / "a.safetensors")
    recipe = mx.weighted_sum(str(tmp_path / "a.safetensors"), FILES["MXFP8"])

    with pytest.raises(CheckpointError, match=r"(?s)a\.safetensors is quantised: GPTQ.*is quantised: MXFP8"):
        mx.merge(recipe)


def test_info_names_the_format(tmp_path: Path) -> None:
    save_file(FILES["NF4 (bitsandbytes)"], tmp_path / "model.safetensors")

    with open_stored(tmp_path / "model.safetensors") as model:
        anomalies = describe_model(model)["anomalies"]

    assert any(
        line.startswith("quantised: NF4 (bitsandbytes), by 'a.weight.quant_state") for line in anomalies
    )


def test_a_conversion_refuses_one_before_it_writes_anything(tmp_path: Path) -> None:
    save_file(FILES["scaled fp8 (ComfyUI)"], tmp_path / "model.safetensors")
    output = tmp_path / "converted.safetensors"

    with pytest.raises(
        CheckpointError, match=r"is quantised: scaled fp8 \(ComfyUI\), by 'a\.scale_weight' and 1"
    ):
        convert.main([str(tmp_path / "model.safetensors"), "--to", "sdxl-diffusers", "-o", str(output)])

    assert not output.exists()
