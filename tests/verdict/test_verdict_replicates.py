"""Verdicts of settings with replicates: errors, intervals and words, whatever effects seeds have."""

import math

import numpy as np
import pytest
from scipy import optimize, stats
from verdict_seeds import Seeds, coverage, errors

from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.verdict import Candidate, conclude, sentence
from mecha_exp.verdict.intervals import replicate_squares
from mecha_exp.verdict.paired_tests import paired_p_values, squared_errors
from mecha_exp.verdict.panel import Panel

PAIR = np.array([[0, 1]])
QUICK = {"metric": "accuracy", "resamples": 100, "flips": 99}


def replicated(name: str, rows: np.ndarray, **more) -> list[Candidate]:
    """A candidate for each row of outcomes, with the same outcomes on validation and test unless told."""
    splits = more.pop("splits", ("validation", "test"))
    return [
        Candidate(
            name, "r", outcomes={s: Outcomes({"t": row}) for s in splits}, replicate=f"seed={i}", **more
        )
        for i, row in enumerate(rows)
    ]


def panel(*settings: np.ndarray, labels: str = "seed={}") -> Panel:
    points = [
        Candidate(f"p{k}", outcomes={"s": Outcomes({"t": row})}, replicate=labels.format(r, k))
        for k, rows in enumerate(settings)
        for r, row in enumerate(rows)
    ]
    return Panel.of(points, "s")


@pytest.mark.parametrize("effects", ["own", "uneven"])
@pytest.mark.parametrize(("replicates", "splits"), [(2, 2), (3, 2), (5, 1)])
def test_seeds_with_effects_are_seldom_shown_as_differences(effects: str, replicates: int, splits: int):
    """Satterthwaite's degrees of freedom showed a difference in 60, 28 and 14 % of such sweeps."""
    shown = errors(Seeds(effects, replicates, splits, binary=True, examples=100), 60)

    assert float(shown[1]) <= 5 + 200 * math.sqrt(0.05 * 0.95 / 60)


def test_what_sweeps_show_of_lucky_seeds_is_seldom_shown_by_conclude():
    """Through the front door: 40 sweeps of 10 equal settings with 2 seeds, and a base."""
    random, wrong = np.random.default_rng(0), 0
    for _ in range(40):
        lucky = 0.15 * random.normal(size=(11, 2))
        lucky[10] = 0
        easy = {split: random.normal(size=(300, 1, 1)) for split in ("validation", "test")}
        hits = {s: 0.9 * e + 0.44 * random.normal(size=(300, 11, 2)) < 0.85 + lucky for s, e in easy.items()}
        points = [
            Candidate(f"p{k}", "r", outcomes={s: Outcomes({"t": v[:, k, r]}) for s, v in hits.items()},
                      replicate=f"seed={r}")
            for k in range(10) for r in range(2)
        ]  # fmt: skip
        base = Candidate("base", outcomes={s: Outcomes({"t": v[:, 10, 0]}) for s, v in hits.items()})
        result = conclude(points, inputs=[base], base="base", **QUICK)
        wrong += any(comparison.distinguishable for comparison in result.comparisons)

    assert wrong / 40 <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 40)


@pytest.mark.parametrize(
    "kind",
    [Seeds("own", 3, 2, True, examples=100), Seeds("uneven", 5, 1, False, examples=100)],
    ids=lambda k: k.name,
)
def test_the_interval_of_a_chosen_setting_counts_the_choice_of_its_seeds(kind: Seeds):
    """It held the truth in 45 to 77 %, as an interval that does not count the choice still does."""
    _, _, alone, counted, fresh, *_ = coverage(kind, 60)

    assert float(alone) < float(counted)
    assert min(float(counted), float(fresh)) >= 95 - 200 * math.sqrt(0.05 * 0.95 / 60)


def test_the_test_of_replicates_gives_each_source_its_own_quantile():
    random = np.random.default_rng(1)
    data = panel(random.normal(size=(4, 60)) + 0.5, random.normal(size=(4, 60)))
    spread, freedom = squared_errors(data, 0, 1)
    p = float(paired_p_values(data, PAIR)[0])

    assert freedom == pytest.approx([59, 3])
    needed = (stats.t.ppf(1 - p / 2, freedom) ** 2 * spread).sum()
    assert needed == pytest.approx((data.scores[0] - data.scores[1]) ** 2, rel=1e-4)
    total = abs(data.scores[0] - data.scores[1]) / math.sqrt(spread.sum())
    assert 2 * stats.t.sf(total, 59) < p < 2 * stats.t.sf(total, 3)


