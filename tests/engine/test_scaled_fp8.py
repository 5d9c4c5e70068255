"""Outputs in scaled fp8: ComfyUI's layout, with the error measured and read back within it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

import mecha_exp as mx
from mecha_exp.app.point import Point
from mecha_exp.checkpoint import open_stored
from mecha_exp.checkpoint.quantisation import quantisation_of
from mecha_exp.engine import EngineOptions, Job, plan
from mecha_exp.engine.scaled_fp8 import is_linear
from mecha_exp.errors import ConfigError
from mecha_exp.evaluation.model import load_state_dict

FP8 = torch.float8_e4m3fn
MATRICES = ("proj.weight", "layers.0.mlp.weight", "zero.weight")


def model(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    return {
        "proj.weight": rand(700, 300, scale=1e-3).bfloat16(),
        "proj.bias": rand(700).bfloat16(),
        "layers.0.mlp.weight": rand(16, 24, scale=50.0),
        "zero.weight": torch.zeros(4, 4),
        "norm.weight": rand(16),
        "conv.weight": rand(4, 3, 3, 3).half(),
        "embed_tokens.weight": rand(40, 16).half(),
        "ids": torch.arange(5),
    }


def quantised(values: Tensor) -> tuple[Tensor, Tensor]:
    """The codes and the scale of a matrix, by ComfyUI's layout in plain torch."""
    scale = values.float().abs().max() / 448
    scale = scale if scale > 0 else torch.ones(())
    return (values.float() / scale).to(FP8), scale


def saved(folder: Path) -> tuple[str, str]:
    for name, seed in (("a", 1), ("b", 2)):
        save_file(model(seed), folder / f"{name}.safetensors")
    return str(folder / "a.safetensors"), str(folder / "b.safetensors")


@pytest.mark.parametrize("fuse", ["never", "always"])
@pytest.mark.parametrize("tile_size", [1000, 1 << 19])
def test_matrices_become_codes_with_a_scale_and_all_else_stays(
    fuse: str, tile_size: int, tmp_path: Path
) -> None:
    recipe = mx.weighted_sum(*saved(tmp_path), alpha=0.25)
    plain = mx.merge(recipe, dtype=torch.float32)
    as_ever = mx.merge(recipe)
    output = tmp_path / "out.safetensors"

    report = mx.merge_many(
        [Job(recipe, output, quantize="fp8_scaled")], EngineOptions(fuse=fuse, tile_size=tile_size)
    )

    stored = load_file(output)
    assert stored.keys() == {
        *plain,
        *(key.replace("weight", "scale_weight") for key in MATRICES),
        "scaled_fp8",
    }
    assert (stored["scaled_fp8"].dtype, stored["scaled_fp8"].shape) == (FP8, (0,))
    for key in MATRICES:
        codes, scale = quantised(plain[key])
        assert stored[key].dtype is FP8
        assert torch.equal(stored[key].view(torch.uint8), codes.view(torch.uint8))
        assert stored[key.replace("weight", "scale_weight")].shape == ()
        assert torch.equal(stored[key.replace("weight", "scale_weight")], scale)
    assert all(torch.equal(stored[key], as_ever[key]) for key in plain.keys() - set(MATRICES))
    (error,) = report.quantisation
    assert error is not None
    differences = {key: (plain[key] - _decoded(plain[key])).double().norm() for key in MATRICES}
    sizes = {key: plain[key].double().norm() for key in MATRICES}
    relative = {key: float(differences[key] / sizes[key]) if sizes[key] else 0.0 for key in MATRICES}
    total = torch.stack([*differences.values()]).norm() / torch.stack([*sizes.values()]).norm()
    assert error.tensors == 3
    assert error.largest == pytest.approx(max(relative.values()), rel=1e-4)
    assert relative[error.key] == max(relative.values())
    assert error.mean == pytest.approx(float(total), rel=1e-4)
    assert 0.01 < error.mean < 0.04


def _decoded(values: Tensor) -> Tensor:
    codes, scale = quantised(values)
    return codes.float() * scale


def test_what_is_read_back_is_within_the_error_of_the_format(tmp_path: Path) -> None:
    recipe = mx.weighted_sum(*saved(tmp_path), alpha=0.25)
    output = tmp_path / "out.safetensors"
    mx.merge_many([Job(recipe, output, quantize="fp8_scaled")])

    with open_stored(output) as stored:
        told = quantisation_of(stored)
    back = mx.merge(mx.model(str(output)), options=EngineOptions(on_quantised="dequantise"))

    assert told is not None
    assert told.format == "scaled fp8 (ComfyUI)"
    plain = mx.merge(recipe, dtype=torch.float32)
    assert back.keys() == plain.keys()
    for key in MATRICES:
        assert torch.equal(back[key], _decoded(plain[key]))
        limit = plain[key].abs() / 16 + plain[key].abs().max() / 448 / 512 / 2  # half a step of e4m3
        assert bool(((back[key] - plain[key]).abs() <= limit * 1.0001).all())
    measured = load_state_dict(output)
    assert all(torch.equal(measured[key], back[key]) for key in back)
    assert all(torch.equal(load_state_dict(load_file(output))[key], back[key]) for key in back)


