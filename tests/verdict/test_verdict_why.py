"""What moved the metric: shares of variance and values of players, against what they are by construction."""

import math
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mecha_exp.errors import EvaluationError
from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.verdict import Candidate
from mecha_exp.verdict.panel import Panel
from mecha_exp.verdict.why import (
    chance_of_keys,
    coalitions,
    effects_over_noise,
    functional_anova,
    importances,
    score_errors,
    shapley,
    variance_shares,
)
from mecha_exp.verdict.why.shapley import weights


def test_shares_of_a_plus_2b_plus_ab_are_exact():
    """On {-1, 0, 1}^2 the parts a, 2b and ab are orthogonal: their mean squares are 2/3, 8/3 and 4/9."""
    rows = list(product([-1, 0, 1], repeat=2))
    effects = functional_anova(
        {"a": [a for a, _ in rows], "b": [b for _, b in rows]}, [a + 2 * b + a * b for a, b in rows]
    )
    total = 2 / 3 + 8 / 3 + 4 / 9

    assert effects.main == pytest.approx({"a": (2 / 3) / total, "b": (8 / 3) / total}, abs=1e-12)
    assert effects.pairs == pytest.approx({("a", "b"): (4 / 9) / total}, abs=1e-12)
    assert effects.curves["b"] == pytest.approx({-1: -2, 0: 0, 1: 2})
    assert effects.variance == pytest.approx(total) and effects.rest == pytest.approx(0, abs=1e-12)


