"""What verdicts claim beside tests: detectable differences, few or skewed outcomes, the choice, inputs."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from verdict_cases import one, panel
from verdict_claims import COMPARED, Sampled, found, held, printed

from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.verdict import Candidate, as_json, conclude, sentence
from mecha_exp.verdict.choice import LEVEL, minimum_detectable_difference
from mecha_exp.verdict.intervals import percentile_bounds, widened
from mecha_exp.verdict.paired_tests import detectable_difference, sign_flips, skewness

PAIR = np.array([[0, 1]])
QUICK = {"metric": "accuracy", "resamples": 200, "flips": 199}


@pytest.mark.heavy
@pytest.mark.parametrize("kind", COMPARED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("against", ["base", None])
def test_aprinted_difference_isfound_in_four_of_five_sweeps(kind, against: str | None):
    """The one number that was printed was found in 11 to 54 % of sweeps between settings."""
    random, smallest = np.random.default_rng(0), 0.08 if kind.binary else 0.2
    for _ in range(3):
        smallest = np.mean([printed(kind.conclude(random, smallest), against) for _ in range(10)])
    hits = [found(kind.conclude(random, float(smallest)), against or "p0") for _ in range(100)]
    share = np.mean([hit for hit in hits if hit is not None])

    assert 0.75 - 2 * 0.04 <= share <= 0.85 + 2 * 0.04


def test_detectable_differences_are_named_by_what_they_are_of():
    random = np.random.default_rng(0)
    hits = random.random((5, 300)) < [[0.9], [0.7], [0.7], [0.7], [0.8]]
    both = [replace(one(f"p{i}", row), outcomes={s: Outcomes({"t": row}) for s in ("validation", "test")})
            for i, row in enumerate(hits)]  # fmt: skip
    points = [*both[:1], *(one(f"p{i}", hits[i]) for i in range(1, 4))]
    result = conclude(points, inputs=[replace(both[4], name="base")], base="base", **QUICK)

    of_base, between = result.cost.detectable
    assert (of_base.against, of_base.split) == ("base", "test")
    assert (between.against, between.split) == (None, "validation")
    assert between.difference > of_base.difference
    said = (
        f"differences from 'base' below {of_base.difference:.4g} and between settings on 'validation' below "
    )
    assert said in sentence(result)
    assert [d["against"] for d in as_json(result)["detectable"]] == ["base", None]


def test_settings_of_one_recipe_without_a_base_have_a_detectable_difference():
    hits = np.random.default_rng(1).random((3, 300)) < 0.7
    result = conclude([one(f"p{i}", row) for i, row in enumerate(hits)], **QUICK)

    assert [d.against for d in result.cost.detectable] == [None]
    assert "differences between settings below" in sentence(result)


def test_no_detectable_difference_exceeds_what_hits_can_differ_by():
    """Accuracy over five examples once had differences below 1.072."""
    rows = np.array([[1, 1, 1, 1, 0], [1, 0, 1, 0, 1], [0, 1, 0, 1, 1]])
    result = conclude([one(f"p{i}", row) for i, row in enumerate(rows)], **QUICK)

    assert all(math.isinf(d.difference) for d in result.cost.detectable)
    assert "any difference between settings would often be missed" in sentence(result)
    assert as_json(result)["detectable"][0]["difference"] is None


def test_a_large_difference_does_not_make_the_detectable_one_larger():
    random = np.random.default_rng(2)
    values = random.normal(size=(2, 400))
    near, far = panel(*values), panel(values[0] + 5, values[1])

    small, large = (detectable_difference(p, 0, 1, level=0.01, power=0.8) for p in (near, far))
    assert small == pytest.approx(large, rel=1e-6)


def test_the_detectable_difference_of_hits_needs_one_example_more():
    random = np.random.default_rng(3)
    hits = (random.random((2, 500)) < 0.7).astype(float)
    d = detectable_difference(panel(*hits), 0, 1, level=0.01, power=0.8)
    spread = (hits[0] - hits[1]).std() / math.sqrt(500)

    needed = stats.norm.ppf(0.995) * math.sqrt(spread**2 + d * d / 500) + stats.norm.ppf(0.8) * spread
    assert d == pytest.approx(needed + 1 / 500, rel=1e-6)


def test_a_share_of_the_level_needs_a_larger_difference():
    values = np.random.default_rng(4).normal(size=(2, 300))
    whole, half, tenth = (
        minimum_detectable_difference(panel(*values), PAIR, 1, share) for share in (1.0, 0.5, 0.1)
    )
    error = np.std(values[0] - values[1]) / math.sqrt(300)

    assert whole < half < tenth
    for share, d in ((0.5, half), (0.1, tenth)):
        quantiles = stats.norm.ppf(1 - LEVEL * share / 2) + stats.norm.ppf(0.8)
        assert d == pytest.approx(quantiles * error, rel=0.02)


def test_p_values_of_drawn_signs_count_the_observed_one():
    """Where no draw exceeds, p is 1 / (draws + 1) and never 0."""
    noise = np.random.default_rng(5).normal(size=40)
    differences = noise - noise.mean() + 2.1 * noise.std() / math.sqrt(40)
    columns = np.stack([differences, np.zeros(40)], axis=1)
    p_values = [float(sign_flips(columns, PAIR, flips=9, seed=seed)[0]) for seed in range(20)]

    assert min(p_values) == pytest.approx(0.1)
    assert [10 * p for p in p_values] == pytest.approx([round(10 * p) for p in p_values])


def test_where_all_are_misses_the_upper_bound_is_that_of_what_was_not_seen():
    low, high = widened((np.zeros(2), np.array([0.0, 0.4])), np.array([0.0, 0.3]), True, 30)

    assert high == pytest.approx([1 - 0.025 ** (1 / 30), 0.4]) and list(low) == [0, 0]


@pytest.mark.parametrize("count", [5, 10, 20])
def test_bootstrap_intervals_of_few_normal_outcomes_hold(count: int):
    """They held in 83, 90 and 92 %."""
    _, score, difference, *_ = held(Sampled("", count), 250)

    assert min(float(score), float(difference)) >= 95 - 100 * 2.6 * math.sqrt(0.05 * 0.95 / 250)


def test_bootstrap_intervals_are_widened_by_student_and_by_what_draws_lack():
    values = np.random.default_rng(6).normal(size=12)
    data = panel(values)
    draws = np.linspace(-1, 1, 4001)[:, None]
    low, high = percentile_bounds(draws, np.zeros(1), data)

    factor = stats.t.ppf(0.975, 11) / stats.norm.ppf(0.975) * math.sqrt(12 / 11)
    assert (-low[0], high[0]) == pytest.approx((0.95 * factor, 0.95 * factor))


def test_unequal_clusters_count_by_what_they_tell():
    sizes = [1] * 30 + [5] * 6 + [20] * 3 + [40]
    clusters = np.repeat([f"c{i}" for i in range(len(sizes))], sizes)
    data = panel(np.random.default_rng(7).normal(size=len(clusters)), clusters=clusters)

    assert data.effective_clusters == pytest.approx(sum(sizes) ** 2 / sum(n * n for n in sizes))
    equal = panel(np.arange(40.0))
    assert equal.effective_clusters == pytest.approx(40)


def test_few_examples_are_noted_by_what_they_tell():
    values = np.random.default_rng(8).exponential(size=(2, 160))
    sizes = [1] * 30 + [5] * 6 + [20] * 3 + [40]
    clusters = {"t": np.repeat([f"c{i}" for i in range(40)], sizes)}
    points = [Candidate(f"p{i}", outcomes={"s": Outcomes({"t": row}, clusters=clusters)})
              for i, row in enumerate(values)]  # fmt: skip
    few = conclude(points, splits=("s",), **QUICK)
    many = conclude([one(f"p{i}", row) for i, row in enumerate(values)], **QUICK)

    assert any("tell as much as 9 independent ones" in note for note in few.notes)
    assert not any("independent ones" in note for note in many.notes)


def test_strongly_skewed_differences_are_noted_where_they_are_few():
    """A point that is a little better on nine of ten examples, and much worse on the tenth."""
    random = np.random.default_rng(9)
    base = random.normal(size=60)
    change = np.where(np.arange(60) % 10 == 0, 1.8, -0.2) + 0.01 * random.normal(size=60)
    losses = [one("p0", base), one("p1", base + change)]
    result = conclude(losses, direction="minimize", **QUICK)
    even = conclude(
        [one("p0", base), one("p1", base + random.normal(size=60))], direction="minimize", **QUICK
    )

    assert abs(skewness(panel(base), change / 60)) == pytest.approx(
        stats.skew(change) / math.sqrt(60), rel=1e-6
    )
    assert any("strongly skewed" in note for note in result.notes)
    assert not any("skewed for" in note for note in even.notes)


def test_strongly_skewed_outcomes_are_noted():
    normal, skewed = np.random.default_rng(16).normal(size=(2, 200))
    said = [" ".join(conclude([one("p", v)], **QUICK).notes) for v in (normal, np.exp(1.5 * skewed))]

    assert "strongly skewed" not in said[0] and "strongly skewed for so few examples" in said[1]


def test_one_split_says_the_cross_validated_score_and_counts_the_choice():
    hits = np.random.default_rng(10).random((50, 150)) < 0.8
    result = conclude([one(f"p{i}", row) for i, row in enumerate(hits)], **QUICK)

    alone = result.score(result.selected.point).overall
    assert result.covers == ("examples", "choice") and "150 examples and the choice)" in sentence(result)
    assert f"on the same data ({result.cost.cross_validated:.4g} cross-validated)" in sentence(result)
    ratio = stats.norm.ppf(1 - 0.025 / 50) / stats.norm.ppf(0.975)
    assert alone.value - result.selected.overall.low == pytest.approx(ratio * (alone.value - alone.low))
    assert result.selected.overall.high == alone.high


def test_the_choice_among_losses_widens_upwards():
    losses = np.random.default_rng(11).normal(size=(20, 100))
    result = conclude([one(f"p{i}", row) for i, row in enumerate(losses)], direction="minimize", **QUICK)
    alone = result.score(result.selected.point).overall

    assert result.selected.overall.low == alone.low and result.selected.overall.high > alone.high


def test_a_test_split_needs_no_wider_interval():
    hits = np.random.default_rng(12).random((2, 2, 200)) < 0.8
    points = [Candidate(f"p{i}", outcomes={"validation": Outcomes({"t": a}), "test": Outcomes({"t": b})})
              for i, (a, b) in enumerate(hits)]  # fmt: skip
    result = conclude(points, **QUICK)

    assert result.selected == result.score(result.selected.point) and result.covers == ("examples",)


@pytest.mark.parametrize(
    ("left", "said"),
    [(1, "the one that a race left of 6 settings"), (3, "the best of the 3 that a race left of 6 settings")],
)
def test_after_a_race_the_verdict_speaks_of_what_the_race_left(left: int, said: str):
    hits = np.random.default_rng(13).random((left, 200)) < 0.8
    result = conclude([one(f"p{i}", row) for i, row in enumerate(hits)], dropped=6 - left, **QUICK)

    assert said in sentence(result)
    assert not any(note.startswith("One candidate") for note in result.notes)


def test_an_expert_that_beats_every_merge_is_said_to():
    random = np.random.default_rng(14)
    splits = ("validation", "test")

    def model(name: str, share: float, recipe: str | None = None) -> Candidate:
        return Candidate(
            name, recipe, outcomes={s: Outcomes({"t": random.random(400) < share}) for s in splits}
        )

    points = [model("a", 0.6, "r"), model("b", 0.55, "r")]
    inputs = [model("base", 0.3), model("good", 0.9), model("poor", 0.4)]
    result = conclude(points, inputs=inputs, base="base", **QUICK)

    assert result.best_input == "good" == as_json(result)["best_input"]
    assert "it is worse than the best input 'good' by 0." in sentence(result)
    assert [c.point for c in result.against("good")] == ["a"] and not result.against("poor")
    split = conclude([replace(p, outcomes={"test": p.outcomes["test"]}) for p in points], inputs=inputs,
                     base="base", splits=("test",), **QUICK)  # fmt: skip
    (against,) = split.chosen_against("good")
    pairs = 1 + 2 * 3  # of two settings, and of each of them and each input
    assert against.p * (pairs - 3) <= against.p_holm <= against.p * pairs


def test_an_interval_of_one_comparison_says_that_it_is_not_corrected():
    hits = np.random.default_rng(15).random((2, 300)) < [[0.8], [0.75]]
    result = conclude(
        [one("a", hits[0])], inputs=[replace(one("base", hits[1]), recipe=None)], base="base", **QUICK
    )

    assert " by itself, p = " in sentence(result)
