"""Graphs of a thousand nodes, of hundreds of models, and with exponentially many paths."""

import gc
import sys
from itertools import chain, repeat

import pytest
import torch
from method_cases import OF_ADAPTERS, OF_NETWORKS, WITH_DATA
from safetensors.torch import save_file
from torch import Tensor

from mecha_exp import (
    EngineOptions,
    Parameter,
    Return,
    add_difference,
    deserialize,
    merge,
    merge_method,
    model,
    n_average,
    serialize,
    subtract,
    weighted_sum,
)  # fmt: skip
from mecha_exp.engine import Job, plan
from mecha_exp.graph.nodes import walk
from mecha_exp.method_api.method import Kind
from mecha_exp.method_api.registry import all_methods

DEPTH = 1000


def tensors(value: float) -> dict[str, Tensor]:
    return {"w": torch.full((3,), float(value)), "v": torch.full((2, 2), -float(value))}


@merge_method(register=False)
def named(a: Parameter(Tensor), **kwargs) -> Return(Tensor):
    return a + len(kwargs["key"])


def test_a_chain_of_a_thousand_merges():
    ones, node = model(tensors(1)), model(tensors(0))
    for _ in range(DEPTH):
        node = weighted_sum(node, ones, alpha=0.001)

    merged = merge(node, options=EngineOptions(compute_dtype=torch.float64))

    assert torch.allclose(merged["w"], torch.full((3,), 1 - 0.999**DEPTH), rtol=1e-6)


def test_a_chain_of_a_thousand_fallbacks_and_of_methods_that_know_the_key():
    chain, whole, node = model({"w": torch.zeros(3)}), model(tensors(2)), model(tensors(0))
    for _ in range(DEPTH):
        chain, node = chain | whole, named(node)

    assert merge(chain)["v"].unique() == -2
    assert merge(node)["w"].unique() == DEPTH


def test_a_chain_of_a_thousand_merges_as_text():
    node = model("a.safetensors")
    for i in range(DEPTH):
        node = weighted_sum(node, "b.safetensors", alpha=i / DEPTH) | "c.safetensors"

    assert deserialize(serialize(node)) is node


def test_every_merge_of_a_diamond_is_done_once():
    node = model(tensors(1))
    for _ in range(60):  # 2^60 paths
        node = n_average(node, node)

    assert len(list(walk(node))) == 61
    assert torch.equal(merge(node)["w"], torch.ones(3))


def test_two_hundred_models(tmp_path):
    paths = [tmp_path / f"{i}.safetensors" for i in range(200)]
    for i, path in enumerate(paths):
        save_file(tensors(i), path)

    assert merge(n_average(*paths))["w"].unique() == 99.5


READS_FILES = WITH_DATA | {"omit_non_finite"}
"""They take models that are read, or parts of these, and no merge; so do views."""
MERGES = [
    method
    for method in all_methods()
    if method.kind not in (Kind.FACTOR, Kind.INTERFACE, Kind.VIEW)
    and any(spec.is_model for spec in method.signature.parameters)
    and method.signature.returned.interface is not str
    and method.identifier
    not in READS_FILES | OF_NETWORKS | OF_ADAPTERS | {"omit_component", "pick_component"}
]


def linked(method, so_far, other):
    """A weight that a method makes of a merge and another model."""
    difference, rest = subtract(so_far, other), chain([so_far], repeat(other))

    def tensor(spec):
        return next(rest) if spec.spaces is None or "weight" in spec.spaces else difference

    given = {}
    for spec in method.signature.parameters:
        if spec.variadic:
            given[spec.name] = [tensor(spec), tensor(spec)]
        elif spec.is_model and spec.required:
            given[spec.name] = tensor(spec)
        elif spec.required or (spec.default in (0, 1) and not spec.choices and spec.check(0.3) is None):
            given[spec.name] = next(v for v in (0.3, *spec.choices, "float16", 1, True) if not spec.check(v))
    made, problems = method.bind(given)
    assert not problems, problems
    if made.merge_space == "param":
        return weighted_sum(so_far, other, alpha=made)
    return add_difference(other, made, alpha=0.5) if made.merge_space == "delta" else made


def chain_of(method, depth):
    recipe, other = (model({"w": torch.randn(4, 4), "v": torch.randn(3)}) for _ in range(2))
    for _ in range(depth):
        recipe = linked(method, recipe, other)
    return recipe


def calls_of_plan(method, depth):
    """How many functions the plan of a chain of merges calls."""
    recipe, calls = chain_of(method, depth), 0

    def count(frame, event, _):
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    gc.disable()  # what dies late is no work of the plan
    sys.setprofile(count)
    try:
        with plan([Job(recipe, {})]):
            pass
    finally:
        sys.setprofile(before)
        gc.enable()
    return calls


def growth_of_plan(method, depth):
    """How many more calls the second doubling of a depth costs than the first."""
    calls_of_plan(method, 3)  # what is kept for every plan
    short, middle, long = (calls_of_plan(method, n * depth) for n in (1, 2, 4))
    return (long - middle) / (middle - short)


def asks_of_the_whole_model(method):
    with plan([Job(chain_of(method, 1), {})]) as planned:
        return bool(planned.trips)


@pytest.mark.parametrize("method", MERGES, ids=lambda method: method.identifier)
def test_a_plan_grows_as_its_graph_does(method):
    if asks_of_the_whole_model(method):  # each link is a trip of its own, over all links below it
        assert growth_of_plan(method, 5) <= 4.2
    else:
        assert growth_of_plan(method, 10) <= 2.05
