"""Language models that differ in their vocabulary: tied output layers, added tokens, output dtypes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mecha_exp import EngineOptions, Job, merge, merge_many, n_average, weighted_sum
from mecha_exp.checkpoint import load
from mecha_exp.engine.planner.by_key import parse_output_dtype
from mecha_exp.errors import CheckpointError, ConfigError, RecipeError

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def language_model(seed: int, tokens: int = 6, tied: bool = False) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {EMBEDDING: (tokens, 4), HEAD: (tokens, 4), "model.layers.0.mlp.weight": (4, 4)}
    tensors = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    if tied:
        del tensors[HEAD]
    return tensors


def folder(path: Path, tensors: dict[str, torch.Tensor], **config) -> Path:
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def halves(a, b, **options) -> dict[str, torch.Tensor]:
    return merge(weighted_sum(a, b, alpha=0.5), options=EngineOptions(**options))


def test_a_tied_model_and_one_that_is_not_are_an_error_that_explains_itself():
    with pytest.raises(CheckpointError) as error:
        halves(language_model(1, tied=True), language_model(2))

    said = str(error.value)
    assert (
        "there is no 'lm_head.weight', because the model is tied: it uses 'model.embed_tokens.weight'" in said
    )
    assert "on_tied=untie" in said
    assert "on_tied=tie" in said
    assert "problems" not in said, "one cause, one message"


def test_untying_reads_the_embedding_as_the_output_layer():
    a, b = language_model(1, tied=True), language_model(2)

    merged = halves(a, b, on_tied="untie")

    assert torch.allclose(merged[HEAD], (a[EMBEDDING] + b[HEAD]) / 2)


def test_tying_leaves_the_output_layer_out():
    merged = halves(language_model(1, tied=True), language_model(2), on_tied="tie")

    assert HEAD not in merged
    assert EMBEDDING in merged


def test_two_tied_models_are_merged_as_they_are():
    assert HEAD not in halves(language_model(1, tied=True), language_model(2, tied=True))


def test_vocabularies_of_different_sizes_are_an_error_that_explains_itself(tmp_path):
    a = folder(tmp_path / "a", language_model(1))
    with pytest.raises(CheckpointError) as error:
        halves(a, language_model(2, tokens=9))

    said = str(error.value)
    assert (
        "the vocabularies have different sizes: 'lm_head.weight' has 6 in" in said or "'model.embed" in said
    )
    assert "resize_embeddings=truncate keeps the first 6 rows, and resize_embeddings=pad keeps 9" in said


def test_truncating_keeps_the_tokens_that_all_have():
    a, b = language_model(1), language_model(2, tokens=9)

    merged = halves(a, b, resize_embeddings="truncate")

    assert torch.allclose(merged[HEAD], (a[HEAD] + b[HEAD][:6]) / 2)


def test_padding_takes_the_missing_tokens_from_the_one_that_has_them():
    a, b = language_model(1), language_model(2, tokens=9)
    b[HEAD] = b[HEAD].half()

    merged = halves(a, b, resize_embeddings="pad")

    assert torch.allclose(merged[EMBEDDING][:6], (a[EMBEDDING] + b[EMBEDDING][:6]) / 2)
    assert torch.allclose(merged[EMBEDDING][6:], b[EMBEDDING][6:])
    assert torch.allclose(merged[HEAD][6:], b[HEAD][6:].float(), atol=1e-6)


def test_the_config_beside_the_weights_knows_of_both(tmp_path):
    a = folder(tmp_path / "a", language_model(1, tied=True), vocab_size=6, tie_word_embeddings=True)
    b = folder(tmp_path / "b", language_model(2, tokens=9), vocab_size=9)
    options = EngineOptions(on_tied="untie", resize_embeddings="pad")

    merge_many([Job(weighted_sum(a, b, alpha=0.5), tmp_path / "merged")], options)

    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config == {"vocab_size": 9, "tie_word_embeddings": False}
    assert load(tmp_path / "merged")[HEAD].shape == (9, 4)


def test_models_for_other_arithmetic_are_merged_with_a_warning(tmp_path):
    old = {"num_attention_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None}
    new = {"num_attention_heads": 2, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
    a = folder(tmp_path / "a", language_model(1), **old)
    same = folder(tmp_path / "same", language_model(2), **new, rope_parameters={"rope_theta": 10000.0})
    other = folder(tmp_path / "other", language_model(3), **{**new, "num_attention_heads": 4}, rope_theta=1e6)

    report = merge_many([Job(n_average(a, same, other), tmp_path / "merged")])

    (warning,) = report.warnings
    assert f"num_attention_heads is 2 in {a} and 4 in {other}; rope_theta is 10000.0 in" in warning
    assert f"a folder that is written has those of {a}: measure whether the merge works" in warning


@pytest.mark.parametrize("option", ["on_tied", "resize_embeddings"])
def test_a_misspelt_choice_is_an_error(option):
    with pytest.raises(ConfigError, match=f"{option}: unknown choice 'eror'. Did you mean 'error'"):
        EngineOptions(**{option: "eror"})


def parts() -> dict[str, torch.Tensor]:
    tensors = {f"{part}.{name}": torch.randn(8) for part in ("vae", "unet") for name in ("w", "norm.scale")}
    return {**tensors, "step": torch.tensor([3])}


def dtypes(wanted, a=None) -> dict[str, torch.dtype]:
    target: dict[str, torch.Tensor] = {}
    merge_many([Job(weighted_sum(a or parts(), parts(), alpha=0.3), target, parse_output_dtype(wanted))])
    return {key: tensor.dtype for key, tensor in target.items()}


def test_each_component_and_pattern_may_have_a_dtype_of_its_own():
    base = parts()
    base |= {key: tensor.double() for key, tensor in base.items() if key.endswith("scale")}

    found = dtypes({"vae": "float32", "*norm*": "input", "default": "bfloat16"}, base)

    assert found == {
        "vae.w": torch.float32,
        "vae.norm.scale": torch.float64,
        "unet.w": torch.bfloat16,
        "unet.norm.scale": torch.float64,
        "step": torch.int64,
    }


def test_what_no_selector_holds_keeps_the_dtype_of_the_input():
    assert dtypes({"vae": "fp16"})["unet.w"] == torch.float32
    assert set(dtypes("input").values()) == {torch.float32, torch.int64}


def test_a_dtype_or_a_selector_that_is_none_is_an_error():
    with pytest.raises(ConfigError, match=r"unknown dtype 'flot32'.*Did you mean 'float32'"):
        parse_output_dtype({"vae": "flot32"})
    with pytest.raises(RecipeError, match=r"the pattern 'vea' matches none of the .*Did you mean .*'vae"):
        dtypes({"vea": "float32"})


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_goes_in_and_out_with_the_rounding_of_torch(dtype):
    a, b = (torch.randn(500, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(2))
    expected = torch.lerp(a.float(), b.float(), 0.3).to(dtype)

    merged = merge(weighted_sum({"w": a}, {"w": b}, alpha=0.3))["w"]

    assert merged.dtype == dtype
    assert (merged.float() - expected.float()).abs().max() <= expected.float().abs().max() * 2**-3
    assert (merged.view(torch.uint8) == expected.view(torch.uint8)).float().mean() > 0.99


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_what_is_too_large_for_float8_is_as_in_torch_and_counted(dtype):
    large = torch.tensor([1.0, 1e6, -1e6])
    target: dict[str, torch.Tensor] = {}

    report = merge_many([Job(weighted_sum({"w": large}, {"w": large}, alpha=0.5), target, dtype)])

    assert torch.equal(target["w"].float().isfinite(), large.to(dtype).float().isfinite())
    assert report.nonfinite_values == (2,)
