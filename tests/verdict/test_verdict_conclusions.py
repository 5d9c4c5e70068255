"""Verdicts: what is chosen and said, for good outcomes and for every kind of bad ones."""

import json
import math
import re
import sys
from dataclasses import replace

import numpy as np
import pytest

from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.verdict import Candidate, as_json, conclude, sentence
from mecha_exp.verdict.sentences import ONE_NUMBER

SIZES = {"validation": 200, "test": 400}
QUICK = {"resamples": 200, "flips": 199}


def outcomes(accuracy: float, seed: int, count: int, tasks: int = 2) -> Outcomes:
    """Hits that are easy or hard for all points alike, on tasks of equal size."""
    easy = np.random.default_rng(count).random((tasks, count))
    own, shared = np.random.default_rng([seed, count]).random((2, tasks, count))
    hits = np.where(shared < 0.8, easy, own) < accuracy
    return Outcomes({f"t{i}": row for i, row in enumerate(hits)})


def point(name: str, accuracy: float, seed: int, splits: tuple[str, ...] = ("validation", "test"), **more):
    recipe = more.pop("recipe", name.split(" ")[0])
    measured = {split: outcomes(accuracy, seed, SIZES[split]) for split in splits}
    return Candidate(name, recipe, outcomes=measured, **more)


@pytest.fixture(scope="module")
def sweep() -> list[Candidate]:
    return [
        point("ties a=1", 0.9, 1),
        point("ties a=2", 0.5, 2, ("validation",)),
        point("slerp a=1", 0.89, 3),
        point("slerp a=2", 0.4, 4, ("validation",)),
        point("mean", 0.6, 5),
    ]


INPUTS = [point("base", 0.5, 7, recipe=None), point("expert", 0.95, 8, recipe=None)]


@pytest.fixture(scope="module")
def verdict(sweep: list[Candidate]):
    experts = {"t0": "expert", "t1": "expert"}
    return conclude(sweep, metric="accuracy", inputs=INPUTS, base="base", expert_of=experts, **QUICK)


def test_the_best_on_validation_is_reported_on_test(verdict):
    assert (verdict.selected.point, verdict.selected_on, verdict.reported_on) == (
        "ties a=1",
        "validation",
        "test",
    )
    assert verdict.chosen == {"ties": "ties a=1", "slerp": "slerp a=1", "mean": "mean"}
    assert verdict.selected.overall.low < verdict.selected.overall.value < verdict.selected.overall.high
    assert verdict.cost.candidates == 5 and verdict.examples == verdict.clusters == 800
    assert verdict.cost.gap == pytest.approx(verdict.cost.selection_estimate - verdict.selected.overall.value)
    assert {d.against: d.split for d in verdict.cost.detectable} == {"base": "test", None: "test"}
    assert all(0 < d.difference < 0.25 for d in verdict.cost.detectable)


def test_points_are_compared_where_they_were_measured(verdict):
    splits = {(c.point, c.against): c.split for c in verdict.comparisons}

    assert splits["slerp a=1", "ties a=1"] == splits["ties a=1", "base"] == "test"
    assert splits["ties a=2", "ties a=1"] == splits["slerp a=2", "base"] == "validation"
    assert verdict.tied == ("slerp a=1",)
    assert all(c.p <= c.p_holm <= 1 for c in verdict.comparisons)


def test_the_json_has_the_fields_that_programs_read(verdict):
    content = json.loads(json.dumps(as_json(verdict), allow_nan=False))

    fields = [
        "metric",
        "direction",
        "selected_on",
        "reported_on",
        "candidates",
        "selected",
    ]
    fields += ["comparisons", "normalised", "detectable"]
    assert list(content)[:9] == fields
    assert set(content["selected"]) == {"recipe", "point", "estimate", "ci95", "covers", "fresh", "variance"}
    assert set(content["comparisons"][0]) == {
        "point", "against", "difference", "ci95", "p", "p_holm", "distinguishable", "split",
    }  # fmt: skip
    assert 0.8 < content["normalised"]["estimate"] < 1


def test_the_sentence_says_what_was_shown(verdict):
    text = sentence(verdict)

    assert text.startswith("'ties a=1' has accuracy 0.") and text.endswith("would often be missed.")
    assert "over 800 examples), the best of 5 settings on 'validation'; it is better than 'base' by" in text
    said = "the data show a difference from 3 of the 4 settings compared with it, not from the other 1;"
    assert said in text


