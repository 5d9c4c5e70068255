"""Trials that race: dropped ones are told to Optuna as pruned, and only whole ones can be chosen."""

import csv
import math
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from mecha_exp import Context, Outcomes, evaluator
from mecha_exp.app.search.samplers import Sampler
from mecha_exp.app.search.space import Dimension, Space
from mecha_exp.app.search.storage import open_shared
from mecha_exp.app.search.study import next_trials
from mecha_exp.app.search.trials import Trial
from mecha_exp.evaluation.racing import Dropped

optuna = pytest.importorskip("optuna", minversion="4")

EXAMPLES = 320
SEARCH = (
    *("sweep=search", "sweep.trials=16", "sweep.batch=8", "name=one", "hydra.sweep.dir=s"),
    *("recipe=weighted_sum", "alpha=interval(0,1)", "output=none"),
    *("evaluator.name=test_search_race", "evaluator.weight_stats=false"),
)


@pytest.fixture(autouse=True)
def measured() -> Counter[float]:
    """Registers `test_search_race`, best at alpha 0.3; counts the examples of validation by alpha."""
    noise, counts = np.random.default_rng(0).random((2, EXAMPLES)), Counter()

    @evaluator("test_search_race", metric="hits", splits=("validation", "test"), takes_examples=True)
    def score(state_dict, *, split: str, context: Context, examples=None):
        alpha = float(context.hyperparameters.get("alpha") or 0)
        places = range(EXAMPLES) if examples is None else examples["all"]
        if split == "validation":
            counts[alpha] += len(places)
        right = noise[int(split == "test")] < 0.95 - abs(alpha - 0.3)
        return Outcomes({"all": right[list(places)]}, examples={"all": [str(place) for place in places]})

    return counts


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "s" / "sweep.csv").open() as file:
        points = [row for row in csv.DictReader(file) if row["status"] != "REFERENCE"]
    return sorted(points, key=lambda row: int(row["point"]))


def trials_of(journal: Path) -> list:
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(journal)))
    return optuna.load_study(study_name="one", storage=storage).trials


@pytest.mark.parametrize("storage", [None, "shared.log"])
def test_a_dropped_trial_is_pruned_and_the_chosen_one_has_all_examples(app, folder, measured, storage):
    words = (*SEARCH, "evaluator.race=true", *([f"sweep.storage={storage}"] if storage else []))

    outcome = app(*words)

    assert outcome.status == 0, outcome.err
    table, trials = rows(folder), trials_of(Path(storage or "s/study.log"))
    assert [{"DROPPED": "PRUNED", "FINISHED": "COMPLETE"}[row["status"]] for row in table] == [
        trial.state.name for trial in trials
    ]
    dropped = [(row, trial) for row, trial in zip(table, trials, strict=True) if row["status"] == "DROPPED"]
    assert 0 < len(dropped) < 16
    for row, trial in dropped:
        reached = {int(float(row["race/examples"])): float(row["race/hits"])}
        assert trial.intermediate_values == pytest.approx(reached) and row["hits"] == row["test/hits"] == ""
    reported = [row for row in table if row["test/hits"]]
    assert [row["race/examples"] for row in reported] == [f"{EXAMPLES}.0"]
    assert float(reported[0]["hits"]) == max(float(row["hits"]) for row in table if row["hits"])
    said = " ".join(outcome.out.split())
    assert re.search(r"the best of the \d+ that a race left of 16 settings on 'validation'", said)
    assert "at most 0.05, as far as trials do not depend on what was dropped before them" in said

    measured.clear()
    again = app(*words)
    assert again.status == 0 and not measured and "nothing to do" in again.out


def test_the_same_search_without_the_race_measures_what_was_dropped(app, folder, measured):
    app(*SEARCH, "evaluator.race=true")
    dropped = [float(row["alpha"]) for row in rows(folder) if row["status"] == "DROPPED"]
    measured.clear()

    assert app(*SEARCH).status == 0

    assert {row["status"] for row in rows(folder)} == {"FINISHED"}
    assert dropped and dict(measured) == dict.fromkeys(dropped, EXAMPLES)
    trials = trials_of(Path("s/study.log"))
    assert {t.user_attrs["point"] for t in trials if t.state.name == "COMPLETE"} == set(range(16))


