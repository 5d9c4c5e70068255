"""Dictionaries with recipes for values: at each key the one that the selector names."""

import pytest
import torch

import mecha_exp as m
from mecha_exp import (
    RecipeError,
    build_recipe,
    convert,
    deserialize,
    fill,
    literal,
    merge,
    model,
    parameter,
    serialize,
    weighted_sum,
)
from mecha_exp.architectures import from_yaml, resolve
from mecha_exp.extensions import model_configs
from mecha_exp.graph.literals import node_by_key

A = {"encoder.w": torch.tensor([0.0, 0.0]), "decoder.w": torch.tensor([0.0, 0.0])}
B = {"encoder.w": torch.tensor([1.0, 1.0]), "decoder.w": torch.tensor([1.0, 1.0])}
a, b = model(A), model(B)


def values(recipe) -> list[float]:
    return [tensor[0].item() for tensor in merge(recipe).values()]


def test_each_key_has_the_recipe_that_its_selector_names():
    assert values({"encoder": a, "decoder.w": b}) == [0, 1]
    assert values(literal({"encoder": a, "default": b})) == [0, 1]
    assert values(weighted_sum(a, {"encoder": b, "*": a}, alpha=0.5)) == [0.5, 0]


def test_a_hyperparameter_is_computed_for_the_keys_that_it_is_for():
    alpha = {"encoder": weighted_sum(literal(0.0), literal(1.0), alpha=0.25), "default": 0.5}

    assert values(weighted_sum(a, b, alpha=alpha)) == [0.25, 0.5]


def test_a_key_that_no_selector_holds_is_missing_or_taken_from_behind_the_bar():
    assert values(literal({"encoder": b}) | a) == [1, 0]
    with pytest.raises(m.CheckpointError, match="the result of select"):
        merge(weighted_sum(a, {"encoder": b}))


def test_a_word_beside_models_is_a_path():
    assert node_by_key({"encoder": "a.safetensors", "default": b}) is node_by_key(
        {"encoder": model("a.safetensors"), "default": b}
    )


def test_a_selector_that_selects_nothing_is_met_with_the_nearest():
    with pytest.raises(RecipeError, match=r"the pattern 'encodr' matches none.*Did you mean 'encoder'"):
        merge({"encodr": a, "default": b})


def test_weights_and_numbers_do_not_mix():
    with pytest.raises(RecipeError, match="must share one merge space"):
        literal({"encoder": a, "default": 0.5})


def test_mere_values_are_a_value_by_key():
    assert node_by_key({"encoder": literal(0.25), "default": 0.5}) is literal(
        {"encoder": 0.25, "default": 0.5}
    )
    assert node_by_key({"default": a}) is a


def test_blocks_may_be_open_and_are_filled_later():
    alpha = {"encoder": parameter("share"), "default": 0.5}
    template = weighted_sum("a", "b", alpha=alpha)

    assert fill(template, {"share": 0.25}) is weighted_sum("a", "b", alpha={"encoder": 0.25, "default": 0.5})
    assert values(weighted_sum(a, b, alpha=fill(literal(alpha), {"share": 0.25}))) == [0.25, 0.5]