@pytest.mark.parametrize(
    ("accuracies", "said"),
    [
        ((0.9, 0.3), "the data show a difference from the one setting compared with it;"),
        ((0.9, 0.3, 0.2), "the data show a difference from all of the 2 settings compared with it;"),
        ((0.9, 0.9), "the data show no difference from the one setting compared with it;"),
        ((0.9, 0.9, 0.9), "the data show no difference from any of the 2 settings compared with it;"),
    ],
)
def test_the_sentence_counts_the_differences_that_are_shown(accuracies, said: str):
    points = [point(f"ties a={i}", accuracy, i) for i, accuracy in enumerate(accuracies)]

    assert said in sentence(conclude(points, metric="accuracy", inputs=INPUTS, base="base", **QUICK))


def test_permuting_the_test_labels_changes_no_choice(sweep, verdict):
    random = np.random.default_rng(0)
    shuffled = [
        Candidate(c.name, c.recipe, outcomes={**c.outcomes, "test": outcomes(random.random(), i, 400)})
        for i, c in enumerate(sweep)
    ]
    again = conclude(shuffled, metric="accuracy", inputs=INPUTS, base="base", **QUICK)

    assert (again.selected.point, again.chosen) == (verdict.selected.point, verdict.chosen)


def test_the_order_of_examples_does_not_matter(sweep, verdict):
    random, shuffled = np.random.default_rng(0), []
    for candidate in sweep:
        measured = {}
        for split, given in candidate.outcomes.items():
            order = random.permutation(SIZES[split])
            names = {task: given.examples[task][order] for task in given.values}
            values = {task: given.values[task][order] for task in given.values}
            measured[split] = Outcomes(values, examples=names)
        shuffled.append(Candidate(candidate.name, candidate.recipe, outcomes=measured))
    again = conclude(shuffled, metric="accuracy", **QUICK)

    for score in again.scores:
        assert score.overall.value == pytest.approx(verdict.score(score.point, score.split).overall.value)


def test_same_seed_same_verdict(sweep):
    first, second = (conclude(sweep, metric="accuracy", **QUICK) for _ in range(2))

    assert json.dumps(as_json(first)) == json.dumps(as_json(second))


def test_a_duplicate_cannot_be_told_from_its_original():
    twins = [point("a", 0.8, 1), Candidate("b", "b", outcomes=point("a", 0.8, 1).outcomes)]
    result = conclude(twins, metric="accuracy", **QUICK)
    (comparison,) = result.comparisons

    assert (comparison.p, comparison.distinguishable, comparison.difference.value) == (1.0, False, 0.0)
    assert comparison.difference.low < 0 < comparison.difference.high
    assert "All 2 candidates have equal outcomes on 'validation': the first stands for them." in result.notes


def test_a_difference_of_rounding_is_none():
    """Equal means over tasks, added up in another order."""

    def of(name: str, *hits: int) -> Candidate:
        tasks = {f"t{task}": np.arange(6) < count for task, count in enumerate(hits)}
        return Candidate(name, name, outcomes={"all": Outcomes(tasks)})

    (comparison,) = conclude([of("a", 1, 2, 5), of("b", 5, 1, 2)], metric="accuracy", **QUICK).comparisons

    assert comparison.difference.value == 0
    assert comparison.difference.low < 0 < comparison.difference.high


def test_a_metric_that_is_minimised_has_its_least_as_the_best():
    losses = [
        Candidate(n, n, outcomes={"test": Outcomes({"t": np.random.default_rng(0).normal(m, 1, 300)})})
        for n, m in (("a", 2.0), ("b", 1.0), ("base", 2.0))
    ]
    result = conclude(
        losses[:2],
        metric="loss",
        direction="minimize",
        inputs=losses[2:],
        base="base",
        splits=["test"],
        **QUICK,
    )

    assert result.selected.point == "b" and "it is better than 'base', the best input, by 1 " in sentence(
        result
    )
    assert any(note.startswith("Scores are not normalised") for note in result.notes)


