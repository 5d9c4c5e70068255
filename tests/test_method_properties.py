"""What every merge method promises, tried on all that are registered; and the traps, each by name."""

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from method_cases import MERGES, METHODS, OPTIONS, applied, bound, drawn, ids
from state_dicts import StateDict, contents
from torch import Tensor

import mecha_exp as m
from mecha_exp.method_api.registry import resolve_method

SHAPES = [(), (0,), (0, 3), (1,), (1, 1), (5, 1), (1, 5), (7,), (4, 6), (6, 4), (3, 2, 3, 3), (2, 3, 1, 1)]


@pytest.mark.parametrize("method", METHODS, ids=ids)
def test_any_shape_is_merged_and_kept_and_no_input_is_written_to(method):
    models = {
        index: {f"{i}": t for i, t in enumerate(drawn(s, index, 1)[0] for s in SHAPES)} for index in range(4)
    }
    before = {index: contents(model) for index, model in models.items()}
    for key, shape in enumerate(SHAPES):
        made = applied(method, [models[index][f"{key}"] for index in range(4)])
        assert made.shape == shape
        assert made.isfinite().all(), shape
    assert {index: contents(model) for index, model in models.items()} == before


entries = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 0.5, -3.0])


@pytest.mark.parametrize("method", METHODS, ids=ids)
@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(shape=st.sampled_from([(), (1,), (3,), (4, 1), (3, 4), (2, 2, 3, 3)]), data=st.data())
def test_zeros_ties_parallel_and_opposite_tensors_give_finite_results(method, shape, data):
    size = math.prod(shape)
    models = [
        torch.tensor(data.draw(st.lists(entries, min_size=size, max_size=size)), dtype=torch.float64).reshape(
            shape
        )
        for _ in range(4)
    ]

    assert applied(method, models).isfinite().all()


NOT_ITSELF = {
    "triple_sum": "a third of each by default, rounded",
    "passthrough": "one model",
    "scale": "one delta",
    "subtract": "a difference",
    "truncate_rank": "one delta",
    "truncate_kronecker": "one delta",
    "perpendicular_component": "nothing of a is at right angles to a",
    "clamp": "bounds",
}


IDENTICAL = [
    x for x in MERGES if x.identifier not in NOT_ITSELF and x.signature.returned.spaces != ("delta",)
]


@pytest.mark.parametrize("method", IDENTICAL, ids=ids)
@pytest.mark.parametrize("shape", [(), (6, 1), (5, 7), (7, 5)], ids=str)
def test_identical_models_give_themselves(method, shape):
    (model,) = drawn(shape, 3, 1)

    torch.testing.assert_close(applied(method, [model] * 4), model, rtol=1e-7, atol=1e-7)


STRENGTHS = [
    (method, spec.name)
    for method in MERGES
    for spec in method.signature.parameters
    if spec.name == "scale" and spec.spaces == ("param",) and method.identifier != "passthrough"
]


@pytest.mark.parametrize(("method", "name"), STRENGTHS, ids=[x[0].identifier for x in STRENGTHS])
def test_strength_0_is_the_base_bit_for_bit_and_strength_is_linear(method, name):
    models = drawn((5, 7), 5)
    base = models[-1]

    once, twice = (applied(method, models, **{name: value}) for value in (0.5, 1.0))

    assert torch.equal(applied(method, models, **{name: 0.0}), base)
    torch.testing.assert_close(twice - base, 2 * (once - base), rtol=1e-9, atol=1e-9)


SYMMETRIC = [
    "n_average",
    "median",
    "geometric_median",
    "karcher",
    "multislerp",
    "linear",
    "task_arithmetic",
    "ties_sum",
    "ties_sum_extended",
    "add_difference_ties",
    "add_difference_ties_extended",
    "ties",
    "breadcrumbs",
    "breadcrumbs_ties",
    "sce",
    "ram",
    "ramplus",
    "ramplus_tl",
    "metagpt",
    "model_stock_pairwise",
    "iso_c",
    "iso_cts",
    "star",
    "tsv_m",
    "consensus",
    "elected_task_arithmetic",
    "lines",
    "wudi",
    "knots",
    "fr_merging",
    "doge",
    "pcb",
    "emr_unified",
    "localize_and_stitch",
    "lawa",
]


@pytest.mark.parametrize("name", SYMMETRIC)
def test_the_order_of_the_models_does_not_matter(name):
    *models, base = drawn((6, 9), 7)

    forward, backward = (applied(resolve_method(name), [*x, base]) for x in (models, models[::-1]))

    torch.testing.assert_close(forward, backward, rtol=1e-9, atol=1e-9)


ODD = [
    "slerp",
    "slerp_raw",
    "karcher",
    "multislerp",
    "n_average",
    "ties_sum",
    "crossover",
    "rotate",
    "truncate_rank",
]


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("factor", [-1.0, 2.0, 0.25])
def test_what_is_scaled_or_turned_round_gives_the_result_scaled_or_turned_round(name, factor):
    models = drawn((6, 9), 9)

    plain, scaled = (applied(resolve_method(name), x) for x in (models, [factor * model for model in models]))

    torch.testing.assert_close(scaled, factor * plain, rtol=1e-7, atol=1e-7)


def another_value(spec: Any) -> Any:
    """A value in range that is not the default."""
    if spec.interface is int:
        return (spec.default or 0) + 1 if spec.default not in (100,) else 3
    low = spec.bounds.ge if spec.bounds.ge is not None else spec.bounds.gt
    high = spec.bounds.le if spec.bounds.le is not None else spec.bounds.lt
    if low is None or high is None:
        return 0.3 if low is None or low < 0.3 else low
    return low + 0.3 * (high - low)


