"""The printed detectable difference is found as often as it says, and no interval of hits has no width."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from verdict_kinds import KINDS, Kind, effects

from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.verdict import Candidate, conclude
from mecha_exp.verdict.choice import LEVEL, minimum_detectable_difference
from mecha_exp.verdict.paired_tests import paired_p_values

SWEEPS = 100
FAMILY = 190
PAIR = np.array([[0, 1]])


@pytest.mark.parametrize("kind", [k for k in KINDS if k.points <= 20 and k.examples < 700], ids=str)
def test_the_detectable_difference_is_found_in_four_of_five_sweeps(kind: Kind):
    two, random, smallest = replace(kind, points=2), np.random.default_rng(0), 0.0
    for _ in range(3):  # the spread of differences depends on the difference
        drawn = [two.draw(random, effects(two, smallest)) for _ in range(6)]
        smallest = float(np.mean([minimum_detectable_difference(p, PAIR, FAMILY, flips=999) for p in drawn]))

    panels = [two.draw(random, effects(two, smallest)) for _ in range(SWEEPS)]
    hits = sum(paired_p_values(panel, PAIR, flips=999)[0] < LEVEL / FAMILY for panel in panels)

    assert hits / SWEEPS >= 0.8 - 2 * np.sqrt(0.8 * 0.2 / SWEEPS)
    assert hits / SWEEPS < 1


def test_macro_means_of_tasks_of_hits_or_misses_alone_have_the_widths_of_wilson():
    counts = {"easy": 40, "hard": 90}
    measured = {"test": Outcomes({"easy": np.ones(40), "hard": np.zeros(90)})}

    verdict = conclude([Candidate("p", outcomes=measured)], metric="accuracy", resamples=200)

    lows = {task: stats.binomtest(0, n).proportion_ci(method="wilson").high / 2 for task, n in counts.items()}
    estimate = verdict.selected.overall
    assert estimate.value == 0.5
    assert estimate.ci95 == pytest.approx((0.5 - lows["easy"], 0.5 + lows["hard"]))


def test_a_task_of_hits_alone_widens_the_interval_that_the_others_draw():
    random = np.random.default_rng(3)
    mixed = random.random(300) < 0.5
    one = conclude([Candidate("p", outcomes={"test": Outcomes({"a": mixed, "b": mixed})})], metric="accuracy")
    outcomes = Outcomes({"a": mixed, "b": np.ones(30)})
    other = conclude([Candidate("p", outcomes={"test": outcomes})], metric="accuracy")

    drawn_half = 1.96 * np.sqrt(mixed.var() / 300) / 2
    unseen = (1 - stats.binomtest(30, 30).proportion_ci(method="wilson").low) / 2
    estimate = other.selected.overall
    assert estimate.value - estimate.low == pytest.approx(np.hypot(drawn_half, unseen), rel=0.1)
    assert estimate.high - estimate.value == pytest.approx(drawn_half, rel=0.1)
    assert one.selected.overall.low < one.selected.overall.value
