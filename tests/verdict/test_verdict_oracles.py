"""Numbers of verdicts beside formulas of textbooks that are written out here."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from verdict_cases import QUICK, one, panel

from mecha_exp.evaluation.normalisation import find_experts
from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.verdict import Candidate, conclude
from mecha_exp.verdict.choice import LEVEL
from mecha_exp.verdict.comparisons import columns
from mecha_exp.verdict.normalisation import experts_of
from mecha_exp.verdict.paired_tests import detectable_difference, paired_p_values
from mecha_exp.verdict.panel import Panel
from mecha_exp.verdict.sources import variance_sources
from mecha_exp.verdict.why.components import variance_shares
from mecha_exp.verdict.why.noise import chance_of_keys
from mecha_exp.verdict.why.shapley import EXACT_PLAYERS, shapley


@pytest.mark.parametrize("levels", [*itertools.product((2, 3, 4, 5), repeat=2)], ids=str)
def test_shares_of_balanced_tables_are_those_of_an_analysis_of_variance(levels):
    """Mean squares of two crossed factors without interaction, each cell measured three times."""
    first, second, repeats = *levels, 3
    random = np.random.default_rng(levels)
    effects = 2 * random.normal(size=(first, 1, 1)) + random.normal(size=(1, second, 1))
    values = effects + random.normal(size=(first, second, repeats))
    mean = values.mean()
    of_first = second * repeats * ((values.mean(axis=(1, 2)) - mean) ** 2).sum()
    of_second = first * repeats * ((values.mean(axis=(0, 2)) - mean) ** 2).sum()
    rest = ((values - mean) ** 2).sum() - of_first - of_second
    error = rest / (values.size - first - second + 1)
    components = [
        max(0, (of_first / (first - 1) - error) / (second * repeats)),
        max(0, (of_second / (second - 1) - error) / (first * repeats)),
        error,
    ]

    cells = [*itertools.product(range(first), range(second), range(repeats))]
    factors = {"a": [a for a, _, _ in cells], "b": [b for _, b, _ in cells]}
    shares = variance_shares(factors, values.reshape(-1))

    assert [*shares.values()] == pytest.approx(np.array(components) / sum(components))


def test_what_the_labels_of_replicates_do_not_explain_is_named():
    """Two seeds by two sets: both factors and what they leave."""
    random = np.random.default_rng(3)
    labels = ["seed=1,models.set=1", "seed=1,models.set=2", "seed=2,models.set=1", "seed=2,models.set=2"]
    points = [
        Candidate("p", outcomes={"s": Outcomes({"t": random.normal(shift, 0.1, 50)})}, replicate=label)
        for label, shift in zip(labels, (0, 1, 2, 5), strict=True)
    ]

    shares = variance_sources(Panel.of(points, "s"), 0)

    assert set(shares) == {"examples", "seed", "models.set", "replicates"}
    assert shares["replicates"] > 0.05 and sum(shares.values()) == pytest.approx(1)


def test_of_losses_the_expert_is_the_input_with_the_least():
    random = np.random.default_rng(0)
    worst, best, middle = (random.normal(loss, 0.1, 60) for loss in (3.0, 1.0, 2.0))
    inputs = [
        Candidate(name, outcomes={"s": Outcomes({"t": losses})})
        for name, losses in (("worst", worst), ("best", best), ("middle", middle))
    ]

    assert experts_of(inputs, "s", None, {}, "minimize") == {"t": "best"}
    assert experts_of(inputs, "s", None, {}, "maximize") == {"t": "worst"}


def test_the_verdict_normalises_where_the_table_does():
    """Of inputs 0.8 and 0.7 right of 200 examples, one leads by far or not by chance."""
    random = np.random.default_rng(5)
    agreed = set()
    for _ in range(40):
        right = {name: random.random(200) < share for name, share in (("a", 0.8), ("b", 0.7), ("p", 0.75))}
        outcomes = {name: Outcomes({"t": values.astype(float)}) for name, values in right.items()}
        point, *inputs = (Candidate(name, outcomes={"test": outcomes[name]}) for name in "pab")
        verdict = conclude([point], metric="accuracy", resamples=99, inputs=inputs, splits=["test"])

        by_far = find_experts({name: outcomes[name] for name in "ab"}, None, {}, minimized=False)
        agreed.add((verdict.selected.normalised is not None, bool(by_far)))
    assert agreed == {(True, True), (False, False)}


def holm(p_values: list[float], family: int) -> list[float]:
    """Holm 1979: the i-th least p-value times the number of hypotheses that are left, never falling."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for i, place in enumerate(np.argsort(p_values)):
        largest = max(largest, min(1.0, (family - i) * p_values[place]))
        adjusted[place] = largest
    return adjusted


