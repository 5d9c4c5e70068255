"""A recipe in YAML becomes the graph that the same calls in Python build, or says all that is wrong."""

import pytest
import yaml

from mecha_exp import (
    add_difference_ties,
    build_recipe,
    model,
    n_average,
    parameter,
    scale,
    slerp,
    subtract,
    task_arithmetic,
    weighted_sum,
)
from mecha_exp.errors import RecipeError
from mecha_exp.recipe import deserialize


def build(text: str, **options):
    return build_recipe(yaml.safe_load(text), **options)


def problems(text: str, **options) -> list[str]:
    """The lines of the error that a text raises, without their numbers."""
    with pytest.raises(RecipeError) as error:
        build(text, **options)
    first, *rest = str(error.value).splitlines()
    if not rest:
        return [first]
    assert first == f"{len(rest)} problems:"
    return [line.partition(". ")[2] for line in rest]


def test_a_mapping_with_a_method_is_a_call():
    recipe = build("""
        method: weighted_sum
        a: a.safetensors
        b: b.safetensors
        alpha: 0.3
    """)

    assert recipe is weighted_sum("a.safetensors", "b.safetensors", alpha=0.3)


def test_calls_nest():
    recipe = build("""
        method: slerp
        a: {method: n_average, models: [a, b, {method: weighted_sum, a: a, b: c}]}
        b:
          method: weighted_sum
          a: {model: a}
          b: c
          alpha: 0.25
        alpha: 0.1
    """)

    average = n_average("a", "b", weighted_sum("a", "c"))
    assert recipe is slerp(average, weighted_sum("a", "c", alpha=0.25), alpha=0.1)


def test_a_word_is_a_model_where_a_tensor_is_expected():
    assert build("a.safetensors") is model("a.safetensors")
    assert build("{model: a.safetensors}") is model("a.safetensors")
    assert build("{model: d.safetensors, merge_space: delta}") is model("d.safetensors", "delta")


def test_a_list_fills_the_parameter_that_takes_any_number_of_models():
    assert build("{method: n_average, models: [a, b, c]}") is n_average("a", "b", "c")
    assert build("{method: n_average, models: a}") is n_average("a")
    assert build(
        "{method: add_difference_ties, base: a, models: [b, {method: subtract, a: c, b: a}], k: 0.2}"
    ) is (add_difference_ties("a", "b", subtract("c", "a"), k=0.2))


def test_a_list_of_numbers_is_a_hyperparameter():
    recipe = build("{method: task_arithmetic, base: a, models: [b, c], weights: [0.3, 0.7]}")

    assert recipe is task_arithmetic("a", "b", "c", weights=[0.3, 0.7])


def test_a_mapping_where_a_hyperparameter_is_expected_gives_it_per_key():
    patterns = {"conv1": 0.3, "fc*.bias": 0.1, "default": 0.7}
    recipe = weighted_sum("a", "b", alpha=patterns)

    assert (
        build("{method: weighted_sum, a: a, b: b, alpha: {default: 0.7, fc*.bias: 0.1, conv1: 0.3}}")
        is recipe
    )
    assert (
        build("""
        method: weighted_sum
        a: a
        b: b
        alpha:
          default: 0.7
          blocks: {conv1: 0.3, "fc*.bias": 0.1}
    """)
        is recipe
    )
    assert build("{method: weighted_sum, a: a, b: b, alpha: {default: 0.7, blocks: {}}}") is weighted_sum(
        "a", "b", alpha=0.7
    )


def test_patterns_may_look_like_numbers():
    recipe = build("{method: weighted_sum, a: a, b: b, alpha: {1: 0.3, 2.5: 0.1, default: 0}}")

    assert recipe is weighted_sum("a", "b", alpha={"1": 0.3, "2.5": 0.1, "default": 0})


def test_a_graph_that_is_built_already_stays_as_it_is():
    node = subtract("a", "b")

    assert build_recipe(node) is node
    assert build_recipe({"method": "n_average", "models": [node, node]}) is n_average(node, node)


def test_null_leaves_an_optional_argument_out():
    assert build("{method: add_difference, a: a, b: {method: subtract, a: b, b: c}, c: null}") is build(
        "{method: add_difference, a: a, b: {method: subtract, a: b, b: c}}"
    )


def test_everything_that_is_wrong_is_said_at_once_with_its_place_and_the_nearest_name():
    said = problems("""
        method: weighted_sum
        a: {method: slrp, a: x, b: y}
        b:
          method: n_average
          models:
            - {modle: a.safetensors}
            - {model: a.safetensors, merge_spcae: delta}
            - {model: b.safetensors, merge_space: dleta}
            - 7
            - {method: slerp, a: x, alhpa: 0.3}
        alpha: high
        beta: 1
    """)

    assert said == [
        "recipe.a.method: unknown merge method 'slrp'. Did you mean 'slerp' or 'nuslerp' or 'slerp_raw'? A "
        "method of your own must be loaded first: plugins=[mine.py] or --plugin mine.py.",
        "recipe.b.models[0]: expected exactly one of 'method:', 'model:', 'mecha:', 'parameter:' and "
        "'align_tokens:', got ['modle']. Did you mean 'model'?",
        "recipe.b.models[1]: unknown word 'merge_spcae'. Did you mean 'merge_space'?",
        "recipe.b.models[2]: unknown merge space 'dleta'. Did you mean 'delta'?",
        "recipe.b.models[4].alhpa: there is no such argument. Did you mean 'alpha'?",
        "recipe.b.models[4].b: it has no default and must be given",
        "recipe.b.models[3]: the models must share one merge space, but 'models[1]' is a weight "
        "(model 'a.safetensors'), 'models[3]' is a param (7)",
        "recipe.beta: there is no such argument. Known: a, alpha, b.",
        "recipe.alpha: expected a number, got 'high'",
    ]


