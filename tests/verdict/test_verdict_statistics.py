"""Intervals and tests equal those of scipy, and have the properties that their names promise."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.verdict import Candidate, pareto_front
from mecha_exp.verdict.choice import cross_validated, minimum_detectable_difference
from mecha_exp.verdict.intervals import Resampling, percentile_bounds, student, unseen, wilson
from mecha_exp.verdict.paired_tests import holm, mcnemar, paired_p_values, sign_flips
from mecha_exp.verdict.panel import Panel
from mecha_exp.verdict.scoring import measure

PAIR = np.array([[0, 1]])


def panel(*columns: np.ndarray, clusters: np.ndarray | None = None) -> Panel:
    """The outcomes of points on one task."""
    groups = None if clusters is None else {"t": clusters}
    return Panel.of(
        [
            Candidate(f"p{i}", outcomes={"s": Outcomes({"t": c}, clusters=groups)})
            for i, c in enumerate(columns)
        ],
        "s",
    )


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_is_that_of_scipy(case: tuple[int, int]):
    successes, count = case
    low, high = wilson(successes, count)
    expected = stats.binomtest(successes, count).proportion_ci(method="wilson")

    assert (float(low), float(high)) == pytest.approx((expected.low, expected.high), abs=1e-12)


@given(st.integers(0, 300), st.integers(0, 300))
def test_mcnemar_is_the_binomial_test_of_scipy(gained: int, lost: int):
    expected = stats.binomtest(gained, gained + lost, 0.5).pvalue if gained + lost else 1.0

    assert float(mcnemar(gained, lost)) == pytest.approx(expected, rel=1e-9)


@given(st.integers(0, 2**32), st.integers(2, 400))
def test_sign_flips_of_hits_are_mcnemar(seed: int, count: int):
    hits = np.random.default_rng(seed).integers(0, 2, size=(2, count))
    gained, lost = int((hits[0] > hits[1]).sum()), int((hits[0] < hits[1]).sum())

    assert paired_p_values(panel(*hits), PAIR)[0] == pytest.approx(float(mcnemar(gained, lost)))


@given(st.integers(0, 2**32), st.integers(2, 10))
def test_few_real_differences_are_enumerated_like_scipy(seed: int, count: int):
    values = np.random.default_rng(seed).normal(size=(2, count))
    expected = stats.permutation_test(
        (values[0], values[1]), lambda a, b, axis: (a - b).sum(axis=axis), permutation_type="samples",
        vectorized=True, n_resamples=np.inf,
    )  # fmt: skip

    assert paired_p_values(panel(*values), PAIR)[0] == pytest.approx(expected.pvalue, abs=1e-12)


@pytest.mark.parametrize("shift", [0.0, 0.05, 0.12])
def test_many_real_differences_are_drawn_like_those_of_scipy(shift: float):
    values = np.random.default_rng(7).normal(size=(2, 300))
    values[0] += shift
    expected = stats.permutation_test(
        (values[0], values[1]), lambda a, b, axis: (a - b).sum(axis=axis), permutation_type="samples",
        vectorized=True, n_resamples=4999, rng=np.random.default_rng(1),
    ).pvalue  # fmt: skip

    p = paired_p_values(panel(*values), PAIR)[0]
    assert abs(p - expected) < 5 * np.sqrt(expected * (1 - expected) * (1 / 100 + 1 / 4999))


def test_clusters_are_flipped_as_wholes():
    """Ten copies of each of 8 outcomes are 8 outcomes."""
    values = np.random.default_rng(3).normal(size=(2, 8))
    copies = [np.repeat(row, 10) for row in values]
    clusters = np.repeat([f"photo {i}" for i in range(8)], 10)

    once = paired_p_values(panel(*values), PAIR)[0]
    assert paired_p_values(panel(*copies, clusters=clusters), PAIR)[0] == pytest.approx(once)
    assert paired_p_values(panel(*copies), PAIR)[0] < once / 2


@given(st.lists(st.floats(-5, 5), min_size=3, max_size=12).filter(any))
def test_the_bound_of_far_tails_is_above_the_enumerated_p_value(differences: list[float]):
    from mecha_exp.verdict.paired_tests import _enumerated, _tail_bound

    assert _tail_bound(np.array(differences)) >= _enumerated(np.array(differences)) - 1e-12


def test_a_difference_beyond_all_draws_has_the_p_value_of_the_bound():
    values = np.random.default_rng(0).normal(size=(400, 2)) * 0.1 + [1.0, 0.0]

    assert 0 < sign_flips(values, PAIR, flips=99)[0] < 1e-60


def test_p_values_of_equal_points_are_uniform_or_larger():
    """2,000 pairs without a difference, in clusters: at most 5 % (and two standard errors) below 0.05."""
    random, below = np.random.default_rng(5), 0
    for _ in range(20):
        noise = random.normal(size=(30, 101))[np.arange(90) % 30] + random.normal(size=(90, 101))
        clusters = np.array([f"c{i % 30}" for i in range(90)])
        pairs = np.array([[2 * i, 2 * i + 1] for i in range(50)])
        p = paired_p_values(panel(*noise.T, clusters=clusters), pairs, flips=499)
        below += int((p < 0.05).sum())

    assert below / 1000 < 0.05 + 2 * np.sqrt(0.05 * 0.95 / 1000)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.integers(0, 30))
def test_holm_rejects_what_the_step_down_procedure_rejects(p_values: list[float], more: int):
    family, rejected = len(p_values) + more, set()
    for rank, place in enumerate(np.argsort(p_values, kind="stable")):
        if p_values[place] * (family - rank) >= 0.05:
            break
        rejected.add(int(place))

    adjusted = holm(p_values, family)
    assert set(np.flatnonzero(adjusted < 0.05).tolist()) == rejected
    assert (adjusted >= np.array(p_values)).all() and (adjusted <= 1).all()


def test_bootstrap_intervals_agree_with_scipy():
    values = np.random.default_rng(0).exponential(size=(1, 200))
    expected = stats.bootstrap(
        (values[0],), np.mean, method="percentile", n_resamples=20_000, rng=np.random.default_rng(1)
    ).confidence_interval
    data = panel(*values)
    low, high = percentile_bounds(Resampling(data, 20_000, 0).task_means("t"), data.scores, data)

    error = stats.sem(values[0])
    assert low[0] == pytest.approx(expected.low, abs=0.12 * error)
    assert high[0] == pytest.approx(expected.high, abs=0.12 * error)


def test_resampling_by_cluster_knows_that_copies_are_not_new_information():
    values = np.random.default_rng(0).normal(size=40)
    clusters = np.repeat([f"c{i}" for i in range(40)], 25)
    drawn = Resampling(panel(np.repeat(values, 25), clusters=clusters), 2000, 0).task_means("t")

    assert drawn.std() == pytest.approx(stats.sem(values, ddof=0), rel=0.1)


def test_replicates_are_an_outer_level():
    """Two-way data: the variance of the mean is that over examples plus that over replicates."""
    random = np.random.default_rng(2)
    examples, replicates = random.normal(size=200), random.normal(size=20)
    columns = [
        Candidate("a", outcomes={"s": Outcomes({"t": examples + shift})}, replicate=str(i))
        for i, shift in enumerate(replicates)
    ]
    estimate = measure(Panel.of(columns, "s"), PAIR[:0], {}, resamples=4000, seed=0).overall[0]

    widths = [stats.norm.ppf(0.975) * stats.sem(examples), stats.t.ppf(0.975, 19) * stats.sem(replicates)]
    assert (estimate.high - estimate.low) / 2 == pytest.approx(np.hypot(*widths), rel=0.03)


def test_student_intervals_are_those_of_scipy():
    values = np.array([0.3, 0.5, 0.1, 0.7])
    expected = stats.t.interval(0.95, 3, values.mean(), stats.sem(values))

    assert student(values).ci95 == pytest.approx(expected)
    assert np.isnan(student(values[:1]).low)


@given(st.integers(1, 10_000))
def test_what_was_never_seen_has_the_upper_bound_of_clopper_and_pearson(count: int):
    expected = stats.binomtest(0, count).proportion_ci(method="exact").high

    assert unseen(count) == pytest.approx(expected, rel=1e-6)


def test_the_detectable_difference_of_one_comparison_is_that_of_the_power_formula():
    values = np.random.default_rng(0).normal(size=(2, 500))
    spread = np.std(values[0] - values[1]) / np.sqrt(500)
    expected = (stats.norm.ppf(0.975) + stats.norm.ppf(0.8)) * spread

    assert minimum_detectable_difference(panel(*values), PAIR, 1) == pytest.approx(expected, rel=0.01)
    shifted = panel(values[0] + 3, values[1])
    assert minimum_detectable_difference(shifted, PAIR, 1) == pytest.approx(expected, rel=0.01)
    assert minimum_detectable_difference(panel(values[0], values[0]), PAIR, 1) is None


def test_choosing_among_equals_is_worth_no_more_than_any_of_them():
    """The best of 50 equal points flatters by several points; its cross-validated score does not."""
    random, flattery, bias = np.random.default_rng(1), [], []
    for seed in range(60):
        columns = random.random((50, 150)) < 0.8
        data = panel(*columns)
        flattery.append(data.scores.max() - 0.8)
        bias.append(cross_validated(data, np.arange(50), "maximize", seed=seed, repeats=2) - 0.8)

    assert np.mean(flattery) > 0.05
    assert abs(np.mean(bias)) < 3 * np.std(bias) / np.sqrt(60)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
def test_the_pareto_front_is_what_nothing_dominates(points: list[tuple[int, int]]):
    front = pareto_front(
        {"accuracy": [float(a) for a, _ in points], "loss": [float(b) for _, b in points]},
        {"accuracy": "maximize", "loss": "minimize"},
    )
    for (a, b), on_front in zip(points, front, strict=True):
        assert on_front != any(c >= a and d <= b and (c > a or d < b) for c, d in points)


def test_a_point_without_a_number_is_never_on_the_front():
    assert pareto_front({"a": [float("nan"), 0.1]}, {"a": "maximize"}) == (False, True)