@pytest.mark.parametrize(
    ("direction", "mean", "said"),
    [
        ("maximize", -1.0, "it is worse than 'base', the best input, by"),
        ("minimize", -1.0, "it is better than 'base', the best input, by"),
        ("maximize", -0.01, "it cannot be told from 'base', the best input (difference"),
    ],
)
def test_a_difference_lies_within_its_interval(direction: str, mean: float, said: str):
    noise = np.random.default_rng(0).normal(0, 1, (2, 300))
    point = Candidate("a", "a", outcomes={"test": Outcomes({"t": mean + noise[0] - noise[0].mean()})})
    base = Candidate("base", outcomes={"test": Outcomes({"t": noise[1] - noise[1].mean()})})
    settings = {"metric": "m", "direction": direction, "base": "base", "splits": ["test"], **QUICK}

    result = conclude([point], inputs=[base], **settings)

    numbers = re.search(
        rf"{re.escape(said)} (-?[\d.]+) \((-?[\d.]+) to (-?[\d.]+) by itself, p", sentence(result)
    )
    assert numbers is not None, sentence(result)
    value, low, high = map(float, numbers.groups())
    assert low < value < high


def test_experts_are_guessed_where_one_input_is_best_by_far():
    random = np.random.default_rng(0)
    models = {"one": (0.95, 0.3), "two": (0.3, 0.95), "base": (0.5, 0.5)}
    inputs = [
        Candidate(n, outcomes={"test": Outcomes({f"t{i}": random.random(200) < p for i, p in enumerate(ps)})})
        for n, ps in models.items()
    ]
    merged = Candidate(
        "m", "m", outcomes={"test": Outcomes({f"t{i}": random.random(200) < 0.8 for i in (0, 1)})}
    )
    result = conclude([merged], metric="accuracy", inputs=inputs, splits=["test"], **QUICK)

    normalised = result.selected.normalised
    assert normalised.experts == {"t0": "one", "t1": "two"}
    means = {
        t: result.selected.tasks[t].value / result.score(e).tasks[t].value
        for t, e in normalised.experts.items()
    }
    assert normalised.tasks == pytest.approx(means)
    assert normalised.overall.value == pytest.approx(sum(means.values()) / 2)
    assert normalised.overall.low < normalised.overall.value < normalised.overall.high


def test_each_set_of_experts_is_divided_by_its_own():
    """0.4 of 0.5 and 0.5 of 1.0 are 0.65 on average; the means alone would give 0.45 of 0.75."""

    def model(name: str, shares: tuple[float, float], recipe: str | None = None) -> list[Candidate]:
        hits = [(np.arange(100) < 100 * share).astype(float) for share in shares]
        return [
            Candidate(name, recipe, outcomes={"test": Outcomes({"t": of_set})}, replicate=f"experts={i}")
            for i, of_set in enumerate(hits)
        ]

    merge, expert = model("merge", (0.4, 0.5), "ties"), model("expert", (0.5, 1.0))
    given = {"metric": "accuracy", "expert_of": {"t": "expert"}, "splits": ("test",), **QUICK}

    of_sets, of_means = (
        {score.point: score.normalised.overall for score in conclude(merge, inputs=inputs, **given).scores}
        for inputs in (expert, [replace(expert[0], replicate="")])
    )

    assert of_sets["merge"].value == pytest.approx(0.65)
    assert of_sets["expert"].value == of_sets["expert"].low == of_sets["expert"].high == 1
    assert of_means["merge"].value == pytest.approx(0.9), "an expert of no set is that of all"


def test_replicates_are_one_row_whose_interval_covers_them():
    points = [
        point("a", accuracy, seed, recipe="a", replicate=f"seed={seed}")
        for seed, accuracy in enumerate((0.70, 0.80, 0.90, 0.75, 0.85))
    ]
    result = conclude([*points, point("b", 0.3, 9)], metric="accuracy", **QUICK)
    one = conclude([points[1], point("b", 0.3, 9)], metric="accuracy", **QUICK)

    assert result.selected.replicates == 5 and "5 replicates" in sentence(result)
    width = [v.selected.overall.high - v.selected.overall.low for v in (result, one)]
    assert width[0] > 1.5 * width[1]
    assert result.comparisons[0].distinguishable