LINE = Space((Dimension("a", low=0, high=1), Dimension("b", low=0, high=1)), {"": {"a": "0", "b": "0"}})


def test_a_study_that_processes_share_keeps_what_a_dropped_trial_reached(folder):
    study = open_shared("study.log", "two", LINE, ["maximize"], {})
    with study.at_work():
        study.claim(folder, 2, 2, lambda trials, count: [Trial({"a": 0.1, "b": 0.2})] * 2, lambda entry: None)
        study.tell({0: Dropped(40, 0.25), 1: (0.5,)}, folder)

        assert [entry.trial.outcome for entry in study.entries()] == [Dropped(40, 0.25), (0.5,)]
        study.tell({0: (0.75,)}, folder)  # measured whole by a start without a race
        assert [entry.trial.outcome for entry in study.entries()] == [(0.75,), (0.5,)]


def test_tpe_looks_less_where_trials_were_dropped():
    def asked(is_told: bool) -> float:
        """The mean of a over 20 trials, after ten good ones over all of a and ten bad ones above 0.5."""
        good = [Trial({"a": i / 10, "b": i / 10}, {}, (0.9,)) for i in range(10)]
        bad = [Trial({"a": 0.5 + i / 20, "b": i / 10}, {}, None) for i in range(10)]
        told = [trial.told(Dropped(40, 0.1)) for trial in bad] if is_told else bad
        later = next_trials(LINE, Sampler("tpe", 0), ["maximize"], [*good, *told], 20)
        return float(np.mean([trial.parameters["a"] for trial in later]))

    assert asked(is_told=True) < asked(is_told=False) - 0.1


FIDELITY = (
    *("sweep=search", "sweep.trials=24", "sweep.batch=8", "name=one", "hydra.sweep.dir=s"),
    *("recipe=weighted_sum", "alpha=interval(0,1)", "output=none"),
    *("evaluator.name=test_fidelity", "evaluator.weight_stats=false", "evaluator.limit=90"),
)


@pytest.fixture
def limits() -> Counter[int]:
    """Registers `test_fidelity`, one number a point; counts the measurements of merges by their limit."""
    counts = Counter()

    @evaluator("test_fidelity", metric="score", fidelities=("limit",))
    def score(state_dict, *, context: Context, limit: int | None = None):
        alpha = context.hyperparameters.get("alpha")
        if alpha is not None:
            counts[limit] += 1
        return {"score": -abs((alpha or 0) - 0.3) + 1 / (limit or 1000)}

    return counts


@pytest.mark.parametrize("workers", ["null", pytest.param("1", marks=pytest.mark.heavy)])
def test_bad_trials_are_stopped_at_a_low_fidelity(app, folder, limits, workers):
    if workers == "1":
        plugin = "from mecha_exp import evaluator\n\n\n"
        plugin += '@evaluator("in_file", metric="score", fidelities=("limit",))\n'
        plugin += "def score(state_dict, *, limit: int = 90):\n"
        plugin += '    return {"score": float(state_dict["fc1.weight"].std()) + 1 / limit}\n'
        Path("plugin.py").write_text(plugin)
    words = [w for w in FIDELITY if workers == "null" or not w.startswith("evaluator.name=")]
    words += [] if workers == "null" else ["plugins=[plugin.py]", "evaluator.name=in_file"]

    outcome = app(*words, f"evaluator.workers={workers}", "sweep.fidelity=limit")

    assert outcome.status == 0, outcome.err
    table, trials = rows(folder), trials_of(Path("s/study.log"))
    states = Counter(row["status"] for row in table)
    assert states["DROPPED"] > 6 and states["FINISHED"] > 2 and sum(states.values()) == 24
    assert Counter(trial.state.name for trial in trials)["PRUNED"] == states["DROPPED"]
    for row, trial in zip(table, trials, strict=True):
        at = {"DROPPED": {10.0, 30.0}, "FINISHED": {90.0}}[row["status"]]
        assert float(row["race/fidelity"]) in at
        assert set(trial.intermediate_values) <= {10, 30} and (row["score"] == "") == (90.0 not in at)
    if workers == "null":
        assert limits[90] == states["FINISHED"] and limits[10] + limits[30] > limits[90]
    said = " ".join(outcome.out.split())
    assert f"Hyperband dropped {states['DROPPED']} of 24 points at limit=10 or limit=30; the" in said
    assert "dropped at limit=10" in said

    limits.clear()
    assert "nothing to do" in app(*words, f"evaluator.workers={workers}", "sweep.fidelity=limit").out
    assert not limits