def test_replicates_with_other_labels_are_not_paired():
    random = np.random.default_rng(2)
    rows = random.normal(size=(2, 3, 40))
    paired, alone = squared_errors(panel(*rows), 0, 1), squared_errors(panel(*rows, labels="{}{}"), 0, 1)

    assert list(paired[1]) == pytest.approx([39, 2]) and list(alone[1]) == pytest.approx([39, 2, 2])
    means = rows.mean(axis=2)
    assert paired[0][1] == pytest.approx((means[0] - means[1]).var(ddof=1) / 3)
    assert alone[0][1:] == pytest.approx(means.var(axis=1, ddof=1) / 3)


def test_a_setting_without_replicates_adds_no_spread_of_its_own():
    random = np.random.default_rng(3)
    spread, freedom = squared_errors(panel(random.normal(size=(3, 40)), random.normal(size=(1, 40))), 0, 1)

    assert len(spread) == 2 and freedom[1] == 2


def test_equal_replicated_settings_have_p_one():
    rows = np.random.default_rng(4).normal(size=(3, 30))

    assert paired_p_values(panel(rows, rows), PAIR)[0] == 1
    assert paired_p_values(panel(rows, rows + 1e-3), PAIR)[0] < 1e-5


def test_the_spread_of_three_replicates_is_that_of_student():
    rows = np.repeat(np.array([[0.2], [0.5], [0.8]]), 50, axis=1)
    squares = replicate_squares(panel(rows), rows.mean(axis=1))

    assert squares[0] == pytest.approx(stats.t.ppf(0.975, 2) ** 2 * 0.09 / 3)


def test_two_replicates_are_no_facts_about_variance():
    rows = np.random.default_rng(5).random((6, 200)) < 0.7
    two, six = (sentence(conclude(replicated("p", rows[:n]), **QUICK)) for n in (2, 6))

    assert "% from" not in two
    assert "% from examples" in six


def test_one_seed_of_a_method_that_draws_is_said_to_be_one():
    rows = np.random.default_rng(6).random((3, 200)) < 0.7
    one = conclude(replicated("p", rows[:1], draws=True), **QUICK)
    none = conclude(replicated("p", rows[:1]), **QUICK)

    assert any("one seed" in note and "sweep.replicates" in note for note in one.notes)
    assert not any("seed" in note for note in none.notes)


def test_new_seeds_report_the_chosen_setting_and_are_compared_with_the_base():
    random = np.random.default_rng(7)
    points = replicated("a", random.random((2, 300)) < 0.9) + replicated("b", random.random((2, 300)) < 0.5)
    fresh = replicated("a", random.random((3, 300)) < 0.7, splits=("test",))
    base = Candidate("base", outcomes=points[2].outcomes)
    result = conclude(points, inputs=[base], base="base", fresh=fresh, **QUICK)

    assert (result.selected.point, result.fresh, result.covers) == ("a", 3, ("examples", "replicates"))
    assert result.selected.overall.value == pytest.approx(0.7, abs=0.05)
    assert result.score("a").overall.value > 0.85, "the sweep's own seeds are in its table"
    (against,) = result.chosen_against("base")
    assert against.difference.value == pytest.approx(0.2, abs=0.08)
    assert "3 new replicates" in sentence(result) and "lucky" not in " ".join(result.notes)


def test_new_seeds_of_another_setting_are_left_out():
    rows = np.random.default_rng(8).random((6, 100))
    points = replicated("a", rows[:2] < 0.9) + replicated("b", rows[2:4] < 0.4)
    result = conclude(points, fresh=replicated("b", rows[4:] < 0.4, splits=("test",)), **QUICK)

    assert result.fresh == 0 and result.covers[-1] == "choice"
    assert "The new replicates are of another setting than 'a', which is chosen now." in result.notes


def test_one_new_replicate_is_no_report():
    rows = np.random.default_rng(9).random((5, 100)) < 0.6
    fresh = replicated("a", rows[4:], splits=("test",))

    assert conclude(replicated("a", rows[:2]), fresh=fresh, **QUICK).fresh == 0


def test_two_seeds_with_as_many_hits_by_chance_show_no_difference():
    """Of seeds with effects some have equal counts: as far apart as half of an example, and not equal."""
    hits = [[(start, start + count) for start in (0, 20)] for count in (200, 150)]
    place = np.arange(300)
    rows = [np.array([(place >= a) & (place < b) for a, b in of], dtype=float) for of in hits]

    p_value = paired_p_values(panel(*rows), PAIR)[0]
    assert p_value == pytest.approx(_banerjee(1 / 6, *squared_errors(panel(*rows), 0, 1)))
    assert 0.001 < p_value < 0.05
    assert paired_p_values(panel(rows[0][[0, 0]], rows[1][[0, 0]]), PAIR)[0] < 1e-9  # nothing was drawn


def _banerjee(difference: float, errors: np.ndarray, freedom: np.ndarray) -> float:
    def exceeds(p: float) -> float:
        return float((stats.t.isf(p / 2, freedom) ** 2 * errors).sum()) - difference**2

    return float(optimize.brentq(exceeds, 1e-12, 1))
