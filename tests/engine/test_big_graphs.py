"""Graphs of a thousand nodes, of hundreds of models, and with exponentially many paths."""

import sys

import torch
from safetensors.torch import save_file
from torch import Tensor

from mecha_exp import (
    EngineOptions,
    Parameter,
    Return,
    deserialize,
    merge,
    merge_method,
    model,
    n_average,
    serialize,
    weighted_sum,
)  # fmt: skip
from mecha_exp.engine import Job, plan
from mecha_exp.graph.nodes import walk

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


def steps_of_plan(depth: int) -> int:
    """How many steps of Python the plan of a chain of merges takes."""
    ones, node = model(tensors(1)), model(tensors(0))
    for place in range(depth):
        node = weighted_sum(node, ones, alpha=place / DEPTH)
    steps = 0

    def count(frame, event, _):
        nonlocal steps
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        steps += event == "opcode"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        with plan([Job(node, {})]):
            pass
    finally:
        sys.settrace(before)
    return steps


def test_a_plan_grows_as_its_graph_does():
    steps_of_plan(10)  # what is kept for every plan
    short, middle, long = (steps_of_plan(depth) for depth in (50, 100, 200))

    assert long - middle <= 2.1 * (middle - short)
