"""The signature is the schema: what is wrong with a call is said before anything runs, all at once."""

import re

import pytest
import torch
from torch import Tensor

import mecha_exp
from mecha_exp import Parameter, Return, merge_method, model, reduction
from mecha_exp.errors import RecipeError
from mecha_exp.graph.literals import literal
from mecha_exp.method_api.method import Kind, is_constant, spread
from mecha_exp.method_api.parameters import Bounds
from mecha_exp.method_api.registry import all_methods, resolve_method
from mecha_exp.method_api.state_dict import Tile

A, B = "a.safetensors", "b.safetensors"


@merge_method(elementwise=True, register=False)
def blend(
    base: Parameter(Tensor, "weight"),
    *models: Parameter(Tensor, ("weight", "delta")),
    alpha: Parameter(Tensor, ge=0, lt=2) = 1.0,
    weights: Parameter(list[float]) = 1.0,
    rounds: Parameter(int, gt=0) = 1,
    exact: Parameter(bool) = False,
    mode: Parameter(str) = "mean",
    seed: Parameter(int | None) = None,
) -> Return(Tensor, "weight"):
    """Only declared, never run."""
    return base


@merge_method(register=False)
def like(a: Parameter(Tensor), b: Parameter(Tensor), *, strength: Parameter(float)) -> Return(Tensor):
    """Returns what the models are."""
    return a


def problems(call) -> str:
    with pytest.raises(RecipeError) as error:
        call()
    return str(error.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"alhpa": 1}, "blend: alhpa: there is no such argument. Did you mean 'alpha'?"),
        ({"alpha": 2}, "blend: alpha: 2 is out of range [0, 2)"),
        ({"alpha": -0.5}, "blend: alpha: -0.5 is out of range [0, 2)"),
        ({"alpha": "0.5"}, "blend: alpha: expected a number, got '0.5'"),
        ({"alpha": True}, "blend: alpha: expected a number, got True"),
        ({"alpha": float("nan")}, "blend: alpha: expected a number, got nan"),
        ({"alpha": None}, "blend: alpha: expected a number, got None"),
        ({"alpha": [0.5, "x"]}, "blend: alpha: expected a number, got a list: [0.5, 'x']"),
        ({"alpha": {"conv": 0.3, "default": 5}}, "blend: alpha: 5 is out of range [0, 2)"),
        ({"alpha": {"conv": True}}, "blend: alpha: expected a number, got True"),
        ({"weights": [0.5, "x"]}, "blend: weights: expected a number, got 'x'"),
        ({"rounds": 0}, "blend: rounds: 0 is out of range (0, inf)"),
        ({"rounds": 1.5}, "blend: rounds: expected a whole number, got 1.5"),
        ({"rounds": torch.ones(2)}, "blend: rounds: expected a whole number, got a tensor"),
        ({"rounds": model(A)}, "blend: rounds: expected a whole number, got model 'a.safetensors'"),
        ({"exact": 1}, "blend: exact: expected true or false, got 1"),
        ({"mode": 3}, "blend: mode: expected a word, got 3"),
        ({"alpha": model(A)}, "blend: alpha: expected a param, got the weight model 'a.safetensors'."),
        ({"alpha": object}, "blend: alpha: cannot use <class 'object'> of type type in a recipe."),
    ],
)
def test_a_wrong_argument_is_named_with_what_is_expected(arguments, said):
    assert said in problems(lambda: blend(A, B, **arguments))


def test_everything_that_is_wrong_is_said_at_once():
    said = problems(lambda: blend(model(A, "delta"), rounds=-1, exact="yes", sede=3))

    assert said.split("; ") == [
        "blend: sede: there is no such argument. Did you mean 'seed'?",
        "blend: base: expected a weight, got the delta model 'a.safetensors'.",
        "blend: models: at least one value is needed",
        "blend: rounds: -1 is out of range (0, inf)",
        "blend: exact: expected true or false, got 'yes'",
    ]


