"""The graph: equal nodes are one object, graphs of any depth are walked, values per key are unambiguous."""

import copy
import gc
import math
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mecha_exp import add_difference, literal, model, n_average, subtract, weighted_sum
from mecha_exp.errors import RecipeError
from mecha_exp.graph.literals import as_node
from mecha_exp.graph.nodes import LiteralNode, ModelNode, models_of, walk

A, B = "a.safetensors", "b.safetensors"


def test_equal_graphs_are_one_object():
    assert weighted_sum(A, B, alpha=0.3) is weighted_sum(model(A), model(B), 0.3)
    assert weighted_sum(A, B, alpha=0.3) is not weighted_sum(B, A, alpha=0.3)
    assert subtract(A, B) is not weighted_sum(A, B)
    assert model(A) is not model(A, "delta")


def test_a_default_that_is_said_and_one_that_is_left_out_are_one_recipe():
    assert weighted_sum(A, B) is weighted_sum(A, B, alpha=0.5)
    assert add_difference(A, B) is add_difference(A, B, None, alpha=1) is add_difference(A, B, alpha=1.0)
    assert add_difference(A, B, alpha=-1.0) is not add_difference(A, B)


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, 1.0), (1, True), (1.0, True), (0.0, -0.0), (0, False), ("1", 1), ((1,), (1.0,)), (0.1, 0.2)],
)
def test_values_that_python_calls_equal_and_a_merge_may_not_are_different_nodes(one, other):
    assert LiteralNode(one) is not LiteralNode(other)
    assert LiteralNode(one) is LiteralNode(one)


def test_nan_is_one_node_and_so_is_a_list_however_it_is_spelt():
    assert LiteralNode(math.nan) is LiteralNode(math.nan)
    assert LiteralNode([1.0, 2.0]) is LiteralNode((1.0, 2.0))
    assert LiteralNode(0.1) is not LiteralNode(0.1, "delta")


def test_tensors_are_one_node_by_dtype_shape_and_bits():
    ones = torch.ones(2, 3)

    assert LiteralNode(ones) is LiteralNode(torch.ones(3, 2).t())
    assert LiteralNode(ones) is not LiteralNode(torch.ones(3, 2))
    assert LiteralNode(ones) is not LiteralNode(torch.ones(2, 3, dtype=torch.float64))
    assert LiteralNode(torch.tensor([0.0])) is not LiteralNode(torch.tensor([-0.0]))
    assert LiteralNode(torch.tensor(1.0)) is not LiteralNode(torch.ones(1))


def test_an_in_memory_model_is_itself_and_no_other():
    state_dict = {"w": torch.ones(2)}
    node = model(state_dict)

    assert weighted_sum(node, B) is weighted_sum(node, B)
    assert model({"w": torch.ones(2)}) is not node


def test_copying_a_node_gives_the_node():
    node = weighted_sum(A, B)

    assert copy.copy(node) is node
    assert copy.deepcopy({"recipe": [node]})["recipe"][0] is node


def test_nodes_cannot_be_changed():
    with pytest.raises(AttributeError):
        weighted_sum(A, B).space = "delta"


def test_the_operators_are_the_algebra_of_task_vectors():
    a, b = model(A), model(B)
    delta = a - b

    assert delta is subtract(A, B)
    assert b + delta is add_difference(B, delta)
    assert a - delta is add_difference(A, delta, alpha=-1.0)
    assert 2 * delta is delta * 2
    assert b + 0.3 * (a - b) is add_difference(B, (a - b) * 0.3)
    assert a - B is delta


def test_a_sum_of_deltas_is_a_delta():
    delta = model(A) - model(B)

    assert (delta + delta).merge_space == (delta - delta).merge_space == "delta"
    assert (0.5 * (delta + delta)).merge_space == "delta"
    assert (model(A) + delta).merge_space == "weight"


def test_a_weight_cannot_be_scaled_since_only_a_difference_has_a_strength():
    with pytest.raises(RecipeError, match=r"expected a delta.*subtract\(model, base\)"):
        2 * model(A)


def test_walk_gives_every_node_once_and_children_first():
    shared = subtract(A, B)
    root = add_difference(add_difference(A, shared), shared, alpha=0.25)

    nodes = list(walk(root))

    assert len(nodes) == len(set(nodes)) == 6
    assert nodes[-1] is root
    position = {node: i for i, node in enumerate(nodes)}
    assert all(position[child] < position[node] for node in nodes for child in node.children)
    assert models_of(root) == [model(A), model(B)]


def test_a_call_names_each_of_its_children():
    call = n_average(A, B, model("c.safetensors"))

    assert [(name, child.source) for name, child in call.named_children] == [
        ("models", A),
        ("models", B),
        ("models", "c.safetensors"),
    ]
    assert call.children == tuple(child for _, child in call.named_children)


def test_a_chain_of_any_depth_is_built_walked_and_let_go():
    node = model(A)
    for i in range(5_000):
        node = weighted_sum(node, B, alpha=i + 0.25)

    assert sum(1 for _ in walk(node)) == 2 + 2 * 5_000
    del node
    gc.collect()
    assert weighted_sum(A, B, alpha=0.25).merge_space == "weight"


def test_sharing_is_free():
    node = model(A)
    for _ in range(40):  # 2 to the 40th paths
        node = n_average(node, node)

    assert sum(1 for _ in walk(node)) == 41


@given(st.floats() | st.integers() | st.booleans() | st.text())
def test_a_value_stays_what_it_is(value):
    node = literal(value)

    assert repr(node.value) == repr(value)
    assert as_node(value, model=False) is node


def test_as_node_tells_models_from_values(tmp_path):
    assert as_node(A) is model(A)
    assert as_node(tmp_path / "x.safetensors") is model(str(tmp_path / "x.safetensors"))
    assert as_node("a word", model=False) is literal("a word")
    assert isinstance(as_node({"w": torch.ones(1)}), ModelNode)
    assert as_node({"conv*": 0.3, "default": 1}) is literal({"default": 1, "conv*": 0.3})
    assert as_node(node := subtract(A, B)) is node


@pytest.mark.parametrize("value", [object(), {1, 2}, [[1, 2]], {"w": torch.ones(1), "v": 1}, 1j, b"a"])
def test_as_node_says_what_it_cannot_use_and_what_it_can(value):
    with pytest.raises(RecipeError) as error:
        as_node(value)

    assert f"of type {type(value).__name__}" in str(error.value)
    assert "Give a path, a state dict, a number" in str(error.value)


def test_an_unknown_merge_space_is_met_with_the_nearest():
    with pytest.raises(RecipeError, match=r"unknown merge space 'dleta'\. Did you mean 'delta'"):
        model(A, merge_space="dleta")


def test_a_graph_that_nobody_holds_is_forgotten():
    node = weighted_sum(A, B, alpha=0.123)
    remembered = weakref.ref(node)

    del node
    gc.collect()

    assert remembered() is None
