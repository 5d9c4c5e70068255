"""Races: which examples are measured first, who is dropped, and how often that is wrong."""

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mecha_exp import EvaluationError, Outcomes
from mecha_exp.errors import ConfigError, Problems
from mecha_exp.evaluation import evaluator, find_evaluator
from mecha_exp.evaluation.racing import HALVING, Dropped, Order, Race, RaceSettings, read_race
from mecha_exp.evaluation.racing.elimination import LOOKS, cannot_catch_up, halved, log_growth
from mecha_exp.evaluation.registry import named_evaluator

NAMES = {"a": [f"a{i}" for i in range(120)], "b": [f"b{i}" for i in range(60)]}
CLUSTERS = {"a": [f"photo {i // 2}" for i in range(120)], "b": [f"photo {i}" for i in range(60)]}


def whole(values: Mapping[str, Sequence[float]]) -> Outcomes:
    return Outcomes(values, examples={task: NAMES[task][: len(v)] for task, v in values.items()})


def clustered(values: Mapping[str, Sequence[float]]) -> Outcomes:
    return Outcomes(values, examples=NAMES, clusters=CLUSTERS)


def some(outcomes: Outcomes, part: Mapping[str, Sequence[int]]) -> Outcomes:
    """What an evaluator returns that measures a part of its examples."""
    return Outcomes.checked_before(
        {task: outcomes.values[task][places] for task, places in part.items()},
        {task: outcomes.examples[task][places] for task, places in part.items()},
        {task: outcomes.clusters[task][places] for task, places in part.items()},
    )


class Sweep:
    """Points with known outcomes, which count how many of them a race measures."""

    def __init__(self, points: Mapping[str, Outcomes]) -> None:
        self.points, self.measured = dict(points), dict.fromkeys(points, 0)

    def measure(self, names, part):
        for name in names:
            self.measured[name] += sum(map(len, part.values()))
        return {name: some(self.points[name], part) for name in names}

    def whole(self, name):
        self.measured[name] += sum(map(len, self.points[name].values.values()))
        return self.points[name]

    @property
    def both(self):
        return self.measure, self.whole


def unasked(name):
    raise AssertionError(f"{name} is measured on all examples in a race by hits")


def race_of(
    points: Mapping[str, Outcomes], *, minimized: bool = False, best: float | None = None, **more
) -> Race:
    order = Order.of(next(iter(points.values())), more.pop("seed", 0))
    return Race(order, RaceSettings(**more), minimized=minimized, best=best)


def hits(random: np.random.Generator, accuracy: float, count: int = 400) -> Outcomes:
    return Outcomes({"all": random.random(count) < accuracy}, examples={"all": np.arange(count)})


@given(seed=st.integers(0, 99), cuts=st.lists(st.integers(0, 60), max_size=5))
def test_the_parts_of_an_order_have_each_example_once_and_clusters_whole(seed, cuts):
    random = np.random.default_rng(seed)
    outcomes = clustered({"a": random.random(120), "b": random.random(60)})
    order = Order.of(outcomes, seed)
    ends = [0, *sorted(cuts), order.clusters]
    parts = [order.part(start, end) for start, end in itertools.pairwise(ends)]

    for task, names in NAMES.items():
        positions = [place for part in parts for place in part.get(task, [])]
        sources = [{CLUSTERS[task][place] for place in part.get(task, [])} for part in parts]
        assert sorted(positions) == list(range(len(names)))
        assert sum(map(len, sources)) == len(set.union(*sources))
    assert order.examples == 180 and order.bounds.sum() == pytest.approx(1)

    added = np.concatenate(
        [
            order.contributions(some(outcomes, part), start, end)
            for part, (start, end) in zip(parts, itertools.pairwise(ends), strict=True)
            if part
        ]
    )
    assert added.sum() == pytest.approx(outcomes.means("score")["score"])
    assert (added <= order.bounds + 1e-12).all()


def test_the_order_is_that_of_the_seed():
    outcomes = whole({"a": [1.0] * 50})
    first, again, other = (Order.of(outcomes, seed).part(0, 10) for seed in (1, 1, 2))

    assert first == again != other


