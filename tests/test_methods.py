"""Each built-in method against its formula, written out naively in float64, and what it promises besides."""

import math

import numpy as np
import pytest
import torch
from first_formulas import CASES, entries
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from state_dicts import StateDict, contents, floating, random_model

import mecha_exp as m
from mecha_exp.method_api.registry import all_methods


def run(recipe: m.Node, compute_dtype=torch.float32, dtype: torch.dtype | None = None) -> StateDict:
    return m.merge(recipe, options=m.EngineOptions(compute_dtype=compute_dtype, workers=1), dtype=dtype)


@pytest.mark.parametrize(("compute_dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 2e-5)])
@pytest.mark.parametrize("name", CASES)
def test_a_method_computes_its_formula(name, compute_dtype, tolerance, models):
    case, paths = CASES[name], models(3)
    arrays = [{k: t.double().numpy() for k, t in floating(random_model(i)).items()} for i in range(3)]

    merged = run(case.recipe(*map(m.model, paths)), compute_dtype, torch.float64)

    for key, (a, b, c) in ((key, [model[key] for model in arrays]) for key in arrays[0]):
        if a.size:
            expected = case.formula(key, a, b, c)
            assert merged[key].shape == a.shape
            np.testing.assert_allclose(merged[key].numpy(), expected, tolerance, tolerance, err_msg=key)


shapes = st.lists(st.integers(1, 4), max_size=4).map(tuple)


@pytest.mark.parametrize("name", [name for name in CASES if "model_stock" not in name])
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(shape=shapes, data=st.data(), dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_ties_zeros_parallel_and_opposite_tensors_are_no_exception(name, shape, data, dtype):
    size = math.prod(shape)
    a, b, c = (
        np.array(data.draw(st.lists(entries, min_size=size, max_size=size))).reshape(shape) for _ in range(3)
    )
    nodes = [m.model({"w": torch.tensor(x).to(dtype)}) for x in (a, b, c)]

    merged = run(CASES[name].recipe(*nodes), torch.float64, torch.float64)

    np.testing.assert_allclose(merged["w"].numpy(), CASES[name].formula("w", a, b, c), 1e-12, 1e-12)


A, B, C = (random_model(seed) for seed in range(3))
NODES = tuple(m.model(tensors) for tensors in (A, B, C))


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (m.weighted_sum(*NODES[:2], alpha=0), A),
        (m.weighted_sum(*NODES[:2], alpha=-0.0), A),
        (m.weighted_sum(*NODES[:2], alpha=1), B),
        (m.weighted_sum(*NODES[:2], alpha={"*": 1.0}), B),
        (m.weighted_sum(NODES[0], NODES[0], alpha=0.3), A),
        (m.slerp(*NODES[:2], alpha=0), A),
        (m.slerp(*NODES[:2], alpha=1.0), B),
        (m.n_average(NODES[0]), A),
        (m.n_average(NODES[0], NODES[0]), A),
        (m.add_difference(*NODES, alpha=0), A),
        (m.add_difference(NODES[0], NODES[1], NODES[1]), A),
        (m.task_arithmetic(*NODES, scale=0), A),
        (m.task_arithmetic(*NODES, weights=0), A),
        (m.add_difference_ties(*NODES, alpha=0), A),
        (m.add_difference_ties(NODES[0], NODES[0], NODES[0]), A),
        (m.n_model_stock(NODES[0], NODES[0], NODES[0]), A),
        (m.dare_linear(*NODES, scale=0.0), A),
        (m.dare_ties(*NODES, weights=0.0), A),
    ],
)
def test_where_nothing_is_merged_nothing_changes_not_a_bit(recipe, expected):
    assert contents(run(recipe, torch.float64)) == contents(expected)


def test_nothing_changes_in_float32_arithmetic_either_but_for_wider_inputs():
    merged = run(m.weighted_sum(*NODES[:2], alpha=1))

    assert contents(merged) == contents(B | {"double": B["double"].float().double()})


def test_a_negative_zero_stays_negative():
    zeros = m.model({"w": torch.tensor([-0.0, 0.0])})

    for recipe in (m.weighted_sum(zeros, zeros), m.n_average(zeros, zeros), m.slerp(zeros, zeros), zeros):
        assert torch.signbit(run(recipe)["w"]).tolist() == [True, False]


@pytest.mark.parametrize(
    "method",
    [m.n_average, lambda *models: m.task_arithmetic(*NODES[:1], *models),
     lambda *models: m.add_difference_ties(*NODES[:1], *models, k=0.4),
     lambda *models: m.dare_ties(*NODES[:1], *models, density=1)],
)  # fmt: skip
def test_the_order_of_equal_models_does_not_matter(method):
    others = [m.model(random_model(seed)) for seed in range(5, 8)]

    forward, backward = run(method(*others), torch.float64), run(method(*others[::-1]), torch.float64)

    for key in floating(A):
        torch.testing.assert_close(forward[key], backward[key])


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9, 1.3])
def test_slerp_is_symmetric_and_interpolates_the_norm(alpha):
    a, b = NODES[:2]

    merged = run(m.slerp(a, b, alpha=alpha), dtype=torch.float64)
    mirrored = run(m.slerp(b, a, alpha=1 - alpha), dtype=torch.float64)

    for key in ("conv.weight", "norm.scale", "proj.weight", "double"):
        torch.testing.assert_close(merged[key], mirrored[key], rtol=1e-4, atol=1e-5)
        norm = (1 - alpha) * A[key].double().norm() + alpha * B[key].double().norm()
        assert merged[key].norm().item() == pytest.approx(norm.item(), rel=1e-5)