NUMBERS = [
    (method, spec)
    for method in METHODS
    for spec in method.signature.parameters
    if not spec.is_model and spec.interface in (float, int, list, torch.Tensor) and not spec.choices
]


@pytest.mark.parametrize(("method", "spec"), NUMBERS, ids=[f"{x.identifier} {s.name}" for x, s in NUMBERS])
def test_every_number_may_differ_by_key(method, spec):
    models = drawn((4, 6), 11)
    value = another_value(spec)

    by_key = applied(method, models, **{spec.name: {"w": value, "default": value}})

    assert contents({"w": by_key}) == contents({"w": applied(method, models, **{spec.name: value})})


ONE_FOR_THE_MODEL = {("emr", "task"), ("knots", "drop"), ("knots", "smallest")}
"""What decides numbers of the whole model, which values by block are an error for."""

BY_BLOCK = [
    (method, spec)
    for method, spec in NUMBERS
    if method in MERGES and (method.identifier, spec.name) not in ONE_FOR_THE_MODEL
]


@pytest.mark.parametrize(("method", "spec"), BY_BLOCK, ids=[f"{x.identifier} {s.name}" for x, s in BY_BLOCK])
def test_every_number_may_differ_by_block(method, spec):
    names = ("encoder.w", "decoder.w")
    models = [dict(zip(names, drawn((4, 6), seed, 2), strict=True)) for seed in range(20, 24)]
    value = another_value(spec)

    def merged(given: Any) -> StateDict:
        return m.merge(bound(method, models, **{spec.name: given}), options=OPTIONS)

    other = 0.5 if spec.required else spec.default
    by_block = merged({"encoder": value, "default": other})

    expected = {"encoder.w": merged(value)["encoder.w"], "decoder.w": merged(other)["decoder.w"]}
    assert contents(by_block) == contents(expected)


ENDS: list[tuple[str, dict[str, Any], int]] = [
    ("weighted_sum", {"alpha": 0}, 0),
    ("weighted_sum", {"alpha": 1}, 1),
    ("add_difference", {"alpha": 0}, 0),
    ("add_difference_ties", {"alpha": 0}, -1),
    ("add_difference_ties_extended", {"alpha": 0}, -1),
    ("add_perpendicular", {"alpha": 0}, 0),
    ("add_ties_with_dare", {"alpha": 0}, -1),
    ("add_ties_with_dare", {"probability": 1}, -1),
    ("copy_region", {"width": 0.0, "c": None}, 0),
    ("copy_region", {"width": 1.0, "c": None}, 1),
    ("crossover", {"alpha": 0}, 0),
    ("crossover", {"alpha": 1}, 1),
    ("distribution_crossover", {"alpha": 0}, 0),
    ("distribution_crossover", {"alpha": 1}, 1),
    ("dropout", {"alpha": 0}, 0),
    ("dropout", {"probability": 1}, 0),
    ("geometric_sum", {"alpha": 0}, 0),
    ("geometric_sum", {"alpha": 1}, 1),
    ("lines", {"alpha": 0, "beta": 0}, -1),
    ("multiply_quotient", {"alpha": 0}, 0),
    ("nearswap", {"t": 0}, 0),
    ("nearswap", {"t": 100}, 1),
    ("nuslerp", {"weight_b": 0, "base": None}, 0),
    ("nuslerp", {"weight_a": 0, "base": None}, 1),
    ("passthrough", {"scale": 1}, 0),
    ("rotate", {"alignment": 0, "alpha": 0, "c": None}, 0),
    ("rotate", {"alignment": 1, "alpha": 1, "c": None}, 1),
    ("similarity_add_difference", {"alpha": 0, "beta": 0}, 0),
    ("slerp", {"alpha": 0}, 0),
    ("slerp", {"alpha": 1}, 1),
    ("slerp_raw", {"alpha": 0}, 0),
    ("slerp_raw", {"alpha": 1}, 1),
    ("smooth_add", {"alpha": 0}, 0),
    ("sum_twice", {"alpha": 0, "beta": 0}, 0),
    ("sum_twice", {"alpha": 1, "beta": 0}, 1),
    ("tensor_sum", {"width": 0.0, "c": None}, 0),
    ("tensor_sum", {"width": 1.0, "c": None}, 1),
    ("top_k_tensor_sum", {"width": 0.0}, 0),
    ("train_difference", {"alpha": 0}, 0),
    ("triple_sum", {"alpha": 1, "beta": 0}, 1),
    ("weighted_subtraction", {"alpha": 0}, 0),
]


@pytest.mark.parametrize(("name", "given", "index"), ENDS)
def test_at_its_ends_a_method_gives_an_input_back_bit_for_bit(name, given, index):
    models = drawn((5, 7), 13)

    assert torch.equal(applied(resolve_method(name), models, **given), models[index])


def test_a_region_of_ranks_is_one_of_numbers_where_nan_has_a_sign():
    nan = math.nan
    a = torch.tensor([3.0, -nan, 1.0, -4.0, nan, 2.0], dtype=torch.float64)
    b = torch.arange(6.0, dtype=torch.float64)

    recipe = m.top_k_tensor_sum(m.model({"w": a}), m.model({"w": b}), width=1 / 3)
    merged: dict[str, Tensor] = {}
    m.merge_many([m.Job(recipe, merged)], m.EngineOptions(on_nonfinite="keep"))

    # the two smallest magnitudes, 1 and 2, go to the second and the third place in b's order
    expected = torch.tensor([3.0, 1.0, 2.0, -4.0, nan, 2.0], dtype=torch.float64)
    assert torch.equal(merged["w"].nan_to_num(99), expected.nan_to_num(99))