def test_the_growth_of_a_bet_is_the_product_of_its_formula():
    random = np.random.default_rng(0)
    clusters, start, bound = 40, 10, 0.5
    differences = random.uniform(-bound, bound, size=(25, 1))
    past, capital, expected = 0.0, 1.0, []
    excess: list[float] = []
    for t, d in enumerate(differences[:, 0]):
        m = -past / (clusters - t)
        if t >= start:
            early = excess[:start]
            bet = max(np.mean(early), 0) / (np.mean(np.square(early)) + bound**2 / start)
            capital *= 1 + min(bet, 0.9 / (bound + m)) * (d - m)
            expected.append(math.log(capital))
        excess.append(d - m)
        past += d

    assert log_growth(differences, bound, clusters, start)[:, 0] == pytest.approx(expected)


def test_what_the_remaining_examples_cannot_mend_is_behind_for_certain():
    differences = np.array([[0.1, 0.2], [0.1, 0.2]])

    assert cannot_catch_up(differences, 0.3).tolist() == [False, True]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_a_rung_of_successive_halving_keeps_the_best_third(scores):
    dropped = set(halved(np.array(scores)).tolist())
    kept = set(range(len(scores))) - dropped

    assert len(kept) == math.ceil(len(scores) / 3)
    assert all(scores[k] >= scores[d] for k in kept for d in dropped)


def test_what_is_clearly_worse_is_dropped_early_and_the_best_is_measured_throughout():
    random = np.random.default_rng(0)
    points = {"good": hits(random, 0.95), "near": hits(random, 0.88), "bad": hits(random, 0.3)}
    sweep = Sweep(points)

    dropped, errors = race_of(points).run(list(points), *sweep.both)

    assert "bad" in dropped and "good" not in dropped and not errors
    assert dropped["bad"].examples == sweep.measured["bad"] <= 100
    first = Order.of(points["bad"], 0).part(0, dropped["bad"].examples)
    assert dropped["bad"].score == pytest.approx(some(points["bad"], first).means("hits")["hits"])


def test_less_can_be_better():
    random = np.random.default_rng(0)
    points = {"much": hits(random, 0.9), "little": hits(random, 0.2)}

    dropped, _ = race_of(points, minimized=True).run(list(points), *Sweep(points).both)

    assert list(dropped) == ["much"]


def bits(random: np.random.Generator, median: float, easy: np.ndarray | float = 0) -> Outcomes:
    """Log-normal losses: few examples have most of them."""
    drawn = median * np.exp(easy + 0.2 * random.normal(size=400))
    return Outcomes({"all": drawn}, examples={"all": np.arange(400)})


def test_losses_without_a_bound_race_against_a_leader_that_is_measured_whole():
    random = np.random.default_rng(0)
    easy = random.normal(size=400)
    points = {name: bits(random, median, easy) for name, median in {"best": 3, "near": 3.4, "bad": 6}.items()}
    sweep = Sweep(points)

    dropped, errors = race_of(points, minimized=True).run(list(points), *sweep.both)

    assert "bad" in dropped and "best" not in dropped and not errors
    assert dropped["bad"].examples == sweep.measured["bad"] < 200
    assert sweep.measured["best"] == 25 + 400  # the first look, then all at once


def scores(of_bits: Outcomes, most: float) -> Outcomes:
    """The same as a score: what is left of the most."""
    values = {task: most - bits for task, bits in of_bits.values.items()}
    return Outcomes.checked_before(values, of_bits.examples, of_bits.clusters)


@pytest.mark.parametrize("most", [0.0, 64.0])
def test_scores_with_a_best_and_without_a_worst_race_as_their_losses_do(most):
    random = np.random.default_rng(0)
    easy = random.normal(size=400)
    losses = {name: bits(random, median, easy) for name, median in {"best": 3, "near": 3.4, "bad": 6}.items()}
    points = {name: scores(of_bits, most) for name, of_bits in losses.items()}
    sweep, mirrored = Sweep(losses), Sweep(points)
    expected, _ = race_of(losses, minimized=True).run(list(losses), *sweep.both)

    dropped, errors = race_of(points, best=most).run(list(points), *mirrored.both)

    assert mirrored.measured == sweep.measured and not errors
    assert {name: result.examples for name, result in dropped.items()} == {
        name: result.examples for name, result in expected.items()
    }
    assert dropped["bad"].score == pytest.approx(most - expected["bad"].score)


