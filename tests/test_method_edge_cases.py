"""Inputs at which a formula breaks down, and the parts that merge methods are made of."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from method_cases import applied, drawn, run
from state_dicts import contents

import mecha_exp as m
from mecha_exp.method_api.registry import resolve_method
from mecha_exp.methods.dropout import subset_chances
from mecha_exp.methods.slicing import region
from mecha_exp.methods.stiefel import between_frames, logarithm

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
    with pytest.raises(m.RecipeError, match="task: 2 is too high for 2 models: the first one is 0"):
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
