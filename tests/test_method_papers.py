"""Methods that bear the name of a paper compute what the paper, or its authors' code, computes.

Each formula is written out here in plain torch, without anything of mecha_exp.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import combinations, permutations
from typing import Any

import pytest
import torch
from authors import (
    agreeing,
    disjoint_mean,
    largest,
    official_breadcrumbs,
    official_iso_c,
    official_tsv_m,
    paper_ties,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import mecha_exp as m
from mecha_exp.methods.dare import probability_by_rank
from mecha_exp.methods.reductions import whole_share

SHAPES = {"number": (), "vector": (40,), "matrix": (12, 30), "kernel": (6, 5, 3, 3), "tokens": (1, 7, 10)}
OPTIONS = m.EngineOptions(compute_dtype=torch.float64, workers=2, tile_size=64)


def drawn(seed: int, count: int = 4, shapes: dict[str, tuple[int, ...]] = SHAPES) -> list[dict[str, Tensor]]:
    """A base and experts. Values are whole sixteenths, so that some are equal, and some are zero."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            key: (torch.randn(shape, generator=generator, dtype=torch.float64) * 16).round() / 16
            for key, shape in shapes.items()
        }
        for _ in range(count)
    ]


def merged(
    method: Callable[..., m.Node], models: Sequence[dict[str, Tensor]], **given: Any
) -> dict[str, Tensor]:
    return m.merge(method(*map(m.model, models), **given), options=OPTIONS)


def task_vectors(models: Sequence[dict[str, Tensor]], key: str) -> Tensor:
    return torch.stack([expert[key] - models[0][key] for expert in models[1:]])


def check(
    method: Callable[..., m.Node], formula: Callable[[Tensor], Tensor], seed: int = 0, **given: Any
) -> None:
    models = drawn(seed)
    made = merged(method, models, scale=0.7, **given)
    for key in SHAPES:
        expected = models[0][key] + 0.7 * formula(task_vectors(models, key))
        torch.testing.assert_close(
            made[key], expected, rtol=1e-9, atol=1e-9, msg=lambda text, k=key: f"{k}: {text}"
        )


@pytest.mark.parametrize("k", ["0", "1/5", "29/100", "1/3", "9/10", "1"])
def test_ties_keeps_k_n_entries_elects_by_mass_and_takes_the_mean(k):
    share = Fraction(k)

    check(m.ties, lambda deltas: paper_ties(deltas, share), density=float(share), variant="paper")


def test_ties_elects_by_mass_where_the_signs_are_in_the_minority():
    base, one, other, third = ({"w": torch.tensor([x])} for x in (0.0, 10.0, -1.0, -1.0))

    by_mass, by_count = (
        m.merge(m.ties(base, one, other, third, variant="paper", elect=elect))["w"].item()
        for elect in (None, "count")
    )

    assert (by_mass, by_count) == (10, -1)


def test_ties_of_two_that_cancel_elects_no_sign_in_the_paper_and_plus_in_mergekit():
    base, up, down = ({"w": torch.tensor([x])} for x in (0.0, 1.0, -1.0))

    made = [m.merge(m.ties(base, up, down, variant=v))["w"].item() for v in ("paper", "mergekit")]

    assert made == [0, 1]


