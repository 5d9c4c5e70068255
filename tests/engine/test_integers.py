"""Whole numbers are copied from the first input, so where the inputs differ there must be a reason."""

import pytest
import torch

import mecha_exp as mx
from mecha_exp.errors import CheckpointError

COUNTERS = [
    "bn.num_batches_tracked",
    "n_averaged",
    "model_ema.num_updates",
    "global_step",
    "text_model.embeddings.position_ids",
    "layers.0.blocks.1.attn.relative_position_index",
]

CODES = {
    "layer.qweight_packed": torch.int32,
    "layer.codes": torch.uint8,
    "layer.codebook": torch.int8,
    "layer.mask": torch.bool,
    "layer.perm": torch.int64,
}


def pair(key: str, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    return [{"w": torch.ones(2), key: torch.tensor([0, 1, value]).to(dtype)} for value in (0, 1)]


@pytest.mark.parametrize(("key", "dtype"), CODES.items())
def test_integers_that_differ_are_an_error_that_names_them_and_the_way_out(key, dtype):
    a, b = pair(key, dtype)

    with pytest.raises(CheckpointError) as error:
        mx.merge(mx.weighted_sum(a, b))

    assert "1 key is not floating point and differs between the inputs" in str(error.value)
    assert key in str(error.value)
    assert "on_integers=base takes them from the first input" in str(error.value)
    merged = mx.merge(mx.weighted_sum(a, b), options=mx.EngineOptions(on_integers="base"))
    assert torch.equal(merged[key], a[key])


@pytest.mark.parametrize("key", COUNTERS)
def test_counters_and_positions_are_those_of_the_first_input(key):
    a, b = pair(key, torch.int64)

    assert torch.equal(mx.merge(mx.weighted_sum(a, b))[key], a[key])


def test_equal_integers_are_copied():
    a, b = pair("layer.codes", torch.uint8)[0], pair("layer.codes", torch.uint8)[0]

    assert torch.equal(mx.merge(mx.weighted_sum(a, b))["layer.codes"], a["layer.codes"])


def test_complex_numbers_that_differ_are_spoken_of_as_such():
    a, b = (
        {"w": torch.ones(2), "freqs": torch.complex(torch.full((3,), value), torch.ones(3)), "code": code}
        for value, code in ((0.0, torch.tensor([0])), (1.0, torch.tensor([1])))
    )

    with pytest.raises(CheckpointError) as error:
        mx.merge(mx.weighted_sum(a, b))

    said = str(error.value)
    assert "1 key is complex (C64) and differs between the inputs: freqs (first between " in said
    assert "Complex numbers are not merged. Store their real and imaginary parts as two" in said
    assert "1 key is not floating point and differs between the inputs: code (first between " in said
    merged = mx.merge(mx.weighted_sum(a, b), options=mx.EngineOptions(on_integers="base"))
    assert torch.equal(merged["freqs"], a["freqs"])