@pytest.mark.parametrize("factor", [1.0, 3.0, 1e-3, -1.0, -0.5, 0.0])
@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.float64])
def test_slerp_of_parallel_opposite_and_zero_tensors_is_the_weighted_sum(factor, compute_dtype):
    a = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    nodes = m.model({"w": a}), m.model({"w": factor * a})

    merged = run(m.slerp(*nodes, alpha=0.3), compute_dtype)

    torch.testing.assert_close(merged["w"], (0.7 + 0.3 * factor) * a)
    assert run(m.slerp(*nodes[::-1], alpha=0.3))["w"].isfinite().all()


def test_slerp_of_orthogonal_tensors_goes_by_the_angle():
    x, y = m.model({"w": torch.tensor([1.0, 0.0])}), m.model({"w": torch.tensor([0.0, 1.0])})

    merged = run(m.slerp(x, y, alpha=1 / 3))

    torch.testing.assert_close(merged["w"], torch.tensor([math.cos(math.pi / 6), math.sin(math.pi / 6)]))


def test_ties_keep_every_entry_of_the_magnitude_of_the_last_one_kept():
    delta = m.model({"w": torch.tensor([1.0, -1.0, 1.0, 0.5, 3.0, -1.0, 0.0, 0.0, 0.0, 0.0])}, "delta")

    merged = run(m.ties_sum(delta, k=0.2))

    assert merged["w"].tolist() == [1.0, -1.0, 1.0, 0.0, 3.0, -1.0, 0.0, 0.0, 0.0, 0.0]


def test_ties_elect_by_sign_or_by_value():
    deltas = [m.model({"w": torch.tensor([x, 1.0])}, "delta") for x in (-5.0, 1.0, 2.0)]

    assert run(m.ties_sum(*deltas))["w"].tolist() == [1.5, 1.0]
    assert run(m.ties_sum(*deltas, vote_sgn=True))["w"].tolist() == [-5.0, 1.0]


def test_ties_of_opposites_is_nothing():
    up, down = (m.model({"w": torch.tensor([x, 0.0])}, "delta") for x in (1.0, -1.0))

    assert run(m.ties_sum(up, down))["w"].tolist() == [0.0, 0.0]


def test_model_stock_of_one_delta_is_that_delta():
    delta = m.subtract(*NODES[:2])

    assert contents(run(m.model_stock(delta))) == contents(run(delta))


def test_model_stock_of_one_delta_twice_is_that_delta():
    merged = run(m.n_model_stock(NODES[0], NODES[1], NODES[1]), torch.float64)

    for key in floating(A):
        torch.testing.assert_close(merged[key], B[key], rtol=1e-2 if B[key].itemsize < 4 else 1e-6, atol=1e-2)


