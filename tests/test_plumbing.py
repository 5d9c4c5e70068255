"""Methods without arithmetic that sd-mecha's recipes may use: the dtype of a model, its device, a stack."""

import pytest
import torch
from state_dicts import contents
from torch import Tensor

import mecha_exp as m
from mecha_exp import Parameter, Return, merge_method

A = {"x": torch.ones(3, dtype=torch.bfloat16), "y": torch.ones(3)}
B = {"x": torch.zeros(3), "y": torch.zeros(3, dtype=torch.float16)}


def test_the_dtypes_of_a_model_are_those_of_a_cast_key_by_key():
    recipe = m.weighted_sum(A, B).to(dtype=m.get_dtype(B), device=m.get_device(B))

    merged = m.merge(recipe)

    assert contents(merged) == contents({"x": torch.full((3,), 0.5), "y": torch.full((3,), 0.5).half()})


def test_the_dtype_of_a_merge_is_that_of_its_first_model():
    merged = m.merge(m.weighted_sum(B, A).to(dtype=m.get_dtype(m.n_average(A, B))))

    assert {key: tensor.dtype for key, tensor in merged.items()} == {"x": torch.bfloat16, "y": torch.float32}


def test_a_recipe_with_the_dtype_of_a_model_is_read_back_from_its_text():
    recipe = m.weighted_sum("a.safetensors", "b.safetensors").to(dtype=m.get_dtype("b.safetensors"))

    assert m.deserialize(m.serialize(recipe)) is recipe


def test_a_word_is_no_number_and_no_model():
    with pytest.raises(m.RecipeError, match=r"seed: expected a whole number, got result of 'get_dtype'"):
        m.dare_linear(A, B, seed=m.get_dtype(B))
    with pytest.raises(m.RecipeError, match=r"dtype: expected a word, got result of 'norm'"):
        m.cast(A, dtype=m.norm(B))


@merge_method(register=False)
def largest(stacked: Parameter(Tensor)) -> Return(Tensor):
    """Of several tensors in one the largest entries."""
    return stacked.max(0).values


@merge_method(register=False)
def line(a: Parameter(Tensor), weights: Parameter(Tensor, "param")) -> Return(Tensor):
    """A tensor of two numbers as a hyperparameter."""
    return a * weights[0] + weights[1]


def test_a_stack_is_one_tensor_to_a_method_of_whole_tensors():
    merged = m.merge(largest(m.stack(B, A, B)), dtype=torch.float32)

    assert {key: tensor.tolist() for key, tensor in merged.items()} == {"x": [1.0] * 3, "y": [1.0] * 3}
    assert m.merge(line(A, m.stack(0.5, 2.0)))["y"].tolist() == [2.5] * 3


def test_the_plan_counts_a_stack():
    a, b = m.model(A), m.model(B)

    with m.plan([m.Job(largest(m.stack(a, b, a)), {})]) as planned:
        assert planned.whole_bytes == 4 * 3 * (2 + 3)  # two models, and three stacked


def test_a_stack_is_no_model_and_no_tile():
    with pytest.raises(m.RecipeError, match=r"stack\(values\) gives a factor for a key, not a tensor"):
        m.merge(m.stack(A, B))
    with pytest.raises(m.MergeError, match=r"works on tiles, but is given the factor stack\(values\)"):
        m.merge(m.weighted_sum(A, m.stack(A, B)))