@given(st.integers(0, 2**32), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_shares_add_up_whatever_the_grid_and_its_order(seed: int, shape: list[int]):
    random = np.random.default_rng(seed)
    rows = list(product(*map(range, shape)))
    values = random.normal(size=len(rows))
    order = random.permutation(len(rows))
    keys = {f"k{i}": [rows[j][i] for j in order] for i in range(len(shape))}
    effects = functional_anova(keys, values[order].tolist())

    total = math.fsum([*effects.main.values(), *effects.pairs.values(), effects.rest])
    assert total == pytest.approx(1.0 if len(rows) > 1 else 0.0, abs=1e-9)
    assert effects.variance == pytest.approx(values.var(), abs=1e-12)


def test_replicates_of_a_grid_are_averaged():
    effects = functional_anova({"a": [0, 0, 1, 1]}, [1.0, 3.0, 5.0, 7.0])

    assert effects.mean == 4 and effects.variance == 4 and effects.main == {"a": 1}


@pytest.mark.parametrize(
    ("keys", "values", "words"),
    [
        ({"a": [0, 0, 1, 1], "b": [0, 1, 0, 0]}, [1.0] * 4, "the grid lacks a=1, b=1. Measure it"),
        ({"a": [0, 1], "b": [0, 1]}, [1.0, 2.0], "2 points cannot fill a grid of 2 x 2"),
        ({"a": [0, 1]}, [1.0, math.nan], "1 of 2 values is not finite"),
        ({"a": [0]}, [1.0, 2.0], "1 value of 'a' for 2 points"),
        ({}, [1.0], "there is no swept key"),
    ],
)
def test_what_is_not_a_grid_is_refused(keys: dict, values: list, words: str):
    with pytest.raises(EvaluationError, match=words.replace(".", r"\.")):
        functional_anova(keys, values)


@pytest.mark.heavy
def test_importances_of_drawn_points_find_the_key_that_matters():
    pytest.importorskip("sklearn")
    random = np.random.default_rng(0)
    a, b = random.random(60), random.random(60)
    found = importances({"a": a.tolist(), "b": b.tolist(), "m": ["x", "y"] * 30}, (3 * a + 0.2 * b).tolist())

    assert isinstance(found, dict) and found["a"] > 0.8 and sum(found.values()) == pytest.approx(1)


def test_importances_are_of_numbers_and_of_texts():
    pytest.importorskip("sklearn")
    found = importances({"a": [0.1, 0.2, 0.4], "m": ["x", "y", "x"]}, [1.0, 2.0, 3.0])

    assert set(found) == {"a", "m"}


def test_importances_say_why_there_are_none(monkeypatch: pytest.MonkeyPatch):
    assert importances({"a": [1, 2]}, [0.5, 0.5]) == (
        "All points have the same value: there is no variance to explain."
    )
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    assert "need Optuna" in str(importances({"a": [1, 2]}, [0.5, 0.6]))


@pytest.mark.parametrize("keep", [1.0, 0.6])
def test_shares_of_variance_are_those_that_the_data_were_drawn_with(keep: float):
    """Standard deviations 1, 2 and 1 give 1/6, 4/6 and 1/6, in balanced tables and in others."""
    random, shares = np.random.default_rng(0), []
    for _ in range(40):
        method, example = random.normal(size=30), 2 * random.normal(size=60)
        rows = [(i, j) for i in range(30) for j in range(60) if random.random() < keep]
        values = [method[i] + example[j] + random.normal() for i, j in rows]
        shares.append(
            variance_shares({"method": [i for i, _ in rows], "example": [j for _, j in rows]}, values)
        )

    means = {name: np.mean([share[name] for share in shares]) for name in shares[0]}
    assert means == pytest.approx({"method": 1 / 6, "example": 4 / 6, "residual": 1 / 6}, abs=0.03)
    assert all(sum(share.values()) == pytest.approx(1) for share in shares)


def test_shares_of_variance_of_equal_values_and_of_a_constant_factor():
    assert variance_shares({"a": [0, 1, 0, 1]}, [2.0] * 4) == {"a": 0.0, "residual": 0.0}
    assert variance_shares({"a": [0, 0, 0]}, [1.0, 2.0, 3.0]) == {"a": 0.0, "residual": 1.0}


def test_shares_of_variance_refuse_factors_that_are_one():
    with pytest.raises(EvaluationError, match=r"cannot tell \['a', 'b'\] apart\. Leave one out"):
        variance_shares({"a": [0, 0, 1, 1], "b": [5, 5, 6, 6]}, [1.0, 2.0, 3.0, 5.0])
    with pytest.raises(EvaluationError, match="2 levels of 'a' for 3 values"):
        variance_shares({"a": [0, 1]}, [1.0, 2.0, 3.0])
    with pytest.raises(EvaluationError, match="some are not finite"):
        variance_shares({"a": [0, 1]}, [1.0, math.inf])


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.integers(1, 5))
def test_shapley_values_are_the_means_over_all_orders(seed: int, count: int):
    players = [f"block {i}" for i in range(count)]
    random = np.random.default_rng(seed)
    values = {group: float(random.normal()) for group in coalitions(players)}
    expected = dict.fromkeys(players, 0.0)
    for order in permutations(players):
        for size, player in enumerate(order):
            gain = values[frozenset(order[: size + 1])] - values[frozenset(order[:size])]
            expected[player] += gain / math.factorial(count)
    result = shapley(values, players)

    assert {player: result[player].value for player in players} == pytest.approx(expected, abs=1e-9)
    assert all(math.isnan(estimate.low) for estimate in result.values())
    by_weights = weights(players, [*values]) @ np.array([*values.values()])
    assert dict(zip(players, by_weights, strict=True)) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("count", [1, 4, 10, 14])
def test_shapley_values_add_up(count: int):
    players = [f"p{i}" for i in range(count)]
    random = np.random.default_rng(count)
    values = {group: float(random.normal()) for group in coalitions(players, permutations=40)}
    total = math.fsum(estimate.value for estimate in shapley(values, players, permutations=40).values())

    assert total == pytest.approx(values[frozenset(players)] - values[frozenset()], abs=1e-9)


def test_sampled_shapley_values_hold_the_truth_in_their_intervals():
    """Twelve players with bonuses for pairs and a trio: 40 samplings against all 4,096 coalitions."""
    players, held = [f"p{i}" for i in range(12)], 0
    worth = {player: 0.01 * i for i, player in enumerate(players)}

    def value(group: frozenset[str]) -> float:
        extra = sum(0.1 for a, b in (("p1", "p2"), ("p3", "p4"), ("p5", "p6")) if {a, b} <= group)
        crowd = 0.02 * len(group) ** 1.5
        return sum(worth[p] for p in group) + extra + crowd + 0.2 * ({"p1", "p4", "p8"} <= group)

    everything = {frozenset(g): value(frozenset(g)) for g in _subsets(players)}
    exact = shapley(everything, players)
    for seed in range(40):
        values = {g: value(g) for g in coalitions(players, permutations=60, seed=seed)}
        sampled = shapley(values, players, permutations=60, seed=seed)
        held += sampled["p4"].low <= exact["p4"].value <= sampled["p4"].high

    assert held >= 33


