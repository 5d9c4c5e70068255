"""What every merge method promises, tried on all that are registered; and the traps, each by name."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from state_dicts import StateDict, contents
from torch import Tensor

import mecha_exp as m
from mecha_exp.method_api.method import MergeMethod
from mecha_exp.method_api.registry import BUILTIN_METHODS, all_methods, resolve_method
from mecha_exp.methods.dropout import subset_chances
from mecha_exp.methods.slicing import region
from mecha_exp.methods.stiefel import between_frames, logarithm

KEY_LESS = {"get_rank_from_ratio", "dot", "gram", "norm", "squared_norm", "kth_magnitude"}
KEY_LESS |= {"model_dot", "model_norm", "model_squared_norm", "model_kth_magnitude", "model_mean"}
"""Numbers of a key or of a model, which are no model by themselves."""

OF_NETWORKS = {"balance_attention", "randperm", "rebasin"}
"""Of models whose config says what layers there are: tests/test_symmetries.py."""

OF_ADAPTERS = {
    "extract_diffusers_lora",
    "extract_kohya_lokr",
    "extract_kohya_lora",
    "extract_lycoris_lokr",
    "extract_lycoris_lora",
    "lora_delta",
}
"""Of files whose keys are not those of models: tests/test_adapters.py."""

WITH_DATA = {"fisher", "regmean", "statistics", "stitch"}
"""Methods that read statistics from files: tests/calibration/test_merging_with_data.py."""

METHODS = [
    method
    for method in all_methods()
    if method.__wrapped__.__module__.startswith(BUILTIN_METHODS)
    and method.identifier not in KEY_LESS | OF_NETWORKS | OF_ADAPTERS | WITH_DATA
    and not method.__wrapped__.__module__.endswith("plumbing")
]
MASKS = [method for method in METHODS if method.signature.returned.spaces == ("param",)]
MERGES = [method for method in METHODS if method not in MASKS]
OPTIONS = m.EngineOptions(compute_dtype=torch.float64, workers=2, tile_size=32)


def bound(method: MergeMethod, models: Sequence[Tensor | StateDict], **given: Any) -> m.Node:
    """The method on models, deltas being taken to the last one."""
    nodes = [m.model(x if isinstance(x, dict) else {"w": x}) for x in models]
    base = nodes[-1]

    def fit(node: m.Node, spaces: tuple[str, ...] | None) -> m.Node:
        return m.subtract(node, base) if spaces == ("delta",) else node

    rest = nodes[:-1]
    named: dict[str, Any] = dict(given)
    for spec in method.signature.parameters:
        if spec.name in given:
            continue
        if spec.variadic:
            named[spec.name] = [fit(node, spec.spaces) for node in rest]
        elif spec.is_model and (spec.required or spec.name in ("base", "c")):
            node = base if spec.name in ("base", "c") else rest.pop(0)
            named[spec.name] = fit(node, spec.spaces)
        elif spec.required:
            named[spec.name] = 0.5
    node, problems = method.bind(named)
    assert node is not None, problems
    return node


def run(node: m.Node, options: m.EngineOptions = OPTIONS) -> Tensor:
    return m.merge(node, options=options)["w"]


def applied(method: MergeMethod, models: list[Tensor], **given: Any) -> Tensor:
    node = bound(method, models, **given)
    if method in MASKS:  # a mask is no model: here it is added to zeros, times ones
        zeros, ones = (
            m.model({"w": value}) for value in (torch.zeros_like(models[0]), torch.ones_like(models[0]))
        )
        node = m.add_difference(zeros, m.subtract(ones, zeros), alpha=node)
    return run(node)


def drawn(
    shape: tuple[int, ...], seed: int, count: int = 4, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]


def ids(method: MergeMethod) -> str:
    return method.identifier


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


# the traps


def deltas(*rows: list[float]) -> list[m.Node]:
    return [m.model({"w": torch.tensor(row, dtype=torch.float64)}, "delta") for row in rows]


def onto_zeros(name: str, *rows: list[float], **given: Any) -> list[float]:
    base = m.model({"w": torch.zeros(len(rows[0]), dtype=torch.float64)})
    return run(resolve_method(name)(base, *deltas(*rows), **given)).tolist()


def test_fewer_than_100_entries_lose_none_of_the_largest_to_gamma_of_a_hundredth():
    made = onto_zeros("breadcrumbs", [float(i) for i in range(1, 51)], density=0.8, gamma=0.01)

    assert made == [0.0] * 10 + [float(i) for i in range(11, 51)]


@pytest.mark.parametrize("name", ["ties", "breadcrumbs", "breadcrumbs_ties"])
def test_ties_in_magnitude_are_all_kept_whatever_their_order(name):
    row = [1.0, -2.0, 2.0, 2.0, -1.0, 2.0, 5.0, 0.5]
    order = [7, 2, 0, 5, 1, 6, 3, 4]

    made, moved = (onto_zeros(name, x, density=0.5) for x in (row, [row[i] for i in order]))

    assert made == [0.0, -2.0, 2.0, 2.0, 0.0, 2.0, 5.0, 0.0]
    assert moved == [made[i] for i in order]


def test_a_density_that_rounds_to_no_entry_keeps_one_in_ties_and_none_in_breadcrumbs():
    assert onto_zeros("ties", [1.0, -3.0, 2.0], density=0.1) == [0.0, -3.0, 0.0]
    assert onto_zeros("breadcrumbs", [1.0, -3.0, 2.0], density=0.1) == [0.0, 0.0, 0.0]


def test_weights_that_sum_to_zero():
    a, b = deltas([1.0, 2.0], [3.0, 5.0])

    with pytest.raises(
        m.RecipeError, match=r"linear: weights: \[1.0, -1.0\] sum to zero\. Change them, or set"
    ):
        run(m.linear(a, b, weights=[1.0, -1.0]))
    assert run(m.linear(a, b, weights=[1.0, -1.0], normalize=False)).tolist() == [-2.0, -3.0]
    assert run(m.nuslerp(a, b, weight_a=1.0, weight_b=-1.0)).isfinite().all()
    assert onto_zeros("ties", [1.0, 2.0], [3.0, 5.0], weights=[1.0, -1.0]) == [
        3.0,
        5.0,
    ]  # a zero share divides by 1


@pytest.mark.parametrize("name", ["n_model_stock", "model_stock_pairwise"])
def test_a_single_delta_is_its_own_stock(name):
    assert onto_zeros(name, [1.0, -2.0, 3.0]) == [1.0, -2.0, 3.0]


@pytest.mark.parametrize("name", ["slerp", "slerp_raw", "nuslerp", "multislerp"])
def test_antiparallel_models_have_no_arc_and_are_summed_by_weight(name):
    a, b = deltas([3.0, -4.0, 0.0], [-6.0, 8.0, 0.0])

    torch.testing.assert_close(run(resolve_method(name)(a, b)), torch.tensor([-1.5, 2.0, 0.0]).double())


def test_the_mean_on_the_sphere_of_opposites_is_one_of_them():
    a, b = deltas([3.0, -4.0], [-3.0, 4.0])

    assert run(m.karcher(a, b)).tolist() == pytest.approx([3.0, -4.0])


def test_half_precision_models_do_not_quantise_alpha():
    a, b = (torch.tensor([x], dtype=torch.bfloat16) for x in (0.0, 256.0))

    merged = m.merge(m.weighted_sum({"w": a}, {"w": b}, alpha=0.30078125 + 2**-10), dtype=torch.float32)

    assert merged["w"].item() == 77.25  # alpha in bfloat16 would be 0.30078125, and give 77


def test_where_no_quotient_is_defined_the_first_model_stays():
    a, b, c = (m.model({"w": torch.tensor(x)}) for x in ([2.0, 0.0, 3.0], [1.0, 1.0, 0.0], [0.0, 1.0, 0.0]))

    assert m.merge(m.multiply_quotient(a, b, c))["w"].tolist() == [2.0, 0.0, 3.0]


# random methods


def test_dropout_that_overlaps_in_nothing_keeps_one_model_at_most():
    ones = [[1.0] * 20_000 for _ in range(3)]

    made = torch.tensor(onto_zeros("dropout", *ones, probability=0.4, alpha=1.0, overlap=0.0, rescale=0.0))
    some = torch.tensor(onto_zeros("dropout", *ones, probability=0.4, alpha=1.0, overlap=1.0, rescale=0.0))

    assert (made != 0).double().mean().item() == pytest.approx(0.6, abs=0.02)
    assert (some != 0).double().mean().item() == pytest.approx(1 - 0.4**3, abs=0.02)


@given(
    count=st.integers(1, 5),
    probability=st.floats(0, 1),
    overlap=st.floats(-3, 3),
    emphasis=st.floats(0, 1),
)
def test_the_chances_of_what_is_kept_sum_to_one(count, probability, overlap, emphasis):
    chances = subset_chances(count, probability, overlap, emphasis)

    assert sum(chances) == pytest.approx(1)
    assert chances[0] == probability and min(chances) >= 0


def test_della_keeps_large_entries_more_often_than_small_ones():
    row = np.linspace(1, 2, 40_000).tolist()

    made = torch.tensor(onto_zeros("della_linear", row, density=0.5, epsilon=0.3, rescale=False))

    kept = (made != 0).double().reshape(4, -1).mean(1).tolist()
    assert kept == pytest.approx([0.275, 0.425, 0.575, 0.725], abs=0.02)
    with pytest.raises(m.RecipeError, match=r"Give an epsilon below 0\.2"):
        onto_zeros("della", row[:4], density=0.8, epsilon=0.25)


@pytest.mark.parametrize("name", ["dare_linear", "della_linear"])
def test_rescaling_by_l1_keeps_the_sum_of_the_magnitudes(name):
    row = np.linspace(-1, 2, 5_000).tolist()

    made = torch.tensor(onto_zeros(name, row, density=0.5, rescale="l1", seed=4))

    assert made.abs().sum().item() == pytest.approx(sum(map(abs, row)))


# what other things are made of


@given(width=st.floats(-1, 1), offset=st.floats(-3, 3), count=st.integers(1, 50))
def test_a_region_is_as_wide_as_it_says_and_wraps_around(width, offset, count):
    start, stop, outside = region(width, offset, count)

    size = stop - start
    assert 0 <= start <= count and 0 <= stop <= count
    assert (count - size if outside else size) == pytest.approx(abs(width) * count, abs=1.001)


@pytest.mark.parametrize(("rows", "columns"), [(9, 4), (7, 5), (6, 1), (40, 12)])
def test_the_logarithm_between_frames_leads_from_one_to_the_other(rows, columns):
    frame, other = (torch.linalg.qr(x).Q for x in drawn((rows, columns), 1, 2))

    way = logarithm(frame, other, eps=1e-11)

    half = between_frames(frame, way, 0.5)
    torch.testing.assert_close(between_frames(frame, way, 1.0), other, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(between_frames(frame, way, 0.0), frame)
    torch.testing.assert_close(half.mT @ half, torch.eye(columns).double())


@pytest.mark.parametrize("shape", [(8, 5), (5, 5), (4, 9)])
def test_half_a_rotation_twice_is_the_rotation(shape):
    a, b = drawn(shape, 2, 2)
    nodes = m.model({"w": a}), m.model({"w": b})
    turned = [run(m.rotate(*nodes, alignment=t, centralization=0.0)) for t in (0.0, 0.25, 0.5, 0.75, 1.0)]

    assert torch.equal(turned[0], a)
    apart = [(x - b).norm().item() for x in turned]
    assert apart == sorted(apart, reverse=True)  # nearer and nearer, of the same length
    if shape[0] >= shape[1]:
        assert [x.norm().item() for x in turned] == pytest.approx([a.norm().item()] * 5)


def test_the_best_approximation_of_a_rank_is_found_nearly_by_a_random_subspace():
    spectrum = torch.tensor([0.5**i for i in range(20)]).double()
    u, v = (torch.linalg.qr(x).Q for x in drawn((40, 20), 6, 2))
    whole = u * spectrum @ v.mT
    delta = m.model({"w": whole}, "delta")

    exact, nearly = (run(m.truncate_rank(delta, rank=5, use_approximate_basis=x)) for x in (False, True))

    assert (nearly - whole).norm() < 1.01 * (exact - whole).norm()
    torch.testing.assert_close(exact, u[:, :5] * spectrum[:5] @ v[:, :5].mT)


def test_a_rank_may_be_a_share_of_the_full_one():
    delta = m.model({"w": drawn((6, 8), 1, 1)[0]}, "delta")

    made = run(
        m.truncate_rank(delta, rank=m.get_rank_from_ratio(delta, ratio=0.5), use_approximate_basis=False)
    )

    assert torch.linalg.matrix_rank(made).item() == 3


def test_isotropic_merging_gives_all_directions_the_same_weight():
    models = drawn((6, 9), 8)

    made = applied(m.iso_c, models) - models[-1]

    sizes = torch.linalg.svdvals(made)
    torch.testing.assert_close(sizes, sizes[0].expand(6))
    total = sum(model - models[-1] for model in models[:-1])
    assert sizes[0].item() == pytest.approx(torch.linalg.svdvals(total).mean().item())


def test_task_singular_vectors_of_tasks_that_do_not_meet_are_left_as_they_are():
    u, v = torch.linalg.qr(drawn((12, 6), 1, 1)[0]).Q, torch.linalg.qr(drawn((9, 6), 2, 1)[0]).Q
    tasks = [
        u[:, 2 * i : 2 * i + 2] * torch.tensor([3.0, 1.0]).double() @ v[:, 2 * i : 2 * i + 2].mT
        for i in range(3)
    ]
    base = torch.zeros(12, 9, dtype=torch.float64)

    torch.testing.assert_close(applied(m.tsv_m, [*tasks, base]), sum(tasks))


def test_a_task_is_restored_from_the_sum_by_its_mask_and_selfish_entries_are_left_out_by_consensus():
    first, second = [4.0, 0.0, 1.0, -1.0], [0.0, 3.0, 1.0, 2.0]

    assert onto_zeros("tall_mask", first, second, task=0) == [4.0, 0.0, 2.0, 1.0]
    assert onto_zeros("tall_mask", first, second, task=1) == [0.0, 3.0, 2.0, 1.0]
    assert onto_zeros("consensus", first, second) == [0.0, 0.0, 2.0, 1.0]
    with pytest.raises(m.RecipeError, match="task: 2 is not one of the 2 models"):
        onto_zeros("tall_mask", first, second, task=2)


def test_layers_change_the_more_the_deeper_they_are():
    base = {"first": torch.zeros(2), "last": torch.zeros(2)}
    expert = {"first": torch.ones(2), "last": torch.ones(2)}

    made = m.merge(m.lines(base, expert, alpha=0.2, beta=0.6, depth={"first": 0.0, "last": 1.0}))

    assert made["first"].tolist() == pytest.approx([0.2, 0.2])
    assert made["last"].tolist() == pytest.approx([0.8, 0.8])


def test_the_running_mean_takes_the_place_of_the_weights():
    weights, mean = torch.ones(2, 3), torch.zeros(2, 3)
    model = {
        "model.in.w.weight": weights,
        "model_ema.inwweight": mean,
        "first.x": weights,
        "model.alone": mean[0, :1],
    }

    made = m.merge(m.exchange_ema(model))

    swapped = {"model.in.w.weight": mean, "model_ema.inwweight": weights}
    assert contents(made) == contents(model | swapped)


def test_keys_that_are_not_finite_are_taken_from_elsewhere():
    good = {"x": torch.ones(3), "y": torch.ones(3)}
    bad = {"x": torch.zeros(3), "y": torch.tensor([0.0, math.nan, 0.0])}

    made = m.merge(m.omit_non_finite(bad) | good)

    assert contents(made) == contents({"x": bad["x"], "y": good["y"]})
    assert m.merge(m.omit_non_finite(bad)).keys() == {"x"}
    with pytest.raises(m.MergeError, match="not finite"):  # of a model that nothing is said of
        m.merge(m.weighted_sum(m.omit_non_finite(good), bad))
    with pytest.raises(m.CheckpointError, match="lacks 1 of the 2 keys"):  # a missing key like any other
        m.merge(m.weighted_sum(m.omit_non_finite(bad), good))
    with pytest.raises(m.RecipeError, match=r"omit_non_finite: expected a model that is read, got .*sum"):
        m.merge(m.omit_non_finite(m.weighted_sum(good, bad)))
