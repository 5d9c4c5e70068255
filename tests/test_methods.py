"""Each built-in method against its formula, written out naively in float64, and what it promises besides."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from state_dicts import StateDict, contents, floating, random_model

import mecha_exp as m
from mecha_exp.method_api.registry import all_methods
from mecha_exp.random import uniforms

Array = NDArray[np.float64]


def lerp(a: Array, b: Array, t: float) -> Array:
    return (1 - t) * a + t * b


def slerp(a: Array, b: Array, t: float) -> Array:
    norm_a, norm_b = math.sqrt((a * a).sum()), math.sqrt((b * b).sum())
    if not norm_a or not norm_b:
        return lerp(a, b, t)
    omega = math.acos(max(-1, min(1, (a * b).sum() / (norm_a * norm_b))))
    if math.sin(omega) < 1e-7:
        return lerp(a, b, t)
    direction = (math.sin((1 - t) * omega) * a / norm_a + math.sin(t * omega) * b / norm_b) / math.sin(omega)
    return direction * ((1 - t) * norm_a + t * norm_b)


def sign(x: float) -> int:
    return (x > 0) - (x < 0)


def ties(deltas: list[Array], k: float, vote_sgn: bool = False) -> Array:
    trimmed = []
    for delta in deltas:
        values = delta.reshape(-1).tolist()
        threshold = sorted(map(abs, values))[max(int((1 - k) * len(values)), 1) - 1]
        trimmed.append([x if abs(x) >= threshold else 0.0 for x in values])
    merged = []
    for entries in zip(*trimmed, strict=True):
        elected = sign(sum(entries) if vote_sgn else sum(map(sign, entries)))
        agreeing = [x for x in entries if sign(x) == elected]
        merged.append(sum(agreeing) / len(agreeing) if agreeing else 0.0)
    return np.array(merged).reshape(deltas[0].shape)


def model_stock(deltas: list[Array]) -> Array:
    columns = deltas[0].shape[-1] if deltas[0].ndim else 1
    rows = []
    for row in zip(*(delta.reshape(-1, columns) for delta in deltas), strict=True):
        norms = [max(math.sqrt((r * r).sum()), 1e-6) for r in row]
        pairs = range(len(row) - 1)
        cosine = sum((row[i] * row[i + 1]).sum() / (norms[i] * norms[i + 1]) for i in pairs) / len(pairs)
        below = 1 + (len(row) - 1) * cosine
        rows.append(np.mean(row, axis=0) * (len(row) * cosine / below if abs(below) > 1e-9 else 0))
    return np.concatenate(rows).reshape(deltas[0].shape)


def perpendicular(a: Array, b: Array) -> Array:
    length = (a * a).sum()
    return b - a * ((a * b).sum() / length) if length else np.zeros_like(b)


def dropped(key: str, deltas: list[Array], density: float, seed: int, rescale: bool = True) -> list[Array]:
    kept = [uniforms(key, 0, d.size, seed, i).reshape(d.shape) < density for i, d in enumerate(deltas)]
    return [d * mask / (density if rescale else 1) for d, mask in zip(deltas, kept, strict=True)]


def mean_of_kept(key: str, deltas: list[Array], density: float, seed: int) -> Array:
    kept = [uniforms(key, 0, d.size, seed, i).reshape(d.shape) < density for i, d in enumerate(deltas)]
    return sum(d * mask for d, mask in zip(deltas, kept, strict=True)) / np.maximum(
        sum(map(np.int64, kept)), 1
    )


def agreeing(deltas: list[Array], weights: list[float]) -> Array:
    weighted = [d * w for d, w in zip(deltas, weights, strict=True)]
    positive = sum(weighted) >= 0
    return sum(np.where(d > 0, positive, ~positive) * d for d in weighted)


@dataclass
class Case:
    """A recipe over three models, and what it must give for one key."""

    recipe: Callable[[m.Node, m.Node, m.Node], m.Node]
    formula: Callable[[str, Array, Array, Array], Array]


CASES = {
    "weighted_sum": Case(
        lambda a, b, c: m.weighted_sum(a, b, alpha=0.3),
        lambda key, a, b, c: lerp(a, b, 0.3),
    ),
    "weighted_sum beyond": Case(
        lambda a, b, c: m.weighted_sum(a, b, alpha=-1.5),
        lambda key, a, b, c: lerp(a, b, -1.5),
    ),
    "n_average": Case(
        lambda a, b, c: m.n_average(a, b, c),
        lambda key, a, b, c: (a + b + c) / 3,
    ),
    "subtract": Case(
        lambda a, b, c: m.subtract(a, b),
        lambda key, a, b, c: a - b,
    ),
    "scale": Case(
        lambda a, b, c: m.scale(m.subtract(a, b), alpha=-0.7),
        lambda key, a, b, c: -0.7 * (a - b),
    ),
    "add_difference of a delta": Case(
        lambda a, b, c: m.add_difference(a, m.subtract(b, c), alpha=0.4),
        lambda key, a, b, c: a + 0.4 * (b - c),
    ),
    "add_difference": Case(
        lambda a, b, c: m.add_difference(a, b, c, alpha=0.4),
        lambda key, a, b, c: a + 0.4 * (b - c),
    ),
    "operators": Case(
        lambda a, b, c: a + 0.5 * (b - a) - 0.25 * (c - a),
        lambda key, a, b, c: a + 0.5 * (b - a) - 0.25 * (c - a),
    ),
    "task_arithmetic": Case(
        lambda a, b, c: m.task_arithmetic(a, b, c, weights=0.4),
        lambda key, a, b, c: a + 0.4 * (b - a) + 0.4 * (c - a),
    ),
    "task_arithmetic with weights": Case(
        lambda a, b, c: m.task_arithmetic(a, b, m.subtract(c, b), weights=[0.4, -2], scale=0.5),
        lambda key, a, b, c: a + 0.5 * (0.4 * (b - a) - 2 * (c - b)),
    ),
    "slerp": Case(
        lambda a, b, c: m.slerp(a, b, alpha=0.3),
        lambda key, a, b, c: slerp(a, b, 0.3),
    ),
    "slerp of deltas": Case(
        lambda a, b, c: m.slerp(m.subtract(a, c), m.subtract(b, c)),
        lambda key, a, b, c: slerp(a - c, b - c, 0.5),
    ),
    "perpendicular_component": Case(
        lambda a, b, c: m.perpendicular_component(m.subtract(a, c), m.subtract(b, c)),
        lambda key, a, b, c: perpendicular(a - c, b - c),
    ),
    "ties_sum": Case(
        lambda a, b, c: m.ties_sum(m.subtract(a, b), m.subtract(b, c), m.subtract(c, a), k=0.35),
        lambda key, a, b, c: ties([a - b, b - c, c - a], 0.35),
    ),
    "ties_sum that trims nothing": Case(
        lambda a, b, c: m.ties_sum(m.subtract(a, b), m.subtract(b, c)),
        lambda key, a, b, c: ties([a - b, b - c], 1.0),
    ),
    "ties_sum that keeps one": Case(
        lambda a, b, c: m.ties_sum(m.subtract(a, b), k=0.0),
        lambda key, a, b, c: ties([a - b], 0.0),
    ),
    "add_difference_ties": Case(
        lambda a, b, c: m.add_difference_ties(a, b, c, alpha=0.7, k=0.5),
        lambda key, a, b, c: a + 0.7 * ties([b - a, c - a], 0.5),
    ),
    "add_difference_ties by value": Case(
        lambda a, b, c: m.add_difference_ties(a, b, c, k=0.8, vote_sgn=True),
        lambda key, a, b, c: a + ties([b - a, c - a], 0.8, vote_sgn=True),
    ),
    "add_difference_ties_extended": Case(
        lambda a, b, c: m.add_difference_ties_extended(a, b, c, alpha=0.7, k=0.5, vote_sgn=True),
        lambda key, a, b, c: a + 0.7 * ties([b - a, c - a], 0.5, vote_sgn=True),
    ),
    "model_stock": Case(
        lambda a, b, c: m.model_stock(m.subtract(a, b), m.subtract(b, c), m.subtract(a, c)),
        lambda key, a, b, c: model_stock([a - b, b - c, a - c]),
    ),
    "n_model_stock": Case(
        lambda a, b, c: m.n_model_stock(a, b, c),
        lambda key, a, b, c: a + model_stock([b - a, c - a]),
    ),
    "dropout": Case(
        lambda a, b, c: m.dropout(a, b, c, probability=0.4, alpha=0.7, rescale=0.5, seed=9),
        lambda key, a, b, c: a + 0.7 * mean_of_kept(key, [b - a, c - a], 0.6, 9) / 0.6**0.5,
    ),
    "dropout_deltas": Case(
        lambda a, b, c: m.dropout_deltas(m.subtract(b, a), m.subtract(c, a), probability=0.4, seed=9),
        lambda key, a, b, c: mean_of_kept(key, [b - a, c - a], 0.6, 9) / 0.6,
    ),
    "norm": Case(
        lambda a, b, c: m.add_difference(a, m.subtract(b, c), alpha=m.norm(m.subtract(a, c))),
        lambda key, a, b, c: a + math.sqrt(((a - c) ** 2).sum()) * (b - c),
    ),
    "dare_linear": Case(
        lambda a, b, c: m.dare_linear(a, b, c, weights=[0.5, 2], density=0.3, seed=9),
        lambda key, a, b, c: a
        + sum(w * d for w, d in zip((0.5, 2), dropped(key, [b - a, c - a], 0.3, 9), strict=True)),
    ),
    "dare_linear not rescaled": Case(
        lambda a, b, c: m.dare_linear(a, b, density=0.3, rescale=False, scale=0.5),
        lambda key, a, b, c: a + 0.5 * dropped(key, [b - a], 0.3, 0, rescale=False)[0],
    ),
    "dare_ties": Case(
        lambda a, b, c: m.dare_ties(a, b, c, weights=[0.5, 2], density=0.6, scale=0.9),
        lambda key, a, b, c: a + 0.9 * agreeing(dropped(key, [b - a, c - a], 0.6, 0), [0.5, 2]),
    ),
}  # fmt: skip


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
entries = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, 3.0])


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
