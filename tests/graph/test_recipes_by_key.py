"""What a recipe is at each key: other models behind `|`, parts of models, dtypes, keys that are missing."""

import pytest
import torch
from state_dicts import same

from mecha_exp import (
    CheckpointError,
    EngineOptions,
    RecipeError,
    add_difference,
    merge,
    model,
    n_average,
    omit_component,
    pick_component,
    slerp,
    weighted_sum,
)  # fmt: skip

A = {"unet.w": torch.tensor([1.0, 2.0]), "text.w": torch.tensor([3.0]), "text.ids": torch.tensor([0, 1])}
B = {key: value + 10 if value.is_floating_point() else value for key, value in A.items()}


@pytest.fixture
def a():
    return model(A)


@pytest.fixture
def b():
    return model(B)


def test_a_fallback_gives_the_keys_that_the_first_one_lacks(b):
    half = model({"unet.w": A["unet.w"]})

    assert same(merge(half | b), {**B, "unet.w": A["unet.w"]})
    assert same(merge(b | half), B)


def test_a_fallback_is_asked_where_a_merge_has_no_value(a, b):
    half = model({"unet.w": torch.zeros(2)})

    merged = merge(n_average(half, b) | a, options=EngineOptions())

    assert same(merged, {**A, "unet.w": B["unet.w"] / 2})


def test_a_missing_key_without_a_fallback_is_an_error_with_the_model_that_lacks_it(a, b):
    half = model({"unet.w": torch.zeros(2)})

    with pytest.raises(CheckpointError, match=r"lacks 2 of the 3 keys that the other inputs have: text\.w"):
        merge(n_average(half, b))


def test_parts_of_models_make_a_model(a, b):
    assert same(merge(pick_component(a, "unet") | b), {**B, "unet.w": A["unet.w"]})
    assert same(merge(omit_component(a, "unet") | b), {**A, "unet.w": B["unet.w"]})
    assert merge(pick_component(a, "text")).keys() == {"text.w", "text.ids"}


def test_parts_are_merged_with_parts(a, b):
    unet = weighted_sum(pick_component(a, "unet"), pick_component(b, "unet"), alpha=0.5)

    assert same(merge(unet | pick_component(a, "text")), {**A, "unet.w": A["unet.w"] + 5})


def test_an_unknown_component_is_met_with_the_nearest(a):
    with pytest.raises(RecipeError, match=r"no component 'unte'\. Did you mean 'unet'"):
        merge(pick_component(a, "unte"))


def test_a_part_that_is_merged_with_the_whole_says_what_is_missing(a, b):
    with pytest.raises(CheckpointError, match=r"pick_component.* lacks 2 of the 3 keys .*`node \| model`"):
        merge(n_average(pick_component(a, "unet"), b))


def test_a_recipe_ends_in_the_dtype_that_it_is_cast_to(a, b):
    merged = merge(weighted_sum(a, b, alpha=0.5).to(dtype=torch.float16))

    assert merged["unet.w"].dtype == torch.float16
    assert merged["text.ids"].dtype == torch.int64


def test_a_cast_in_between_rounds_and_the_output_keeps_its_dtype():
    fine = model({"w": torch.tensor([1 + 2**-12])})

    merged = merge(n_average(fine.to(dtype="float16"), fine))

    assert merged["w"].dtype == torch.float32
    assert merged["w"].item() == 1 + 2**-13


def test_the_operators_build_the_methods(a, b):
    assert a + (b - a) is add_difference(a, b - a)
    assert 2 * (b - a) is (b - a) * 2
    assert same(merge(a + 0.5 * (b - a)), merge(add_difference(a, b, a, alpha=0.5)))
    assert {"unet.w": A["unet.w"]} | b
    assert a.to(device="cuda") is a


def test_a_third_positional_number_of_add_difference_is_alpha(a, b):
    delta = b - a

    assert add_difference(a, delta, 0.5) is add_difference(a, delta, alpha=0.5)
    assert add_difference(a, b, a, 0.5) is add_difference(a, b, a, alpha=0.5)
    assert add_difference(a, delta, {"unet": 0.1, "default": 0.5}).arguments[-1][0] == "alpha"


def test_a_conflict_of_merge_spaces_says_what_is_what(a, b):
    with pytest.raises(
        RecipeError, match=r"'a' is a weight \(model.*'b' is a delta \(result of 'subtract'\)"
    ):
        slerp(a, b - a)