def test_model_stock_goes_by_rows():
    first = m.model({"w": torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]])}, "delta")
    second = m.model({"w": torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [-1.0, 0.0]])}, "delta")

    merged = run(m.model_stock(first, second))

    expected = [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]  # at right angles, alike, zero, opposite
    torch.testing.assert_close(merged["w"], torch.tensor(expected))


@pytest.fixture(scope="module")
def flat() -> tuple[m.Node, list[m.Node], torch.Tensor]:
    """A base of zeros and three models that are ones and minus ones, large enough for statistics."""
    size = 40_000
    signs = torch.tensor([1.0, -1.0]).repeat(size // 2)
    return m.model({"w": torch.zeros(size)}), [m.model({"w": signs.clone()}) for _ in range(3)], signs


@pytest.mark.parametrize("density", [0.1, 0.5, 0.9])
def test_dare_keeps_the_density_the_sign_and_on_average_the_value(flat, density):
    base, models, signs = flat

    merged = run(m.dare_linear(base, models[0], density=density, seed=1))["w"]

    kept = merged != 0
    error = 5 / math.sqrt(len(signs))
    assert kept.float().mean().item() == pytest.approx(density, abs=error)
    assert torch.equal(merged[kept].sign(), signs[kept])
    torch.testing.assert_close(merged[kept], signs[kept] / density)
    assert (merged * signs).mean().item() == pytest.approx(1, abs=error / density)
    assert torch.equal(
        run(m.dare_linear(base, models[0], density=density, seed=1, rescale=False))["w"][kept], signs[kept]
    )


def test_dare_draws_for_each_model_and_seed(flat):
    base, models, signs = flat

    def kept(*chosen: m.Node, **settings) -> torch.Tensor:
        return run(m.dare_linear(base, *chosen, density=0.5, rescale=False, **settings))["w"] * signs

    both = kept(*models[:2])
    rates = [(both == count).float().mean().item() for count in range(3)]
    assert rates == pytest.approx([0.25, 0.5, 0.25], abs=0.02)
    assert torch.equal(kept(models[0]), kept(models[0], seed=0))
    agree = (kept(models[0], seed=1) == kept(models[0], seed=2)).float().mean().item()
    assert agree == pytest.approx(0.5, abs=0.02)


def test_what_a_small_density_keeps_a_larger_one_keeps_too(flat):
    base, models, _ = flat

    few, many = (run(m.dare_linear(base, models[0], density=d))["w"] != 0 for d in (0.2, 0.6))

    assert (many | ~few).all()


def test_dare_of_density_one_is_task_arithmetic():
    whole = m.task_arithmetic(*NODES, weights=[0.3, 0.6], scale=0.5)

    assert contents(run(m.dare_linear(*NODES, weights=[0.3, 0.6], density=1, scale=0.5))) == contents(
        run(whole)
    )


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (lambda: m.dare_linear("a", "b", density=0), r"density: 0 is out of range \(0, 1\]"),
        (lambda: m.dare_ties("a", "b", seed=-1), r"seed: -1 is out of range \[0, inf\)"),
        (lambda: m.ties_sum(m.subtract("a", "b"), k=1.1), r"k: 1\.1 is out of range \[0, 1\]"),
        (lambda: m.ties_sum("a"), r"expected a delta, got the weight model 'a'"),
        (lambda: m.n_model_stock("a", "b", cos_eps=-1), r"cos_eps: -1 is out of range \[0, inf\)"),
        (lambda: m.task_arithmetic("a", weights=1), r"models: at least one value is needed"),
    ],
)
def test_hyperparameters_have_ranges(bad, said):
    with pytest.raises(m.RecipeError, match=said):
        bad()


def test_every_built_in_method_says_what_it_computes():
    builtin = [x for x in all_methods() if x.__wrapped__.__module__.startswith("mecha_exp.methods")]

    assert len(builtin) > 10
    assert all(method.__doc__ for method in builtin)
