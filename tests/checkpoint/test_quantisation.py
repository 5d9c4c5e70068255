"""Quantised models are recognised by their headers, named by `info`, and refused by every merge."""

import json
import re
from pathlib import Path

import pytest
import torch
from quantised_files import FILES, FP8, LINEAR, zeros
from safetensors.torch import save_file

import mecha_exp as mx
from mecha_exp.checkpoint import open_stored
from mecha_exp.checkpoint.quantisation import quantisation_of
from mecha_exp.cli import convert
from mecha_exp.errors import CheckpointError
from mecha_exp.inspection.model import describe_model

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
