"""A recipe template has parameters; filling one is as if its value had been written in its place."""

import pytest
import torch

from mecha_exp import (
    RecipeError,
    add_difference,
    fill,
    literal,
    merge,
    model,
    n_average,
    parameter,
    plan,
    slerp,
    subtract,
    ties_sum,
    weighted_sum,
)
from mecha_exp.engine import Job
from mecha_exp.recipe import parameters_of


def test_parameters_are_filled_with_models_recipes_and_numbers():
    template = weighted_sum(
        add_difference(parameter("a"), parameter("b"), parameter("c")),
        parameter("a"),
        alpha=parameter("alpha"),
    )

    filled = fill(template, {"a": "a.st", "b": slerp("b", "d"), "c": model("c.st"), "alpha": 0.3})

    assert filled is weighted_sum(add_difference("a.st", slerp("b", "d"), "c.st"), "a.st", alpha=0.3)
    assert [p.name for p in parameters_of(template)] == ["a", "b", "c", "alpha"]
    assert parameters_of(filled) == []


def test_filling_in_steps_is_filling_at_once():
    template = weighted_sum(parameter("a"), parameter("b"), alpha=parameter("alpha"))

    half = fill(template, {"b": "b.st"})

    assert half is weighted_sum(parameter("a"), "b.st", alpha=parameter("alpha"))
    assert fill(half, {"a": "a.st", "alpha": 1}) is weighted_sum("a.st", "b.st", alpha=1)


def test_a_default_that_is_filled_in_is_the_default():
    assert fill(slerp("a", "b", alpha=parameter("alpha")), {"alpha": 0.5}) is slerp("a", "b")


def test_a_number_or_word_that_is_no_tensor_may_be_a_parameter():
    template = ties_sum(parameter("d", "delta"), k=parameter("k"), vote_sgn=parameter("vote", "param"))

    filled = fill(template, {"d": "d.st", "k": 0.2, "vote": True})

    assert filled is ties_sum(model("d.st", "delta"), k=0.2, vote_sgn=True)


def test_a_list_fills_a_place_among_any_number_of_models():
    assert fill(n_average("a", parameter("more")), {"more": ["b", "c"]}) is n_average("a", "b", "c")


def test_a_parameter_alone_is_a_recipe_too():
    assert fill(parameter("a"), {"a": "a.st"}) is model("a.st")


def test_a_path_takes_the_merge_space_and_the_config_of_its_parameter():
    template = add_difference(parameter("a", config="sdxl-sgm"), parameter("d", "delta"))

    filled = fill(template, {"a": "a.st", "d": "d.st"})

    assert filled is add_difference(model("a.st", "sdxl-sgm"), model("d.st", "delta"))


def test_a_parameter_is_checked_where_it_stands_as_soon_as_its_space_is_known():
    with pytest.raises(RecipeError, match="subtract: a: expected a weight, got the delta parameter"):
        subtract(parameter("d", "delta"), "b")


def test_what_fills_a_parameter_is_checked_where_it_stands_all_at_once():
    template = weighted_sum(subtract(parameter("a"), "b"), parameter("w", "delta"), alpha=parameter("alpha"))

    with pytest.raises(RecipeError) as error:
        fill(template, {"a": subtract("a", "c"), "w": model("w.st"), "alpha": "high", "alhpa": 1})

    said = str(error.value)
    assert "the recipe has no parameter 'alhpa'. Did you mean 'alpha'?" in said
    assert "the parameter 'w' (delta) is filled with a weight: model('w.st')" in said
    assert "subtract: a: expected a weight, got the delta result of 'subtract'" in said
    assert "weighted_sum: alpha: expected a number, got 'high'" in said


def test_a_recipe_without_parameters_says_so():
    with pytest.raises(RecipeError, match=r"the recipe has no parameter 'a'\. It has no parameters\."):
        fill(slerp("a", "b"), {"a": "c"})


def test_a_parameter_needs_a_name_and_a_known_space():
    with pytest.raises(RecipeError, match="a parameter needs a name"):
        parameter("")
    with pytest.raises(RecipeError, match=r"unknown merge space 'dleta'\. Did you mean 'delta'"):
        parameter("a", "dleta")


def test_a_merge_lists_what_is_not_filled_before_it_looks_for_a_file():
    template = add_difference(
        parameter("a", "weight", "sdxl-sgm"), parameter("d", "delta"), alpha=parameter("x")
    )

    with pytest.raises(RecipeError) as error, plan([Job(weighted_sum("nowhere", template))]):
        pass

    assert str(error.value).startswith(
        "the recipe has 3 unfilled parameters: 'a' (weight, sdxl-sgm), 'd' (delta), 'x'. Fill each one: "
    )


def test_a_filled_template_is_merged():
    template = weighted_sum(parameter("a"), parameter("b"), alpha=parameter("alpha"))
    a, b = {"w": torch.zeros(2)}, {"w": torch.ones(2)}

    merged = merge(fill(template, {"a": a, "b": model(b), "alpha": literal(0.25)}))

    assert merged["w"].tolist() == [0.25, 0.25]


def test_a_deep_template_is_filled():
    node = parameter("a")
    for _ in range(2_000):
        node = weighted_sum(node, "b", alpha=0.25)

    assert parameters_of(fill(node, {"a": "a"})) == []