def test_shapley_values_name_what_was_not_measured():
    with pytest.raises(EvaluationError, match=r"the coalition \['a', 'b'\] was not measured"):
        shapley({frozenset(): 0.0, frozenset("a"): 1.0, frozenset("b"): 1.0}, ["a", "b"])
    with pytest.raises(EvaluationError, match=r"the coalition \['a'\] is not finite"):
        shapley({frozenset(): 0.0, frozenset("a"): math.nan}, ["a"])
    with pytest.raises(EvaluationError, match="players need different names"):
        coalitions(["a", "a"])


def _subsets(players: list[str]) -> list[tuple[str, ...]]:
    return [
        tuple(p for p, m in zip(players, bits, strict=True) if m)
        for bits in product([0, 1], repeat=len(players))
    ]


GRID = {"a": [i for i in range(4) for _ in range(4)], "b": [j for _ in range(4) for j in range(4)]}


def noisy_grid(seed: int, effect: float = 0.0):
    """A 4 x 4 grid of hits on 300 examples, whose accuracy moves with the first key alone."""
    random = np.random.default_rng(seed)
    bars = 1 + effect * np.array(GRID["a"])
    latent = 0.9 * random.normal(size=(300, 1)) + 0.44 * random.normal(size=(300, 16))
    hits = (latent < bars).astype(float)
    panel = Panel.of(
        [Candidate(f"p{i}", outcomes={"s": Outcomes({"t": hits[:, i]})}) for i in range(16)], "s"
    )
    return effects_over_noise(GRID, panel.scores.tolist(), score_errors(panel, draws=400))


def test_noise_alone_is_seldom_shown_as_an_effect():
    """Before, a null grid had 71 % of interaction without a word."""
    told = [not noisy_grid(seed).nothing_told for seed in range(100)]

    assert np.mean(told) <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / 100)


def test_an_effect_beyond_noise_keeps_its_share_and_its_curve():
    held = []
    for seed in range(60):
        effects = noisy_grid(seed, effect=0.2)
        assert effects.p_values["a",] < 0.05
        assert effects.shares["a",].value > 0.9 and sum(
            s.value for s in effects.shares.values()
        ) == pytest.approx(1)
        truth = np.array([_ndtr(bar / np.hypot(0.9, 0.44)) for bar in 1 + 0.2 * np.arange(4)])
        held += [
            e.low <= t <= e.high
            for e, t in zip(effects.curves["a"].values(), truth - truth.mean(), strict=True)
        ]

    assert np.mean(held) > 0.88


def _ndtr(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def test_replicates_are_noise_of_effects_too():
    random = np.random.default_rng(0)
    seeds = random.normal(size=(2, 5)) * 0.5
    points = [
        Candidate(
            f"p{i}", outcomes={"s": Outcomes({"t": np.linspace(0, 1, 50) + shift})}, replicate=f"seed={r}"
        )
        for i, row in enumerate(seeds)
        for r, shift in enumerate(row)
    ]
    errors = score_errors(Panel.of(points, "s"), draws=4000)

    assert errors.std(axis=0) == pytest.approx(
        np.hypot(seeds.std(axis=1, ddof=1) / np.sqrt(5), 0.0412), rel=0.1
    )


def test_drawn_keys_that_do_nothing_are_seldom_told_from_chance():
    random = np.random.default_rng(0)
    least = [
        min(
            chance_of_keys(
                {"a": random.random(24).tolist(), "m": ["x", "y", "z"] * 8},
                random.random(24).tolist(),
                permutations=99,
            ).values()
        )
        for _ in range(200)
    ]

    assert np.mean(np.array(least) < 0.05) <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / 200)


def test_drawn_keys_that_matter_are_told_from_chance_and_others_are_not():
    random = np.random.default_rng(1)
    a, b = random.random(40), random.random(40)
    p = chance_of_keys({"a": a.tolist(), "b": b.tolist()}, ((a - 0.5) ** 2).tolist())

    assert p["a"] < 0.05 < p["b"]