def test_a_nearer_best_drops_a_point_earlier():
    random = np.random.default_rng(0)
    points = {name: scores(bits(random, loss), 0) for name, loss in {"good": 3, "bad": 4}.items()}
    reached = []
    for best in (0.0, 50.0, math.inf):
        sweep = Sweep(points)
        dropped, _ = race_of(points, best=best).run(list(points), *sweep.both)
        reached.append(dropped["bad"].examples if dropped else 400)

    assert reached[0] < reached[1] < reached[2] == 400


def test_a_score_above_the_best_is_refused():
    points = {"one": whole({"a": [2.5] * 64}), "two": whole({"a": [-7.0] * 64})}

    dropped, errors = race_of(points, best=2.0).run(list(points), *Sweep(points).both)

    assert str(errors["one"]) == (
        "evaluator.race=true needs outcomes of at most 2, and an example of the task 'a' has 2.5. Say the "
        "best that there can be with evaluator.race_best, or use evaluator.race=halving, which needs no "
        "bounds."
    )
    assert list(errors) == ["one"] and not dropped


def test_a_leader_that_was_measured_whole_is_never_dropped():
    """It leads by its first examples, and is the worst on all."""
    random = np.random.default_rng(0)
    points = {name: bits(random, median) for name, median in {"best": 1, "bad": 4, "misleading": 1}.items()}
    first = Order.of(points["best"], 0).part(0, 25)["all"]
    values = np.where(np.isin(np.arange(400), first), 0.5, 9.0)
    points["misleading"] = Outcomes({"all": values}, examples={"all": np.arange(400)})
    sweep = Sweep(points)

    dropped, _ = race_of(points, minimized=True).run(list(points), *sweep.both)

    assert list(dropped) == ["bad"] and sweep.measured["misleading"] == 25 + 400


def test_losses_of_a_later_pass_race_against_the_best_of_earlier_ones():
    random = np.random.default_rng(0)
    medians = {"good": 1, "bad": 4, "worse": 5, "new": 0.5}
    points = {name: bits(random, median) for name, median in medians.items()}
    race = race_of(points, minimized=True)
    assert list(race.run(["good", "bad"], *Sweep(points).both)[0]) == ["bad"]
    race.complete("good", points["good"])
    sweep = Sweep(points)

    dropped, _ = race.run(["worse", "new"], *sweep.both)

    assert list(dropped) == ["worse"] and sweep.measured["good"] == 0


def test_a_leader_with_an_infinite_loss_is_no_rival_of_others():
    random = np.random.default_rng(0)
    values = np.full(400, 0.1)
    values[Order.of(bits(random, 1), 0).part(399, 400)["all"]] = math.inf  # the last of all
    broken = Outcomes({"all": values}, examples={"all": np.arange(400)})
    points = {"broken": broken, "good": bits(random, 1), "bad": bits(random, 4)}

    dropped, errors = race_of(points, minimized=True).run(list(points), *Sweep(points).both)

    assert list(dropped) == ["bad"] and not errors


def test_a_leader_that_cannot_be_measured_whole_leaves_the_race():
    random = np.random.default_rng(0)
    points = {"broken": bits(random, 0.5), "good": bits(random, 1), "bad": bits(random, 4)}
    failure = EvaluationError("no memory")

    def measure_whole(name):
        return failure if name == "broken" else points[name]

    dropped, errors = race_of(points, minimized=True).run(list(points), Sweep(points).measure, measure_whole)

    assert list(dropped) == ["bad"] and errors == {"broken": failure}


def test_a_loss_below_0_is_refused():
    points = {"one": whole({"a": [-2.5] * 64}), "two": whole({"a": [1.5] * 64})}

    _, errors = race_of(points, minimized=True).run(list(points), *Sweep(points).both)

    assert str(errors["one"]) == (
        "evaluator.race=true needs outcomes of at least 0, such as bits, and an example of the task 'a' has "
        "-2.5. Say the best that there can be with evaluator.race_best, or use evaluator.race=halving, which "
        "needs no bounds."
    )