@given(st.integers(-60, 60), st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_any_scale_of_the_weights_is_kept(exponent: int, seed: int) -> None:
    values = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    merged: dict[str, Tensor] = {}

    report = mx.merge_many([Job(mx.model({"a.weight": values}), merged, quantize="fp8_scaled")])

    codes, scale = quantised(values)
    assert torch.equal(merged["a.weight"].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(merged["a.scale_weight"], scale)
    assert report.nonfinite_values == (0,)
    assert report.warnings[1:] == ()


def test_points_of_one_pass_may_be_quantised_or_not(tmp_path: Path) -> None:
    a, b = saved(tmp_path)
    plain: dict[str, Tensor] = {}
    codes: dict[str, Tensor] = {}
    recipe = mx.slerp(a, b, alpha=0.5)

    report = mx.merge_many([Job(recipe, plain), Job(recipe, codes, quantize="fp8_scaled", statistics=True)])

    assert torch.equal(plain["norm.weight"], codes["norm.weight"])
    assert "scaled_fp8" not in plain
    assert codes["proj.weight"].dtype is FP8
    assert report.quantisation[0] is None
    assert report.quantisation[1] is not None
    assert len(report.moments[1]) == 2


def test_the_plan_says_which_keys_are_quantised(tmp_path: Path) -> None:
    with plan([Job(mx.weighted_sum(*saved(tmp_path)), {}, quantize="fp8_scaled")]) as planned:
        (warning,) = planned.warnings

    assert "writes 3 of 8 keys, the matrices of linear layers, as float8_e4m3fn with a scale each" in warning


def test_in_a_single_file_only_the_diffusion_model_is_quantised() -> None:
    inner = "model.diffusion_model.a.weight"
    values = {inner: torch.randn(4, 4), "first_stage_model.a.weight": torch.randn(4, 4)}
    merged: dict[str, Tensor] = {}

    mx.merge_many([Job(mx.model(values), merged, quantize="fp8_scaled")])

    assert {key for key, tensor in merged.items() if tensor.dtype is FP8} == {
        inner,
        "model.diffusion_model.scaled_fp8",
    }


@pytest.mark.parametrize(
    ("key", "shape", "expected"),
    [
        ("a.weight", (4, 4), True),
        ("a.bias", (4,), False),
        ("norm.weight", (4,), False),
        ("conv.weight", (4, 4, 3, 3), False),
        ("model.embed_tokens.weight", (4, 4), False),
        ("wte.weight", (4, 4), False),
        ("pos_embed", (4, 4), False),
        ("empty.weight", (0, 4), False),
    ],
)
def test_a_linear_layer_is_told_by_name_and_shape(key: str, shape: tuple[int, ...], expected: bool) -> None:
    assert is_linear(key, shape) is expected


def test_folders_and_unknown_choices_are_refused(tmp_path: Path) -> None:
    recipe = mx.model({"a.weight": torch.randn(4, 4)})

    with pytest.raises(ConfigError, match=r"quantize: unknown choice 'fp8'\. Known: fp8_scaled"):
        Job(recipe, {}, quantize="fp8")
    with pytest.raises(ConfigError, match=r"is one file: name an output that ends in \.safetensors"):
        Job(recipe, tmp_path / "folder", quantize="fp8_scaled")


@pytest.mark.parametrize("keys", [1, 3, 6])
def test_an_interrupted_run_goes_on_to_the_same_bytes_and_error(keys: int, tmp_path: Path) -> None:
    recipe = mx.weighted_sum(*saved(tmp_path), alpha=0.25)
    options = EngineOptions(workers=1, tile_size=1000)
    whole = mx.merge_many([Job(recipe, tmp_path / "whole.safetensors", quantize="fp8_scaled")], options)
    seen: set[str] = set()

    def stop(key: str, nbytes: int) -> None:
        seen.add(key)
        if len(seen) > keys:
            raise KeyboardInterrupt

    job = Job(recipe, tmp_path / "out.safetensors", quantize="fp8_scaled")
    with pytest.raises(KeyboardInterrupt):
        mx.merge_many([job], options, stop)
    resumed = mx.merge_many([job], options)

    assert resumed.resumed_keys == keys
    assert (tmp_path / "out.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    assert resumed.quantisation == whole.quantisation


def test_it_is_part_of_the_signature_and_none_changes_nothing(tmp_path: Path) -> None:
    recipe = mx.weighted_sum(*saved(tmp_path), alpha=0.25)

    def digest(**output: object) -> str:
        config = {"output": {"save": True, "path": None, "dtype": "input", "durable": True, **output}}
        return Point(config, tmp_path, recipe, EngineOptions(), None, None).digest

    assert digest(quantize="fp8_scaled") != digest(quantize=None) == digest()