def test_a_call_needs_its_required_arguments_once_and_no_more():
    assert problems(lambda: like(A, strength=1)) == "like: b: it has no default and must be given"
    assert problems(lambda: like(A, B)) == "like: strength: it has no default and must be given"
    assert problems(lambda: like(A, B, 0.0, strength=0.5)) == "like: the argument 'strength' is given twice"
    assert problems(lambda: like(A, B, a=A, strength=1)) == "like: the argument 'a' is given twice"
    assert problems(lambda: blend(A, B, models=[B])) == "blend: the argument 'models' is given twice"
    assert problems(lambda: like(A, B, 0.5, 1)) == "like: takes 3 arguments at most (a, b, strength)"
    assert problems(lambda: like(A, B, strength=1, self=1)).startswith("like: self: there is no such")


def test_positional_arguments_after_the_first_models_are_models():
    assert blend(A, B, "c", "d") is blend(A, models=[B, "c", "d"])
    assert blend(base=A, models=B) is blend(A, B)


@pytest.mark.parametrize(
    ("index", "value", "said"),
    [
        (1, 0.5, "models[1]: expected a weight or delta, got the param 0.5."),
        (2, "weight", None),
        (0, None, "models[0]: expected a model, got None"),
        (0, [A, B], "models[0]: expected a model, got a list: ['a.safetensors', 'b.safetensors']"),
    ],
)
def test_each_of_many_models_is_checked(index, value, said):
    given = [A, B, B]
    given[index] = value

    if said is None:
        assert blend(A, *given).merge_space == "weight"
    else:
        assert problems(lambda: blend(A, *given)) == f"blend: {said}"


def test_models_of_a_method_that_takes_anything_share_one_merge_space():
    said = problems(lambda: like(A, model(B, "delta"), strength=1))

    assert said.startswith("like: b: the models must share one merge space, but 'a' is a weight (model")
    assert "'b' is a delta (model 'b.safetensors'). Take the difference of the weight to a base" in said
    assert like(A, B, strength=1).merge_space == "weight"
    assert like(model(A, "delta"), model(B, "delta"), strength=1).merge_space == "delta"


def test_a_number_is_no_weight_unless_it_is_said_to_be_one():
    assert "expected a weight, got the param 0.5" in problems(lambda: blend(0.5, B))
    assert blend(literal(0.5, "weight"), B).merge_space == "weight"


def test_an_optional_argument_may_be_left_out_as_none():
    assert blend(A, B, seed=None) is blend(A, B)
    assert blend(A, B, seed=3) is not blend(A, B)


def test_a_whole_number_stands_for_a_default_that_is_a_fraction():
    assert blend(A, B, alpha=1, weights=1) is blend(A, B)


@pytest.mark.parametrize(
    ("bounds", "text", "inside", "outside"),
    [
        (Bounds(), "(-inf, inf)", [-1e300, 0, 1e300], []),
        (Bounds(ge=0, le=1), "[0, 1]", [0, 0.5, 1], [-1e-9, 1.001]),
        (Bounds(gt=0, lt=1), "(0, 1)", [0.5], [0, 1]),
        (Bounds(gt=-0.5), "(-0.5, inf)", [0], [-0.5]),
        (Bounds(le=1e-6), "(-inf, 1e-06]", [1e-6], [1]),
    ],
)
def test_bounds_read_as_intervals(bounds, text, inside, outside):
    assert str(bounds) == text
    assert all(value in bounds for value in inside)
    assert not any(value in bounds for value in outside)


def test_the_decorator_reads_the_kind_and_the_signature():
    assert blend.kind is Kind.ELEMENTWISE
    assert like.kind is Kind.WHOLE
    assert like.identifier == like.__name__ == "like"
    assert like.__doc__ == "Returns what the models are."
    assert blend.signature.names == [
        "base", "models", "alpha", "weights", "rounds", "exact", "mode", "seed",
    ]  # fmt: skip
    assert [spec.is_model for spec in blend.signature.parameters][:3] == [True, True, False]
    assert blend.signature.variadic is blend.signature["models"]


def test_a_parameter_of_type_tile_is_filled_in_by_the_engine():
    @merge_method(elementwise=True, register=False)
    def placed(a: Parameter(Tensor), tile: Tile) -> Return(Tensor):
        return a

    assert placed.signature.names == ["a"]
    assert placed.signature.wants_tile == "tile"


def test_a_function_is_called_as_it_is_written():
    def scaled(a: Parameter(Tensor), alpha: Parameter(float) = 2.0) -> Return(Tensor):
        return a * alpha

    assert merge_method(register=False)(scaled).__wrapped__(torch.ones(1)) == 2


