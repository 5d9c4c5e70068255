"""A merged network with batch normalisation has statistics that a network can have."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import mecha_exp as mx

DIFFERENCES = {
    "task_arithmetic": lambda base, *experts: mx.add_difference(base, experts[0], base, alpha=1.5),
    "ties": lambda base, *experts: mx.add_difference_ties(base, *experts, alpha=2.0),
    "dare": lambda base, *experts: mx.dare_linear(base, *experts, density=0.3, scale=1.5),
    "tsv": lambda base, *experts: mx.tsv_m(base, *experts, scale=2.0),
    "extrapolation": lambda base, *experts: mx.weighted_sum(base, experts[0], alpha=3.0),
}

MEANS = {
    "n_average": (lambda *models: mx.n_average(*models), [1 / 3] * 3),
    "linear": (lambda *models: mx.linear(*models, weights=[3.0, 2.0, 1.0]), [1 / 2, 1 / 3, 1 / 6]),
    "weighted_sum": (lambda a, b, _: mx.weighted_sum(a, b, alpha=0.25), [0.75, 0.25]),
    "slerp": (lambda a, b, _: mx.slerp(a, b, alpha=0.25), [0.75, 0.25]),
    "nested": (lambda a, b, c: mx.weighted_sum(mx.n_average(a, b), c, alpha=0.5), [0.25, 0.25, 0.5]),
}


def network(seed: int, batches: int = 3) -> nn.Sequential:
    """A network whose statistics come from data."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    for _ in range(batches):
        model(torch.randn(16, 4) * (1 + seed) + seed)
    return model.eval()


@pytest.fixture(scope="module")
def networks() -> list[dict[str, torch.Tensor]]:
    return [network(seed, batches=seed + 2).state_dict() for seed in range(3)]


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_method_of_differences_keeps_the_statistics_of_the_base(name, networks):
    merged = mx.merge(DIFFERENCES[name](*networks))

    for key in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert torch.equal(merged[key], networks[0][key])
    assert not torch.equal(merged["0.weight"], networks[0]["0.weight"])
    model = network(0)
    model.load_state_dict(merged)
    assert model(torch.randn(5, 4)).isfinite().all()


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_pools_the_statistics_with_the_weights_of_the_recipe(name, networks):
    recipe, weights = MEANS[name]

    merged = mx.merge(recipe(*networks))

    means, variances = (
        torch.stack([m[key].double() for m in networks[: len(weights)]])
        for key in ("1.running_mean", "1.running_var")
    )
    shares = torch.tensor(weights, dtype=torch.float64)[:, None]
    mean = (shares * means).sum(0)
    torch.testing.assert_close(merged["1.running_mean"], mean.float())
    variance = (shares * variances).sum(0) + (shares * (means - mean) ** 2).sum(0)
    torch.testing.assert_close(merged["1.running_var"], variance.float())
    assert (merged["1.running_var"] >= (shares * variances).sum(0).float() * 0.999).all()


def test_pooled_statistics_are_those_of_all_the_data_together():
    parts = [torch.randn(1000, 2, dtype=torch.float64) * (i + 1) + 3 * i for i in range(2)]
    models = [
        {"bn.running_mean": part.mean(0), "bn.running_var": part.var(0, unbiased=False)} for part in parts
    ]

    merged = mx.merge(mx.n_average(*models))

    together = torch.cat(parts)
    torch.testing.assert_close(merged["bn.running_mean"], together.mean(0))
    torch.testing.assert_close(merged["bn.running_var"], together.var(0, unbiased=False))


def test_the_plan_says_what_becomes_of_them(networks):
    with mx.plan([mx.Job(DIFFERENCES["ties"](*networks), {})]) as planned:
        (notice,) = planned.warnings

    assert notice == (
        "2 running statistics of normalisation layers are those of the first input: 1.running_mean, "
        "1.running_var. running_stats=pool or running_stats=merge chooses otherwise."
    )


def test_the_option_chooses(networks):
    def merged(recipe, choice):
        return mx.merge(recipe, options=mx.EngineOptions(running_stats=choice))["1.running_var"]

    a, b, _ = networks
    mean = mx.weighted_sum(a, b, alpha=0.5)
    assert torch.equal(merged(mean, "base"), a["1.running_var"])
    torch.testing.assert_close(merged(mean, "merge"), (a["1.running_var"] + b["1.running_var"]) / 2)
    base = mx.model(a)
    pooled = merged(mx.add_difference(base, b, base, alpha=1.5), "pool")
    torch.testing.assert_close(pooled, merged(mean, "pool"))
    with pytest.raises(mx.ConfigError, match=r"running_stats: unknown choice 'bse'\. Did you mean 'base'"):
        mx.EngineOptions(running_stats="bse")


@given(
    variances=st.lists(st.floats(0, 1e6, width=32), min_size=3, max_size=3),
    means=st.lists(st.floats(-1e3, 1e3, width=32), min_size=3, max_size=3),
    alpha=st.floats(-3, 3),
    choice=st.sampled_from(["auto", "base", "pool", "merge"]),
    name=st.sampled_from(sorted(DIFFERENCES.keys() - {"tsv"})),
)
def test_a_variance_is_never_negative(variances, means, alpha, choice, name):
    models = [
        {"w": torch.tensor([1.0]), "bn.running_mean": torch.tensor([m]), "bn.running_var": torch.tensor([v])}
        for v, m in zip(variances, means, strict=True)
    ]
    recipes = [DIFFERENCES[name](*models), mx.weighted_sum(models[0], models[1], alpha=alpha)]

    for recipe in recipes:
        variance = mx.merge(recipe, options=mx.EngineOptions(running_stats=choice))["bn.running_var"]
        assert variance.isfinite().all()
        assert float(variance) >= 0


def test_a_difference_of_statistics_stays_a_difference(networks):
    delta = mx.merge(mx.subtract(networks[1], networks[0]))

    assert torch.equal(delta["1.running_var"], networks[1]["1.running_var"] - networks[0]["1.running_var"])


def test_a_variance_without_a_mean_is_a_mean_of_variances():
    models = [{"n.running_var": torch.tensor([v])} for v in (1.0, 3.0)]

    assert math.isclose(float(mx.merge(mx.n_average(*models))["n.running_var"]), 2.0)