BAD = {
    "lengths": (
        [point("a", 0.8, 1), point("b", 0.7, 2),
         Candidate("c", "c", outcomes={s: outcomes(0.9, 3, 150) for s in SIZES})],
        "'c' has 150 examples of the task 't0', not 200, and cannot be compared.",
    ),
    "ids": (
        [point("a", 0.8, 1), point("b", 0.7, 2),
         Candidate("c", "c", outcomes={"validation": Outcomes(
             {t: np.ones(200) for t in ("t0", "t1")}, examples={"t0": [f"x{i}" for i in range(200)]})})],
        "'c' has other examples of the task 't0' than most, and cannot be compared.",
    ),
    "clusters": (
        [point("a", 0.8, 1), point("b", 0.7, 2),
         Candidate("c", "c", outcomes={"validation": Outcomes(
             {t: np.ones(200) for t in ("t0", "t1")}, clusters={"t0": np.arange(200) // 2})})],
        "'c' has other clusters in the task 't0' than most, and cannot be compared.",
    ),
    "tasks": (
        [point("a", 0.8, 1), point("b", 0.7, 2),
         Candidate("c", "c", outcomes={"validation": Outcomes({"t9": [1]})})],
        "'c' has the tasks ['t9'], not ['t0', 't1'], and cannot be compared.",
    ),
    "nan": (
        [point("a", 0.8, 1), point("b", 0.7, 2), Candidate("c", "c", outcomes={
            "validation": Outcomes({t: np.full(200, math.nan) for t in ("t0", "t1")})})],
        "'c' has 200 outcomes that are not finite in the task 't0', and cannot be compared.",
    ),
    "missing split": (
        [point("a", 0.8, 1), point("b", 0.7, 2), point("c", 0.9, 3, ("test",))],
        "'c' has no outcomes on the split 'validation', and cannot be compared.",
    ),
    "no validation": (
        [point("a", 0.8, 1, ("test",)), point("b", 0.7, 2, ("test",))],
        "No point has outcomes on the split 'validation': points are chosen on 'test'.",
    ),
    "same data": (
        [point("a", 0.8, 1, ("validation",)), point("b", 0.7, 2, ("validation",))],
        "Chosen and reported on the same data ('validation'): the estimate of the best is too good.",
    ),
    "chosen not on test": (
        [point("a", 0.8, 1, ("validation",)), point("b", 0.7, 2)],
        "The chosen point 'a' has no outcomes on 'test' that can be reported.",
    ),
    "one point": (
        [point("a", 0.8, 1)],
        "One candidate: nothing was chosen, and nothing is compared with it.",
    ),
    "twice": (
        [point("a", 0.8, 1), point("b", 0.7, 2), point("b", 0.9, 3)],
        "'b' is measured twice in the same replicate, and cannot be compared.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_a_sentence_and_the_rest_stands(case: str):
    points, note = BAD[case]
    result = conclude(points, metric="accuracy", **QUICK)

    assert note in result.notes
    assert result.selected.point == "a" and 0.7 < result.selected.overall.value < 0.9
    assert "'a' has accuracy" in sentence(result)
    json.dumps(as_json(result), allow_nan=False)


def test_one_example_tells_nothing_apart():
    points = [Candidate(n, n, outcomes={"test": Outcomes({"t": [v]})}) for n, v in (("a", 1), ("b", 0))]
    result = conclude(points, metric="accuracy", splits=["test"], **QUICK)

    assert "One example on 'test': nothing can be told apart." in result.notes
    assert result.tied == ("b",) and result.cost.cross_validated is None
    alone = result.score("a").overall.low
    assert alone == pytest.approx(0.2065, abs=1e-4)
    assert result.selected.overall.low == pytest.approx(1 - (1 - alone) * 2.2414 / 1.96, abs=1e-4)


def test_a_missing_base_or_expert_is_a_sentence(sweep):
    result = conclude(
        sweep, metric="accuracy", inputs=INPUTS[:1], base="none", expert_of={"t0": "base"}, **QUICK
    )

    assert (
        "The base 'none' has no outcomes to compare on 'test': no point is compared with it." in result.notes
    )
    assert (
        "Scores are not normalised: the task 't1' has no expert. Name it in `models.expert_of`."
        in result.notes
    )


def test_nothing_to_choose_from_is_a_sentence():
    nan = Outcomes({"t": [math.nan]})
    result = conclude(
        [Candidate("a", "a", outcomes={"test": nan})], metric="accuracy", splits=["test"], **QUICK
    )

    assert sentence(result) == "Nothing was chosen: no point has outcomes on 'test' that can be compared."
    assert as_json(result)["selected"] is None
    assert result.columns == () and result.scores == ()


def test_one_number_a_point_is_said_to_tell_nothing():
    points = [Candidate(f"p{i}", "r", numbers={"test": i / 10}) for i in range(3)]
    result = conclude([*points, Candidate("bad", numbers={"test": math.nan})], metric="fid", **QUICK)

    assert (
        result.selected.point == "p2" and result.comparisons == () and math.isnan(result.selected.overall.low)
    )
    assert sentence(result) == (
        "'p2' has fid 0.2 on 'test', the best of 3 settings on the same data; one number a point: nothing "
        "here tells whether differences are chance."
    )
    assert "'bad' has a number that is not finite on 'test', and cannot be compared." in result.notes
    assert ONE_NUMBER in result.notes and result.covers == () and result.columns == ()


def test_each_column_has_its_best_method_and_what_cannot_be_told_from_it(verdict):
    assert [column.task for column in verdict.columns] == [None, "t0", "t1"]
    for column in verdict.columns:
        assert {column.best, *column.tied} == {"ties a=1", "slerp a=1"}


@pytest.mark.parametrize("separate", [True, False])
def test_a_sweep_without_any_effect_seldom_shows_one(separate: bool):
    """A small version of bench/verdict.py: 100 sweeps of 12 equal points."""
    random, wrong = np.random.default_rng(11), 0
    for _ in range(100):
        sets = {split: _equal_points(random) for split in ("validation", "test")[: 1 + separate]}
        points = [Candidate(f"p{i}", f"r{i}", outcomes={s: o[i] for s, o in sets.items()}) for i in range(12)]
        result = conclude(points, metric="accuracy", resamples=2, flips=2)
        wrong += any(comparison.distinguishable for comparison in result.comparisons)

    assert wrong / 100 <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 100)


def _equal_points(random: np.random.Generator) -> list[Outcomes]:
    latent = 0.9 * random.normal(size=300)[:, None] + 0.44 * random.normal(size=(300, 12))
    return [Outcomes({"t": column}) for column in (latent < 1).T]


@pytest.mark.parametrize("splits", [("validation",), ("validation", "test")])
def test_of_very_many_points_the_best_are_compared_and_all_are_counted(splits, monkeypatch):
    many = [point(f"ties a={n}", 0.5 + n / 30, n, ("validation",)) for n in range(9)]
    many.append(point("ties a=9", 0.95, 20, splits))
    whole = conclude(many, metric="accuracy", inputs=INPUTS, base="base", splits=splits, **QUICK)
    monkeypatch.setattr(sys.modules[conclude.__module__], "MOST_COMPARED", 4)
    part = conclude(many, metric="accuracy", inputs=INPUTS, base="base", splits=splits, **QUICK)

    assert part.selected == whole.selected
    assert part.cost.cross_validated == whole.cost.cross_validated and part.cost.candidates == 10
    compared = {(c.point, c.against): c for c in part.comparisons}
    alone = {(c.point, c.against): c for c in whole.comparisons}
    assert {name for name, _ in compared} == {"ties a=6", "ties a=7", "ties a=8", "ties a=9"}
    for pair, comparison in compared.items():
        assert comparison.p == alone[pair].p
        assert comparison.p_holm >= alone[pair].p_holm
        assert comparison.difference == alone[pair].difference
    said = "The best 4 of the 10 settings, with the best of each recipe, are compared with the chosen one"
    assert any(said in note for note in part.notes)


def test_of_very_many_points_the_best_of_each_recipe_are_in_the_table(monkeypatch):
    many = [point(f"ties a={n}", 0.6 + n / 30, n, ("validation",)) for n in range(9)]
    many += [point(f"slerp a={n}", 0.3 + n / 30, 20 + n, ("validation",)) for n in range(3)]
    monkeypatch.setattr(sys.modules[conclude.__module__], "MOST_COMPARED", 4)
    part = conclude(many, metric="accuracy", inputs=INPUTS, base="base", **QUICK)

    assert part.chosen == {"ties": "ties a=8", "slerp": "slerp a=2"}
    assert part.score("slerp a=2") is not None
    compared = {comparison.point for comparison in part.comparisons}
    assert compared == {"ties a=6", "ties a=7", "ties a=8", "slerp a=2"}


def test_of_very_many_points_all_are_compared_that_were_chosen_elsewhere(monkeypatch):
    many = [point(f"ties a={n}", 0.6 + n / 30, n) for n in range(9)]
    monkeypatch.setattr(sys.modules[conclude.__module__], "MOST_COMPARED", 4)
    part = conclude(many, metric="accuracy", inputs=INPUTS, base="base", **QUICK)

    assert len({comparison.point for comparison in part.comparisons}) == 9
    assert not any("The best 4" in note for note in part.notes)