def test_models_are_not_given_as_a_list_of_tensors():
    def method(models: list[Tensor], alpha: float = 1.0) -> Tensor:
        return models[0]

    with pytest.raises(RecipeError, match=r"'models' is a list of tensors.* \*models: Parameter\(Tensor\)"):
        merge_method(method)


def test_a_parameter_needs_an_annotation_that_can_be_merged():
    with pytest.raises(RecipeError, match=re.escape("Write `b: Parameter(Tensor)`.")):

        @merge_method(register=False)
        def bare(a: Parameter(Tensor), b) -> Return(Tensor):
            return a

    with pytest.raises(RecipeError, match="'options' is of type <class 'dict'>, which is none of Tensor"):

        @merge_method(register=False)
        def rich(a: Parameter(Tensor), options: Parameter(dict)) -> Return(Tensor):
            return a

    with pytest.raises(RecipeError, match=r"'b' of 'many' takes any name"):

        @merge_method(register=False)
        def many(a: Parameter(Tensor), **b: Parameter(Tensor)) -> Return(Tensor):
            return a


def test_the_base_of_a_recipe_is_a_parameter():
    with pytest.raises(RecipeError, match="wrong: base='c' is none of its parameters"):

        @merge_method(register=False, base="c")
        def wrong(a: Parameter(Tensor)) -> Return(Tensor):
            return a


def test_the_decorator_refuses_what_has_no_meaning():
    with pytest.raises(RecipeError, match=r"one of elementwise, rowwise, not several"):
        merge_method(elementwise=True, rowwise=True)
    with pytest.raises(RecipeError, match=r"by rows gets blocks of rows: it has no sums"):
        reduction(sums=True, rowwise=True)
    with pytest.raises(RecipeError, match=r"by rank gives the entry of that rank: it has no sums"):
        reduction(sums=True, rank=lambda count: 1)
    with pytest.raises(RecipeError, match=r"unknown merge space 'weigth'\. Did you mean 'weight'"):
        Parameter(Tensor, "weigth")
    with pytest.raises(RecipeError, match=r"unknown merge space 'deltas'"):
        Return(Tensor, "deltas")


def test_a_method_is_found_by_its_name():
    @merge_method(identifier="my_blend")
    def whatever(a: Parameter(Tensor)) -> Return(Tensor):
        return a

    assert resolve_method("my_blend") is whatever
    assert mecha_exp.my_blend is whatever
    assert whatever in all_methods()
    assert repr(whatever) == "<merge method 'my_blend' (whole)>"


def test_a_name_is_taken_once():
    with pytest.raises(RecipeError) as error:

        @merge_method
        def slerp(a: Parameter(Tensor)) -> Return(Tensor):
            return a

    assert "the name 'slerp' of test_signature." in str(error.value)
    assert "is taken by mecha_exp.methods.spherical.slerp" in str(error.value)
    assert "Give another `identifier=`" in str(error.value)


def test_defining_a_function_again_replaces_it():  # as a notebook does, cell by cell
    made = []
    for _ in range(2):

        @reduction
        def total(a: Parameter(Tensor)) -> Return(Tensor, "param"):
            return a.sum()

        made.append(total)

    assert resolve_method("total") is made[1] is not made[0]


def test_an_unregistered_method_is_not_found():
    with pytest.raises(RecipeError, match="unknown merge method 'blend'"):
        resolve_method("blend")


def test_an_unknown_method_is_met_with_the_nearest():
    with pytest.raises(
        RecipeError, match=r"unknown merge method 'weighted_smu'\. Did you mean 'weighted_sum'"
    ):
        resolve_method("weighted_smu")
    with pytest.raises(AttributeError, match=r"no attribute 'slrp'.*Did you mean 'slerp'"):
        _ = mecha_exp.slrp


def test_helpers_of_composites():
    assert is_constant(literal(1), 1)
    assert is_constant(literal(1.0), 1)
    assert not is_constant(literal({"conv": 1}), 1)
    assert not is_constant(model(A), 1)
    assert spread(0.5, 3) == [0.5] * 3
    assert spread([1, 2], 2) == [1.0, 2.0]
    with pytest.raises(RecipeError, match=r"2 weights are given for 3 models\. Give one number, or 3\."):
        spread([1, 2], 3)