def test_it_is_converted_like_other_dictionaries():
    config = from_yaml(
        "identifier: dict_blocks-test\ncomponents: {blocks: {keys: {dict_in: [], dict_out: []}}}"
    )
    model_configs.register(config)
    whole = from_yaml(
        "identifier: dict_model-test\ncomponents: {all: {keys: {dict_encoder: [2], dict_decoder: [2]}}}"
    )
    model_configs.register(whole)

    @m.merge_method(is_conversion=True)
    class dict_blocks_to_model:
        @staticmethod
        def map_keys(b):
            b["dict_encoder"] = b.blocks.keys["dict_in"]
            b["dict_decoder"] = b.blocks.keys["dict_out"]

        def __call__(
            self, blocks: m.Parameter(m.StateDict[torch.Tensor], "dict_blocks-test"), **kwargs
        ) -> m.Return(torch.Tensor, "dict_model-test"):
            (block,) = kwargs["key_relation"].inputs["blocks"]
            return blocks[block]

    one = model({"dict_encoder": torch.zeros(2), "dict_decoder": torch.zeros(2)}, "dict_model-test")
    two = model({"dict_encoder": torch.ones(2), "dict_decoder": torch.ones(2)}, "dict_model-test")
    computed = weighted_sum(literal(0.0), literal(1.0), alpha=0.25)
    alpha = convert({"dict_in": computed, "dict_out": 0.5}, one)
    template = weighted_sum(one, two, alpha=convert({"dict_in": parameter("x"), "default": 0.5}, one))

    assert values(weighted_sum(one, two, alpha=alpha)) == [0.25, 0.5]
    assert values(fill(template, {"x": 0.75})) == [0.75, 0.5]
    paths = weighted_sum(
        "a", "b", alpha=convert({"dict_in": parameter("x"), "default": 0.5}, "dict_model-test")
    )
    assert deserialize(serialize(paths)) is paths


def test_built_in_blocks_are_converted_too():
    key = "model.diffusion_model.input_blocks.4.1.norm.bias"
    state = torch.zeros(resolve("sd1-ldm").keys()[key].shape)
    alpha = convert({"IN04": weighted_sum(literal(0.0), literal(1.0)), "default": 0.0}, "sd1-ldm")
    one, two = (model({key: state + value}, "sd1-ldm") for value in (0, 1))

    assert values(weighted_sum(one, two, alpha=alpha)) == [0.5]


TEXT = """version 0.1.0
model "a" model_config=null merge_space="weight"
model "b" model_config=null merge_space="weight"
parameter "share"
dict encoder=&2 a\\ b=0.5 default=0.25
merge "weighted_sum" &0 &1 alpha=&3"""


def test_as_text_it_is_a_dict_with_references():
    recipe = deserialize(TEXT)

    assert recipe is weighted_sum(
        "a", "b", alpha={"encoder": parameter("share"), "a b": 0.5, "default": 0.25}
    )
    assert deserialize(serialize(recipe)) is recipe
    assert serialize(recipe) == TEXT.replace("encoder=&2 a\\ b=0.5", "a\\ b=0.5 encoder=&2")


def test_a_text_of_sd_mecha_is_read():
    text = """version 0.1.0
model "a" model_config="structural" merge_space="weight"
model "b" model_config="structural" merge_space="weight"
dict x.weight=&0 y.weight=&1
literal &2 model_config="structural" merge_space="weight\""""

    assert deserialize(text) is literal({"x.weight": model("a"), "y.weight": model("b")})
    assert deserialize(text.rpartition("\n")[0]) is deserialize(text)


def test_a_dict_in_a_dict_is_refused_with_its_place():
    with pytest.raises(
        RecipeError, match=r"line 3, column 6: the value of 'b' must be .* not another dictionary"
    ):
        deserialize("version 0.1.0\ndict a=1\ndict b=&0")


def test_in_yaml_a_value_may_be_a_call_or_a_parameter():
    open_x = {"parameter": "x", "merge_space": "param"}
    recipe = build_recipe(
        {
            "method": "weighted_sum",
            "a": "a",
            "b": "b",
            "alpha": {
                "encoder": {"parameter": "share"},
                "decoder": {"method": "weighted_sum", "a": open_x, "b": {"parameter": "y"}},
                "default": 0.5,
            },
        }
    )
    computed = weighted_sum(parameter("x", "param"), parameter("y"))
    wanted = {"encoder": parameter("share"), "decoder": computed, "default": 0.5}

    assert recipe is weighted_sum("a", "b", alpha=wanted)


def test_what_is_wrong_in_yaml_has_its_place():
    with pytest.raises(
        RecipeError, match=r"recipe\.alpha\.encoder\.method: unknown merge method 'weighted_smu'"
    ):
        build_recipe(
            {"method": "weighted_sum", "a": "a", "b": "b", "alpha": {"encoder": {"method": "weighted_smu"}}}
        )
