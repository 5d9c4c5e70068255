"""Recipes with LoRA files: interfaces, keys that are made together, and texts."""

import pytest
import torch
from torch import Tensor
from toy_lora import DOWN, OF_Q, UP, Q, base_model, rand

import mecha_exp as m
from mecha_exp.method_api.registry import resolve_method


def test_an_interface_may_choose_by_itself_and_its_defaults_hold():
    @m.merge_method(register=False)
    def times(a: m.Parameter(Tensor), factor: m.Parameter(float)) -> m.Return(Tensor):
        return a * factor

    asked: list[list[str]] = []

    def choose(configs):
        asked.append([config.identifier for config in configs["a"]])
        return times

    @m.merge_method(is_interface=True, choose=choose, identifier="doubled in test_lora_recipes")
    def doubled(
        a: m.Parameter(m.StateDict[Tensor]),
        b: m.Parameter(m.StateDict[Tensor], "weight") = None,
        factor: m.Parameter(float) = 2.0,
    ) -> m.Return(Tensor):
        """Never run."""

    for recipe, factor in ((doubled(base_model()), 2), (doubled(base_model(), base_model(), factor=3.0), 3)):
        merged = m.merge(recipe, merge_dtype=torch.float64)
        torch.testing.assert_close(merged[Q], base_model()[Q] * factor)
    assert asked == [["toy-kohya"]] * len(asked)


def test_an_interface_that_chooses_is_an_interface():
    with pytest.raises(m.RecipeError, match="it needs `is_interface=True`"):
        m.merge_method(choose=lambda configs: m.scale)


# keys that are made together


def test_a_hyperparameter_that_differs_within_a_group_of_keys_is_an_error():
    @m.merge_method(register=False)
    class together:
        @staticmethod
        def map_keys(b):
            b["x", "y"] = b.a.keys["x", "y"]

        def __call__(
            self, a: m.Parameter(m.StateDict[Tensor]), alpha: m.Parameter(float), **kwargs
        ) -> m.Return(Tensor):
            return {key: a[key] * alpha for key in kwargs["key_relation"].outputs}

    model = {"x": rand(2), "y": rand(3)}

    merged = m.merge(together(model, alpha={"x": 2.0, "y": 2}), merge_dtype=torch.float64)
    torch.testing.assert_close(merged["y"], model["y"] * 2)
    with pytest.raises(
        m.RecipeError,
        match=r"together: alpha: 2 keys are made together, so they have one value, and not 2\.0 at x, "
        r"3\.0 at y\. The keys: x, y\.",
    ):
        m.merge(together(model, alpha={"x": 2.0, "y": 3.0}))


# as text


def test_a_recipe_with_a_lora_is_written_in_the_words_of_sd_mecha_and_read_back():
    recipe = m.model("base.safetensors", "sd1-ldm") + m.convert(
        m.model("lora.safetensors", "sd1-kohya_kohya_lora"), "sd1-ldm"
    )

    text = m.serialize(recipe)

    assert "merge \"convert_'sd1-kohya_kohya_lora'_to_base\" &1" in text
    assert "merge \"convert_'sd1-kohya'_to_'sd1-ldm'\" &2" in text
    assert m.deserialize(text) is recipe
    older = text.replace("convert_'sd1-kohya'_to_'sd1-ldm'", "convert 'sd1-kohya' to 'sd1-ldm'")
    assert m.deserialize(older) is recipe
    for wrong in (
        "convert_'sd1-kohya'_to_base",
        "convert_'none-such'_to_base",
        "convert_'sd1-kohya'_to_'llama-hf'",
    ):
        with pytest.raises(m.RecipeError, match="unknown merge method"):
            m.deserialize(text.replace("convert_'sd1-kohya_kohya_lora'_to_base", wrong))


def test_a_template_adds_the_lora_that_fills_it(save):
    text = (
        'version 0.1.0\nparameter "base"\nparameter "lora"\nmerge "lora_delta" &1 &0\n'
        'merge "add_difference" &0 &2 alpha=0.5'
    )
    base, file = save("base", base_model()), save("lora", OF_Q)

    recipe = m.fill(m.deserialize(text), {"base": base, "lora": file})

    assert m.deserialize(m.serialize(recipe)) is recipe
    merged = m.merge(recipe, merge_dtype=torch.float64)
    torch.testing.assert_close(merged[Q], base_model()[Q] + UP @ DOWN)


def test_blocks_of_sd_mecha_are_converted_by_its_names():
    ours = resolve_method("convert_sdxl_blocks_to_sgm")

    assert resolve_method("convert 'sdxl-supermerger_blocks' to 'sdxl-sgm'") is ours
    assert ours.identifier == "convert_sdxl_blocks_to_sgm"