def test_what_is_wrong_in_itself_is_not_blamed_twice():
    said = problems("{method: subtract, a: {method: nonsense_method}, b: {method: subtract, a: x}}")

    assert len(said) == 2
    assert said[0].startswith("recipe.a.method: unknown merge method 'nonsense_method'.")
    assert said[1] == "recipe.b.b: it has no default and must be given"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("3", "recipe: expected a model's path or a mapping with 'method:', got 3"),
        ("null", "recipe: expected a model's path or a mapping with 'method:', got None"),
        ("[a, b]", "recipe: expected a model's path or a mapping with 'method:', got ['a', 'b']"),
        (
            "{}",
            "recipe: expected exactly one of 'method:', 'model:', 'mecha:', 'parameter:' and "
            "'align_tokens:', got []",
        ),
        (
            "{model: a, method: slerp}",
            "recipe: expected exactly one of 'method:', 'model:', 'mecha:', 'parameter:' and 'align_tokens:'",
        ),
        (
            "{1: a}",
            "recipe: expected exactly one of 'method:', 'model:', 'mecha:', 'parameter:' and "
            "'align_tokens:', got [1]",
        ),
        ("{model: 3}", "recipe.model: expected a path, got 3"),
        ("{mecha: x.mecha}", "recipe.mecha: expected the path of a .mecha file, got 'x.mecha'"),
        ("{method: 3}", "recipe.method: unknown merge method '3'."),
        ("{method: slerp, a: a, b: b, 1: 2}", "recipe.1: there is no such argument."),
        ("{method: slerp, a: a, b: [x, y]}", "recipe.b: expected a model, got a list: ['x', 'y']"),
        ("{method: slerp, a: a, b: null}", "recipe.b: expected a model, got None"),
        ("{method: n_average, models: []}", "recipe.models: at least one value is needed"),
        ("{method: n_average, models: null}", "recipe.models[0]: expected a model, got None"),
        (
            "{method: slerp, a: a, b: {model: d, merge_space: delta}}",
            "recipe.b: the models must share one merge space, but 'a' is a weight (model 'a'), 'b' is",
        ),
        ("{method: slerp, a: a, b: b, alpha: {blocks: {c: x}}}", "recipe.alpha: expected a number, got 'x'"),
        ("{method: slerp, a: a, b: b, alpha: '0.3'}", "recipe.alpha: expected a number, got '0.3'"),
        ("{method: slerp, a: a, b: b, alpha: .nan}", "recipe.alpha: expected a number, got nan"),
        ("{method: add_difference_ties, base: a, models: [b], k: 20}", "recipe.k: 20 is out of range [0, 1]"),
        ("{method: ties_sum, deltas: [a]}", "recipe.deltas[0]: expected a delta, got the weight model 'a'."),
    ],
)
def test_a_wrong_recipe_says_what_and_where(text, said):
    assert problems(text)[0].startswith(said)


def test_the_place_can_be_named():
    with pytest.raises(RecipeError, match=r"^points\[3\]\.recipe\.a: it has no default"):
        build_recipe({"method": "slerp", "b": "b"}, where="points[3].recipe")


def test_a_text_recipe_is_loaded_by_whoever_may_open_files():
    text = 'version 0.1.0\nmerge "subtract" "a" "b"'

    recipe = build("{method: scale, a: {mecha: d.mecha}, alpha: 2}", load_text=lambda path: deserialize(text))

    assert recipe is scale(subtract("a", "b"), alpha=2)
    assert problems("{mecha: x}", load_text=lambda path: deserialize("nonsense")) == [
        "recipe: line 1: expected 'version 0.1.0', found 'nonsense'"
    ]
    assert problems("{mecha: x, pth: y}", load_text=lambda path: deserialize(text)) == [
        "recipe: unknown word 'pth'. Did you mean 'path'?"
    ]


def test_a_parameter_is_a_mapping_too():
    template = build(
        "{method: slerp, a: {parameter: a, model_config: sdxl-sgm}, b: {parameter: b, merge_space: weight}}"
    )

    assert template is slerp(parameter("a", config="sdxl-sgm"), parameter("b", "weight"))
    assert build("{model: a, model_config: sdxl-sgm}") is model("a", "sdxl-sgm")
    (said,) = problems("{parameter: a, merge_space: dleta}")
    assert said == "recipe: unknown merge space 'dleta'. Did you mean 'delta'?"