@pytest.mark.parametrize("alike", [0.0, 0.9])
def test_the_best_by_losses_is_dropped_in_at_most_alpha_of_sweeps_without_an_effect(alike):
    random = np.random.default_rng(5)
    alpha, sweeps, lost, left = 0.2, 100, 0, 0
    for seed in range(sweeps):
        easy = random.normal(size=160) * math.sqrt(alike)
        drawn = np.exp(easy + random.normal(size=(6, 160)) * math.sqrt(1 - alike))
        names = {"all": np.arange(160)}
        points = {str(i): Outcomes({"all": row}, examples=names) for i, row in enumerate(drawn)}
        race = race_of(points, alpha=alpha, seed=seed, minimized=True)
        dropped, _ = race.run(list(points), *Sweep(points).both)
        lost += str(drawn.mean(axis=1).argmin()) in dropped
        left += len(points) - len(dropped)

    assert lost <= alpha * sweeps + 3 * math.sqrt(alpha * (1 - alpha) * sweeps)
    assert left < 6 * sweeps  # some are dropped


def test_a_leader_whose_loss_is_in_one_document_does_not_drop_the_best():
    """In most orders it leads until this document comes, which only its whole outcomes tell of."""
    smooth, risky = np.full(160, 1.05), np.append(np.ones(159), 30.0)
    names = {"all": np.arange(160)}
    points = {
        name: Outcomes({"all": v}, examples=names) for name, v in {"best": smooth, "led": risky}.items()
    }
    races = [race_of(points, seed=seed, alpha=0.2, minimized=True) for seed in range(100)]

    dropped = [race.run(list(points), *Sweep(points).both)[0] for race in races]

    assert sum("best" in names for names in dropped) <= 20
    assert sum("led" in names for names in dropped) > 0


def test_one_point_alone_is_not_measured_in_parts():
    points = {"only": hits(np.random.default_rng(0), 0.5)}
    sweep = Sweep(points)

    assert race_of(points).run(["only"], *sweep.both) == ({}, {})
    assert sweep.measured == {"only": 0}


def test_a_later_pass_races_against_the_best_of_earlier_ones():
    random = np.random.default_rng(0)
    points = {"good": hits(random, 0.9), "bad": hits(random, 0.4), "worse": hits(random, 0.3)}
    race = race_of(points)
    race.run(["good", "bad"], *Sweep(points).both)
    race.complete("good", points["good"])

    dropped, _ = race.run(["worse"], *Sweep(points).both)

    assert list(dropped) == ["worse"]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999))
def test_a_better_point_of_a_later_pass_is_kept(seed):
    random = np.random.default_rng(seed)
    points = {"a": hits(random, 0.5), "b": hits(random, 0.4), "best": hits(random, 0.8)}
    race = race_of(points, seed=seed)
    race.run(["a", "b"], *Sweep(points).both)
    race.complete("a", points["a"])

    assert race.run(["best"], *Sweep(points).both) == ({}, {})


@pytest.mark.parametrize("unequal", [False, True], ids=["equal clusters", "unequal clusters"])
def test_the_best_is_dropped_in_at_most_alpha_of_sweeps_without_an_effect(unequal):
    """Points of one accuracy, whose best is best by chance, and as hard to keep as can be."""
    random = np.random.default_rng(4)
    alpha, sweeps, lost = 0.2, 100, 0
    for seed in range(sweeps):
        easy = random.random(180)
        values = {str(i): (easy + random.random(180) * 0.5 > 0.6).astype(float) for i in range(6)}
        split = {name: {"a": v[:120], "b": v[120:]} for name, v in values.items()}
        points = {name: (clustered if unequal else whole)(v) for name, v in split.items()}
        scores = {name: o.means("score")["score"] for name, o in points.items()}
        best = max(scores, key=scores.__getitem__)
        lost += best in race_of(points, alpha=alpha, seed=seed).run(list(points), *Sweep(points).both)[0]

    assert lost <= alpha * sweeps + 3 * math.sqrt(alpha * (1 - alpha) * sweeps)