@pytest.mark.parametrize("storage", [None, "shared.log"])
def test_a_number_that_is_not_finite_has_failed_and_is_told_once(app, folder, storage):
    @evaluator("test_fidelity", metric="score", fidelities=("limit",))
    def score(state_dict, *, context: Context, limit: int):
        return {"score": math.nan if limit < 90 and context.hyperparameters.get("alpha") else 1.0}

    words = (*FIDELITY, "sweep.fidelity=limit", *([f"sweep.storage={storage}"] if storage else []))
    app(*words)
    journal = Path(storage or "s/study.log")
    states = Counter(trial.state.name for trial in trials_of(journal))
    assert states["FAIL"] > 12 and set(states) == {"FAIL", "COMPLETE"}

    assert "nothing to do" in app(*words).out

    assert Counter(trial.state.name for trial in trials_of(journal)) == states


def test_a_trial_that_failed_at_a_low_fidelity_is_left_alone_if_asked(app, folder):
    asked = []

    @evaluator("test_fidelity", metric="score", fidelities=("limit",))
    def score(state_dict, *, context: Context, limit: int):
        if context.hyperparameters.get("alpha") and limit < 90:
            asked.append(limit)
            raise ValueError("it is not the day")
        return {"score": 1.0}

    words = (*FIDELITY, "sweep.fidelity=limit")
    app(*words)
    assert len(asked) > 12
    asked.clear()

    again = app(*words, "rerun=never")

    assert not asked and "It failed before. rerun=failed tries it again." in again.err.replace("\n", " ")


def test_a_trial_that_was_dropped_by_another_metric_races_again(app, folder):
    @evaluator("test_fidelity", metric="score", fidelities=("limit",))
    def score(state_dict, *, context: Context, limit: int):
        alpha = float(context.hyperparameters.get("alpha") or 0)
        return {"score": -abs(alpha - 0.3), "other": 10 + alpha}

    app(*FIDELITY, "sweep.fidelity=limit")
    app(*FIDELITY, "sweep.fidelity=limit", "evaluator.metric=other", "evaluator.direction=maximize")

    for row, trial in zip(rows(folder), trials_of(Path("s/study.log"))[-24:], strict=True):
        told = trial.value if row["other"] else max(trial.intermediate_values.items())[1]
        assert told == pytest.approx(10 + float(row["alpha"]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("sweep.fidelity=limit", "evaluator.limit=null"), "evaluator.limit=None, and points are first"),
        (("sweep.fidelity=limits",), "'test_fidelity' has no such fidelity. Did you mean 'limit'?"),
        (("evaluator.race=true",), "A search can stop trials by sweep.fidelity=limit."),
        (
            ("sweep.fidelity=limit", "hydra/launcher=basic"),
            "sweep.fidelity=limit: hydra/launcher=basic runs points apart from each other, and points that",
        ),
        (
            (
                "sweep.fidelity=limit",
                "evaluator.also=[{name:test_fidelity,as:b}]",
                "evaluator.metric=b/score",
            ),
            "drops points by a number of the main evaluator, and evaluator.metric=b/score is of another one.",
        ),
    ],
)
def test_what_cannot_be_stopped_early_is_said_before_any_work(
    app, folder, limits, passes_run, words, message
):
    outcome = app(*FIDELITY, *words)

    assert outcome.status == 1 and not passes_run
    assert message in " ".join(outcome.err.split())
    assert not Path("s").exists()