@pytest.mark.parametrize("seed", range(12))
def test_a_table_is_corrected_for_all_pairs_of_rows_in_all_its_columns(seed):
    random = np.random.default_rng(seed)
    shifts = random.uniform(0, 0.6, size=(3, 2))
    points = [
        Candidate(
            f"p{row}",
            outcomes={
                "s": Outcomes({f"t{task}": random.normal(shifts[row, task], 1, 80) for task in (0, 1)})
            },
        )
        for row in range(3)
    ]
    data = Panel.of(points, "s")
    parts = [data, data.restricted("t0"), data.restricted("t1")]
    pairs, p_values = [], []
    for part in parts:
        leader = int(np.argmax(part.scores))
        pairs.append([row for row in range(3) if row != leader])
        pairing = np.array([[row, leader] for row in pairs[-1]])
        p_values += paired_p_values(part, pairing, flips=999, seed=0).tolist()
    adjusted = iter(holm(p_values, 3 * 3))

    table = columns(data, np.arange(3), "maximize", flips=999, seed=0)

    for column, others in zip(table, pairs, strict=True):
        assert column.tied == tuple(f"p{row}" for row in others if next(adjusted) >= LEVEL)


def test_points_that_a_race_dropped_count_among_those_that_could_have_been_lucky():
    """With seeds the correction is for all pairs of what could have been chosen, on any split."""
    random = np.random.default_rng(0)
    points = [
        Candidate(
            name,
            "r",
            outcomes={s: Outcomes({"t": random.normal(mean + luck, 1, 200)}) for s in ("validation", "test")},
            replicate=f"seed={number}",
        )
        for name, mean in (("a", 0.5), ("b", 0.1), ("c", 0.0))
        for number, luck in enumerate(random.normal(0, 0.02, 6))
    ]

    few, many = (conclude(points, dropped=dropped, **QUICK) for dropped in (0, 10))

    least_of = [
        min(c.p_holm / c.p for c in verdict.against("a") if c.split == "test") for verdict in (few, many)
    ]
    pairs = [3 * 2 / 2, 13 * 12 / 2]
    assert least_of[1] / least_of[0] > (pairs[1] - 2) / pairs[0]


def test_comparisons_of_the_chosen_point_are_found_by_its_name():
    hits = np.random.default_rng(0).random((3, 200)) < [[0.9], [0.6], [0.5]]
    points = [one("chosen", hits[0]), one("other", hits[1])]
    verdict = conclude(points, inputs=[one("base", hits[2])], base="base", **QUICK)
    read_again = replace(verdict, selected=replace(verdict.selected, point="".join([*"chosen"])))

    assert len(verdict.chosen_against("base")) == 1
    assert read_again.chosen_against("base") == verdict.chosen_against("base")


def test_a_difference_is_harder_to_detect_where_drawn_signs_are_too_coarse_for_the_level():
    """20 draws lie below the level on average from flips + 1 = 20 / level on; of fewer a bound is asked."""
    random = np.random.default_rng(0)
    data = panel(random.normal(0, 1, 60), random.normal(0, 1, 60))

    def detectable(flips: int) -> float:
        return detectable_difference(data, 0, 1, level=0.05, power=0.8, flips=flips)

    assert detectable(398) == detectable(199) == detectable(99) > detectable(399) == detectable(9_999)


def test_orders_that_leave_the_statistic_as_it_is_count_as_chance():
    """Of two values any order has the same distances, so no p-value can be below 1."""
    assert chance_of_keys({"k": [0.1, 0.7]}, [0.3, 0.9]) == {"k": 1.0}
    assert chance_of_keys({"k": ["a", "b"]}, [1 / 3, 0.1]) == {"k": 1.0}


def test_shapley_values_of_all_coalitions_are_exact_for_any_number_of_players():
    """With v(S) = (the sum of the members)^2, a player of worth m has m times the sum of all."""
    players = [f"p{number}" for number in range(1, EXACT_PLAYERS + 2)]
    worth = {player: float(number) for number, player in enumerate(players, 1)}
    groups = [frozenset(g) for size in range(len(players) + 1) for g in itertools.combinations(players, size)]

    values = shapley({group: sum(worth[p] for p in group) ** 2 for group in groups}, players)

    total = sum(worth.values())
    assert {p: v.value for p, v in values.items()} == pytest.approx({p: worth[p] * total for p in players})
    assert all(math.isnan(value.low) for value in values.values())