@pytest.mark.parametrize(("looks", "first", "second"), [((1 / 12, 1 / 4), 30, 90), ((1 / 9, 1 / 3), 40, 120)])
def test_successive_halving_measures_most_points_until_its_first_look(looks, first, second):
    random = np.random.default_rng(0)
    points = {str(i): hits(random, 0.5 + i / 40, 360) for i in range(18)}
    sweep = Sweep(points)

    dropped, _ = race_of(points, rule=HALVING, looks=looks).run(list(points), *sweep.both)

    assert sorted(d.examples for d in dropped.values()) == [first] * 12 + [second] * 4
    assert sum(sweep.measured.values()) == 12 * first + 6 * second


def test_outcomes_that_are_not_finite_drop_a_point():
    points = {"good": whole({"a": [1.0] * 64}), "bad": whole({"a": [math.nan] * 64})}

    dropped, errors = race_of(points).run(list(points), *Sweep(points).both)

    assert list(dropped) == ["bad"] and math.isnan(dropped["bad"].score) and not errors


def test_the_test_needs_bounded_outcomes_and_halving_does_not():
    points = {"one": whole({"a": [2.5] * 64}), "two": whole({"a": [1.5] * 64})}

    _, errors = race_of(points).run(list(points), *Sweep(points).both)
    dropped, _ = race_of(points, rule=HALVING).run(list(points), *Sweep(points).both)

    assert str(errors["one"]) == (
        "evaluator.race=true needs outcomes from 0 to 1, such as hits, and an example of the task 'a' has "
        "2.5. Say the best that there can be with evaluator.race_best, or use evaluator.race=halving, which "
        "needs no bounds."
    )
    assert dropped == {"two": Dropped(5, 1.5)}


def test_an_evaluator_that_measures_other_examples_than_it_was_asked_for_is_refused():
    points = {"one": whole({"a": [1.0] * 64}), "two": whole({"a": [0.0] * 64})}

    def everything(names, part):
        return {name: points[name] for name in names}

    def without_names(names, part):
        return {name: Outcomes({"a": [1.0] * len(part["a"])}) for name in names}

    _, all_of_them = race_of(points).run(list(points), everything, unasked)
    _, unnamed = race_of(points).run(list(points), without_names, unasked)

    assert str(all_of_them["one"]).startswith(
        "it was asked for 4 examples of the task 'a' and returned 64. Where"
    )
    assert str(unnamed["two"]).startswith(
        "it was asked for 4 examples of the task 'a' and returned 4 others. "
    )


def test_a_point_that_cannot_be_measured_leaves_the_others_in_the_race():
    points = {"good": whole({"a": [1.0] * 64}), "bad": whole({"a": [0.0] * 64}), "broken": None}
    failure = EvaluationError("no memory")

    def measure(names, part):
        return {n: some(points[n], part) if points[n] else failure for n in names}

    dropped, errors = race_of(points).run(list(points), measure, unasked)

    assert list(dropped) == ["bad"] and errors == {"broken": failure}


@pytest.mark.parametrize("name", ["digits", "mini8"])
def test_a_bundled_evaluator_measures_some_examples_as_it_measures_all(name):
    import torch

    from mecha_exp.examples.digits.network import network_shapes
    from mecha_exp.examples.mini8.network import encoder_shapes

    shapes = network_shapes() if name == "digits" else encoder_shapes()
    random = torch.Generator().manual_seed(0)
    model = {key: torch.randn(shape, generator=random) * 0.1 for key, shape in shapes.items()}
    chosen = find_evaluator(name, shapes)
    everything = chosen.score(model)
    order = Order.of(everything, 0)
    part = order.part(3, 40)

    measured = chosen.score(model, examples=part)

    assert measured.equals(some(everything, part))


def read(main, metric="hits", **given):
    problems = Problems()
    race = read_race(given, main, metric, problems)
    problems.raise_as(ConfigError)
    return race


@pytest.fixture
def racer():
    @evaluator("test_racer", metric="hits", takes_examples=True)
    def score(state_dict, *, examples=None):
        return Outcomes({"all": [1]})

    return named_evaluator("test_racer")


