"""Races by fidelity: who goes on is who Optuna's pruner lets go on, and what cannot race is refused."""

import math
import random
from collections import Counter
from collections.abc import Callable

import pytest

from mecha_exp import evaluator
from mecha_exp.entry_points import announced
from mecha_exp.errors import ConfigError, EvaluationError, Problems
from mecha_exp.evaluation import Evaluation, registry
from mecha_exp.evaluation.racing import Dropped, Fidelity, Hyperband, read_fidelity
from mecha_exp.evaluation.racing.fidelity import bracket_of
from mecha_exp.evaluation.registry import all_evaluators, named_evaluator

NAMES = [f"point {number}" for number in range(400)]


def told(scores: Callable[[str, int], float]) -> Callable:
    return lambda names, value: {name: scores(name, value) for name in names}


@pytest.mark.parametrize("minimized", [False, True])
def test_one_by_one_the_first_bracket_drops_what_optunas_pruner_prunes(minimized):
    optuna = pytest.importorskip("optuna", minversion="4")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=10, reduction_factor=3)
    study = optuna.create_study(direction="minimize" if minimized else "maximize", pruner=pruner)
    ours, chance = Hyperband(Fidelity("limit", 90), minimized=minimized), random.Random(0)
    for name in [name for name in NAMES if bracket_of(name) == 0][:120]:
        scores, trial, pruned = {10: chance.random(), 30: chance.random()}, study.ask(), {}
        for step, score in scores.items():
            trial.report(score, step)
            if not pruned and trial.should_prune():
                pruned = {name: Dropped(step, score)}
        study.tell(trial, 0.0)
        assert ours.run([name], told(lambda _, value, scores=scores: scores[value])) == (pruned, {})


def test_brackets_share_the_points_as_hyperband_does():
    counts = Counter(map(bracket_of, NAMES))

    assert [counts[bracket] / len(NAMES) for bracket in range(3)] == pytest.approx(
        [9 / 17, 5 / 17, 3 / 17], abs=0.05
    )


def test_a_pass_measures_a_bracket_from_its_rung_on_and_some_of_each_are_left():
    asked: dict[int, list[str]] = {}

    def measure(names, value):
        asked[value] = list(names)
        return {name: float(NAMES.index(name)) for name in names}

    dropped, errors = Hyperband(Fidelity("limit", 100), minimized=False).run(NAMES[:60], measure)

    assert not errors and list(asked) == [11, 33]
    assert {bracket_of(name) for name in asked[11]} == {0}
    assert {bracket_of(name) for name in asked[33]} == {0, 1}
    assert not set(dropped) & {name for name in NAMES[:60] if bracket_of(name) == 2}
    for bracket in (0, 1):
        names = [name for name in NAMES[:60] if bracket_of(name) == bracket]
        kept = [name for name in names if name not in dropped]
        assert 0 < len(kept) < len(names) / 2 and kept == names[-len(kept) :], "the best are left"
    assert {result.examples for result in dropped.values()} == {11, 33}


def test_a_number_that_is_not_finite_is_dropped_and_an_error_is_reported():
    first, second, third = [name for name in NAMES if bracket_of(name) == 0][:3]
    failure = EvaluationError("no")
    results = {first: math.nan, second: failure, third: 0.5}

    dropped, errors = Hyperband(Fidelity("limit", 90), minimized=False).run(
        [first, second, third], lambda names, value: {name: results[name] for name in names}
    )

    assert list(dropped) == [first] and math.isnan(dropped[first].score) and errors == {second: failure}


def test_every_evaluator_that_comes_along_with_a_limit_declares_it():
    known = {name: e for name, e in all_evaluators().items() if name in announced(registry.GROUP)}

    assert (
        {name for name, e in known.items() if "limit" in e.parameters}
        == {name for name, e in known.items() if "limit" in e.fidelities}
        >= {"lm_eval", "perplexity", "text_classification", "clip_zero_shot", "image_classification"}
    )


def read(parameters=None, metrics=("score",), main="test_faithful", **settings):
    problems = Problems()
    entry = named_evaluator(main) if main else None
    evaluations = [Evaluation(entry, parameters or {})] if entry else []
    found = read_fidelity(settings, evaluations, metrics, problems)
    problems.raise_as(ConfigError)
    return found


@pytest.fixture(autouse=True)
def faithful():
    @evaluator("test_faithful", metric="score", fidelities=("limit",))
    def score(state_dict, *, limit: int | None = None):
        return {"score": 1.0}

    @evaluator("test_whole", metric="score")
    def whole(state_dict):
        return {"score": 1.0}


def test_the_rungs_are_a_ninth_and_a_third():
    found = read({"limit": 100}, fidelity="limit")

    assert found == Fidelity("limit", 100) and found.rungs == (11, 33)
    assert read({"limit": 100}) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"main": None, "fidelity": "limit"},
            "sweep.fidelity=limit: no evaluator measures the points. Choose one, or leave it out.",
        ),
        (
            {"fidelity": "limits"},
            "sweep.fidelity=limits: 'test_faithful' has no such fidelity. Did you mean 'limit'?",
        ),
        (
            {"main": "digits", "fidelity": "limit"},
            "sweep.fidelity=limit: 'digits' has no fidelity. It can measure some of its examples: "
            "evaluator.race=true.",
        ),
        (
            {"main": "test_whole", "fidelity": "limit"},
            "sweep.fidelity=limit: 'test_whole' can measure neither with less of a parameter nor some of its "
            "examples, so trials cannot be stopped early. Leave it out; an evaluator of yours can when it "
            "declares fidelities=('limit',) or takes_examples=True.",
        ),
        (
            {"fidelity": "limit", "race": True},
            "sweep.fidelity=limit and evaluator.race=True both drop points. Leave one of them out.",
        ),
        (
            {"fidelity": "limit", "race_looks": [0.25]},
            "sweep.fidelity=limit and evaluator.race_looks=[0.25] both drop points. Leave one of them out.",
        ),
        (
            {"fidelity": "limit", "metrics": ("a", "b")},
            "sweep.fidelity=limit drops points by one metric, and evaluator.metric names a, b.",
        ),
        (
            {"fidelity": "limit", "parameters": {"limit": None}},
            "sweep.fidelity=limit: evaluator.limit=None, and points are first measured with a ninth of it. "
            "Say how much the best ones are measured with at last, a whole number of at least 9: "
            "evaluator.limit=900.",
        ),
        ({"fidelity": "limit", "parameters": {"limit": 8}}, "evaluator.limit=8, and points are first"),
        ({"fidelity": "limit", "parameters": {"limit": 0.5}}, "evaluator.limit=0.5, and points are first"),
    ],
)
def test_what_cannot_race_by_fidelity_is_refused(arguments, message):
    all_evaluators()
    with pytest.raises(ConfigError) as raised:
        read(**arguments)

    assert message in str(raised.value)


def test_a_fidelity_is_a_parameter_of_the_function():
    with pytest.raises(ConfigError) as raised:

        @evaluator("test_no_limit", metric="score", fidelities=("limit",))
        def score(state_dict):
            return {"score": 1.0}

    assert str(raised.value) == (
        "test_no_limit: fidelities=('limit',): its function has no parameter 'limit'."
    )