@pytest.mark.parametrize("k", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_ties_as_sd_mecha_is_add_difference_ties_bit_for_bit(k):
    models = drawn(3)

    made = merged(m.ties, models, density=k, scale=0.7, variant="sd-mecha")

    expected = merged(m.add_difference_ties, models, k=k, alpha=0.7)
    assert all(torch.equal(made[key], expected[key]) for key in SHAPES)


@pytest.mark.parametrize("elect", ["mass", "count"])
@pytest.mark.parametrize("combine", ["mean", "sum"])
def test_the_switches_of_ties_are_independent(elect, combine):
    def formula(deltas: Tensor) -> Tensor:
        trimmed = torch.stack([largest(d, max(int(d.numel() / 2), 1)) for d in deltas])
        votes = trimmed.sum(0) if elect == "mass" else trimmed.sign().sum(0)
        if combine == "mean":
            return disjoint_mean(trimmed, votes)
        return (trimmed * agreeing(trimmed, votes)).sum(0)

    check(m.ties, formula, density=0.5, variant="paper", elect=elect, combine=combine)


def test_entries_that_tie_at_the_edge_are_all_kept_or_all_dropped():
    base, expert = {"w": torch.zeros(6)}, {"w": torch.tensor([3.0, 1.0, -1.0, 1.0, 0.5, 0.1])}

    kept, dropped, exact = (
        m.merge(m.ties(base, expert, variant="paper", density=density, ties_kept=ties_kept))["w"].tolist()
        for density, ties_kept in ((0.5, True), (0.5, False), (4 / 6, False))
    )

    assert kept == [3, 1, -1, 1, 0, 0]
    assert dropped == [3, 0, 0, 0, 0, 0]
    assert exact == pytest.approx([3, 1, -1, 1, 0, 0])


@pytest.mark.parametrize("density", [0.0, 0.2, 1.0])
def test_without_ties_the_edge_does_not_matter(density):
    base, expert = {"w": torch.zeros(1), "v": torch.zeros(50)}, {"w": torch.ones(1), "v": torch.arange(50.0)}

    one, other = (
        m.merge(m.ties(base, expert, variant="paper", density=density, ties_kept=x)) for x in (True, False)
    )

    assert all(torch.equal(one[key], other[key]) for key in one)


@given(st.integers(0, 1000), st.integers(1, 1000), st.integers(0, 10**6))
def test_a_share_of_a_count_is_exact(part, whole, count):
    part = min(part, whole)

    assert whole_share(part / whole, count) == part * count // whole
    assert 0 <= whole_share(part / whole, count) <= count


@pytest.mark.parametrize(("variant", "combine"), [("paper", "mean"), ("mergekit", "sum")])
def test_dare_with_ties_takes_the_mean_in_the_paper_and_the_sum_in_mergekit(variant, combine):
    def formula(deltas: Tensor) -> Tensor:
        agree = agreeing(
            deltas, torch.where(deltas.sum(0) == 0, 1.0 * (variant == "mergekit"), deltas.sum(0))
        )
        count = agree.sum(0).clamp(min=1) if combine == "mean" else 1
        return (deltas * agree).sum(0) / count

    check(m.dare_ties, formula, density=1.0, variant=variant)


def test_dare_with_ties_trims_what_was_not_dropped():
    check(m.dare_ties, lambda d: paper_ties(d, Fraction(3, 10)), density=1.0, k=0.3, variant="paper")


def test_the_kept_of_dare_keep_their_expectation_and_are_averaged():
    shapes = {"w": (200_000,)}
    base, expert = {"w": torch.zeros(shapes["w"])}, {"w": torch.ones(shapes["w"])}

    made = m.merge(m.dare_ties(base, expert, expert, density=0.25, variant="paper"))["w"]

    assert set(made.unique().tolist()) == {0.0, 4.0}  # the mean of those that agree
    assert made.ne(0).float().mean().item() == pytest.approx(1 - 0.75**2, abs=0.005)


def test_dellas_window_is_epsilon_in_the_paper_and_twice_that_in_mergekit():
    row = torch.tensor([[5.0, -1.0, 3.0, 0.0, -4.0]], dtype=torch.float64)
    ascending = torch.tensor([4.0, 1.0, 2.0, 0.0, 3.0])

    paper, mergekit = (
        probability_by_rank.__wrapped__(row, density=0.4, epsilon=0.2, variant=v)[0]
        for v in ("paper", "mergekit")
    )

    dropped = (
        0.6 - 0.2 / 2 + 0.2 / 5 * (4 - ascending)
    )  # p_min + epsilon / n times the rank of the largest first
    torch.testing.assert_close(paper, (1 - dropped).double())
    torch.testing.assert_close(mergekit, (0.2 + 0.4 * ascending / 4).double())


@pytest.mark.parametrize(("variant", "most"), [("paper", "0.8"), ("mergekit", "0.4")])
def test_an_epsilon_without_probabilities_is_refused_with_the_largest_one(variant, most):
    models = [{"w": torch.ones(3)}] * 2

    with pytest.raises(m.RecipeError, match=f"Give an epsilon below {most}"):
        m.merge(m.della(*models, density=0.4, epsilon=0.9, variant=variant))


@pytest.mark.parametrize(("density", "gamma"), [(0.15, 0.01), (0.4, 0.1), (0.9, 0.3)])
def test_breadcrumbs_count_in_slices_of_the_last_axis(density, gamma):
    shapes = {"number": (), "vector": (41,), "matrix": (12, 31), "kernel": (6, 5, 3, 3)}
    generator = torch.Generator().manual_seed(0)
    models = [
        {key: torch.randn(s, generator=generator, dtype=torch.float64) for key, s in shapes.items()}
        for _ in range(4)
    ]

    made = merged(m.breadcrumbs, models, density=density, gamma=gamma, scale=0.3, variant="paper")

    for key in shapes:
        expected = models[0][key] + 0.3 * official_breadcrumbs(task_vectors(models, key), density, gamma)
        torch.testing.assert_close(made[key], expected)


def test_model_stock_is_by_layer_and_of_all_pairs():
    def formula(deltas: Tensor) -> Tensor:
        flat = deltas.reshape(len(deltas), -1)
        cosine = torch.stack([torch.cosine_similarity(a, b, 0) for a, b in combinations(flat, 2)]).mean()
        return 3 * cosine / (1 + 2 * cosine) * deltas.mean(0)

    check(m.model_stock_pairwise, formula)


@pytest.mark.parametrize("given", [{}, {"filter_wise": True}])
def test_model_stock_has_no_order(given):
    base, *experts = drawn(5)

    made = [
        merged(m.model_stock_pairwise, [base, *order], **given)["matrix"] for order in permutations(experts)
    ]

    for other in made[1:]:
        torch.testing.assert_close(other, made[0])


def test_the_stock_of_rows_has_no_order_where_all_pairs_count():
    base, *experts = drawn(5)

    made = [merged(m.n_model_stock, [base, *order], pairs="all")["matrix"] for order in permutations(experts)]
    neighbours = [merged(m.n_model_stock, [base, *order])["matrix"] for order in permutations(experts)]

    for other in made[1:]:
        torch.testing.assert_close(other, made[0])
    assert max((other - neighbours[0]).norm() for other in neighbours) > 0.1


@pytest.mark.parametrize(("method", "formula"), [(m.iso_c, official_iso_c), (m.tsv_m, official_tsv_m)])
def test_subspaces_are_those_of_matrices_and_other_tensors_get_the_mean(method, formula):
    check(method, formula)


@pytest.mark.parametrize(("method", "formula"), [(m.iso_c, official_iso_c), (m.tsv_m, official_tsv_m)])
def test_the_text_projection_of_clip_is_no_matrix_of_a_subspace(method, formula):
    models = drawn(7, shapes={"text_projection": (9, 12), "visual.proj": (9, 12)})

    made = merged(method, models)

    for key, is_matrix in (("text_projection", False), ("visual.proj", True)):
        expected = models[0][key] + formula(task_vectors(models, key), is_matrix)
        torch.testing.assert_close(made[key], expected)


def test_a_matrix_with_fewer_directions_than_tasks_stays_the_bases():
    models = drawn(8, shapes={"w": (2, 9)})

    assert torch.equal(merged(m.tsv_m, models)["w"], models[0]["w"])


@pytest.mark.parametrize("method", [m.iso_c, m.tsv_m])
def test_directions_in_which_no_task_moves_are_left_out(method):
    left, right = drawn(9, 1, {"l": (20, 2), "r": (2, 15)})[0].values()
    zeros = torch.zeros(20, 15, dtype=torch.float64)

    made = merged(method, [{"w": zeros}, {"w": left @ right}, {"w": zeros}])["w"]

    assert torch.linalg.matrix_rank(made).item() <= 2


def decaying(rows: int, columns: int, least: float) -> Tensor:
    """Singular values from 1 to `least`, in float64."""
    generator, rank = torch.Generator().manual_seed(0), min(rows, columns)
    u, v = (
        torch.linalg.qr(torch.randn(size, rank, generator=generator, dtype=torch.float64)).Q
        for size in (rows, columns)
    )
    return u * torch.logspace(0, math.log10(least), rank, dtype=torch.float64) @ v.mT


@pytest.mark.parametrize("shape", [(512, 128), (96, 640), (2100, 60)])
@pytest.mark.parametrize("least", [1.0, 1e-2, 2e-3])
def test_long_matrices_in_float32_are_within_1e_5_of_the_formula_in_float64(shape, least):
    delta = decaying(*shape, least).float()

    made = m.merge(m.iso_c({"w": torch.zeros(shape)}, {"w": delta}))["w"]

    expected = official_iso_c(delta.double()[None])
    assert (made - expected).abs().max() < 1e-5 * expected.abs().max()


def test_long_matrices_of_low_rank_have_no_directions_of_rounding_errors():
    delta = decaying(640, 3, 0.1) @ decaying(3, 100, 0.1)

    made = m.merge(m.iso_c({"w": torch.zeros(640, 100)}, {"w": delta.float()}))["w"]

    assert int((torch.linalg.svdvals(made) > 1e-6).sum()) == 3


@pytest.mark.parametrize("method", [m.iso_c, m.iso_cts, m.tsv_m, m.star])
@pytest.mark.parametrize("shape", [(640, 100), (100, 640), (64, 40)])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_has_no_singular_values_at_any_length(method, shape, value):
    deltas = [matrix.float() for matrix in (decaying(*shape, 0.1), decaying(*shape, 0.2))]
    deltas[0][3, 5] = value
    recipe = method({"w": torch.zeros(shape)}, *({"w": delta} for delta in deltas))

    with pytest.raises(m.MergeError, match=r"failed on the key 'w': _?LinAlgError"):
        m.merge(recipe, options=m.EngineOptions(on_nonfinite="keep"))


@pytest.mark.parametrize("method", [m.iso_c, m.tsv_m])
def test_task_vectors_of_zero_give_the_base(method):
    models = [drawn(10)[0]] * 3

    made = merged(method, models)

    assert all(torch.equal(made[key], models[0][key]) for key in SHAPES)


LAYERS = [f"model.layers.{i}.mlp.weight" for i in range(4)]


def test_lines_goes_linearly_over_the_layers_and_is_alpha_outside():
    keys = ["model.embed.weight", *LAYERS, "lm_head.weight"]
    base, one, other = ({key: torch.full((2, 2), x).double() for key in keys} for x in (0.0, 1.0, 2.0))

    made = merged(m.lines, [base, one, other], alpha=0.2, beta=0.6, depth="LINEAR")

    strengths = [made[key][0, 0].item() / 3 for key in keys]
    assert strengths == pytest.approx([0.2, 0.2, 0.4, 0.6, 0.8, 0.2])


@pytest.mark.parametrize("method", [m.ties, m.tsv_m, m.iso_c, m.wudi, m.pcb, m.consensus, m.metagpt])
def test_lines_scales_the_task_vector_of_any_method_by_depth(method):
    keys = ["model.embed.weight", *LAYERS, "lm_head.weight"]
    models = drawn(8, shapes=dict.fromkeys(keys, (9, 12)))

    made = merged(method, models, scale={"lm_head.*": 0.2, "default": [0.2, 0.8]})

    whole = merged(method, models, scale=1.0)
    last = len(LAYERS) - 1
    depths = {key: index / last for index, key in enumerate(LAYERS)}
    for key in keys:
        strength = 0.2 + 0.6 * depths.get(key, 0.0)
        expected = models[0][key] + strength * (whole[key] - models[0][key])
        torch.testing.assert_close(made[key], expected, msg=key)


def test_lines_without_a_depth_is_refused():
    with pytest.raises(m.RecipeError, match="depth"):
        m.lines("base.safetensors", "expert.safetensors")


def test_lines_over_the_layers_of_a_model_without_layers_is_refused():
    models = [{"w": torch.zeros(2), "v": torch.zeros(3)}] * 2

    with pytest.raises(m.MechaError, match="lies in no layer"):
        merged(m.lines, models, depth="LINEAR")


def test_ram_plus_of_a_tensor_strengthens_what_one_model_alone_changes():
    def formula(deltas: Tensor) -> Tensor:
        changed = deltas.abs() > 0.7
        users = changed.sum(0)
        total = torch.zeros_like(deltas[0])
        for delta, yes in zip(deltas, changed, strict=True):
            rho = (yes & (users > 1)).sum().double() / (yes & (users == 1)).sum().clamp(min=0.7)
            factor = torch.where(users > 1, 1 / users.double().clamp(min=1), 1 + 0.3 * rho.clamp(max=0.4))
            total += torch.where(yes, delta, 0) * factor
        return total

    check(m.ramplus_tl, formula, epsilon=0.7, r=0.3, alpha=0.4)