def test_the_settings_of_a_race(racer):
    assert read(racer) is None and read(racer, race=False) is None
    assert read(racer, race=True) == RaceSettings("test", 0.05, 0)
    assert read(racer, race=HALVING, race_alpha=0.1, race_seed=3) == RaceSettings(HALVING, 0.1, 3)
    assert read(racer, race=True, race_best=10) == RaceSettings(best=10.0)
    assert read(racer, race=HALVING) == RaceSettings(HALVING, looks=(1 / 12, 1 / 4))
    assert read(racer, race=HALVING, race_looks=["1/9", 0.5]) == RaceSettings(HALVING, looks=(1 / 9, 0.5))


@pytest.mark.parametrize(
    "given, message",
    [
        (
            {"race": "halvin"},
            "evaluator.race=halvin: expected true, false or halving. Did you mean 'halving'?",
        ),
        ({"race": 3}, "evaluator.race=3: expected true, false or halving."),
        (
            {"race": True, "race_alpha": 1.0},
            "evaluator.race_alpha=1.0: expected a probability between 0 and 1, such as 0.05.",
        ),
        *(
            (
                {"race": True, "race_best": best},
                f"evaluator.race_best={best}: expected the best value that an example can have, such as 10.",
            )
            for best in ("ten", True, math.inf, math.nan, [10])
        ),
        (
            {"race": HALVING, "race_best": 10},
            "evaluator.race_best=10: only evaluator.race=true takes it, and the race is halving. Leave one "
            "of the two out.",
        ),
        (
            {"race_best": 10},
            "evaluator.race_best=10: only evaluator.race=true takes it, and the race is false. Leave one of "
            "the two out.",
        ),
        ({"race_alpha": 0}, "evaluator.race_alpha=0: expected a probability between 0 and 1, such as 0.05."),
        (
            {"race_alpha": None},
            "evaluator.race_alpha=None: expected a probability between 0 and 1, such as 0.05.",
        ),
        ({"race_seed": -1}, "evaluator.race_seed=-1: expected an integer of at least 0."),
        *(
            (
                {"race": HALVING, "race_looks": looks},
                f"evaluator.race_looks={looks}: expected ascending parts of the examples between 0 and 1, "
                "such as [1/12,1/4].",
            )
            for looks in (
                [],
                0.25,
                [0.0],
                [0.5, 0.25],
                [0.25, 0.25],
                [1],
                ["1/0"],
                ["some"],
                [math.nan],
                [True],
            )
        ),
        (
            {"race": True, "race_looks": [0.25]},
            "evaluator.race_looks=[0.25]: only evaluator.race=halving takes it, and the race is true. Leave "
            "one of the two out.",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(racer, given, message):
    with pytest.raises(ConfigError) as raised:
        read(racer, **given)

    assert str(raised.value) == message


def test_a_race_is_refused_where_the_evaluator_cannot_run_one(racer):
    from dataclasses import replace

    with pytest.raises(
        ConfigError, match=r"evaluator.race=true: no evaluator measures the points. Choose one,"
    ):
        read(None, race=True)
    with pytest.raises(ConfigError) as raised:
        read(replace(racer, takes_examples=False), race=True)
    assert str(raised.value) == (
        "evaluator.race=true: the evaluator 'test_racer' cannot measure some of its examples alone, so "
        "points cannot race. Leave it out, or use one of clip_zero_shot, digits, forward, "
        "image_classification, images, lm_eval, mini8, perplexity, test_racer, text_classification; one of "
        "yours can when it declares takes_examples=True."
    )
    with pytest.raises(ConfigError) as raised:
        read(racer, metric="loss", race=HALVING)
    assert str(raised.value) == (
        "evaluator.race=halving: points race by the outcomes of 'test_racer', whose mean is hits, and are "
        "chosen by evaluator.metric=loss. Leave one of the two out."
    )


def test_an_evaluator_that_takes_examples_has_a_parameter_for_them():
    with pytest.raises(ConfigError) as raised:

        @evaluator("test_no_examples", metric="hits", takes_examples=True)
        def score(state_dict):
            return Outcomes({"all": [1]})

    assert str(raised.value) == (
        "test_no_examples: it declares takes_examples=True, so its function needs a parameter "
        "`examples=None`, which has the positions by task of the examples to measure."
    )


def test_the_looks_are_parts_of_the_examples():
    assert all(0 < look < 1 for look in LOOKS) and list(LOOKS) == sorted(LOOKS)
