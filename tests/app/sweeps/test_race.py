"""Sweeps whose points race: the same choice for fewer examples, and nothing half-measured is stored."""

import csv
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mecha_exp import Context, Outcomes, evaluator
from mecha_exp.cli import why
from mecha_exp.errors import ConfigError
from mecha_exp.runs.outcomes import POINT, outcomes_of_sweep

SWEEP = (
    "recipe=weighted_sum",
    "evaluator.name=test_racing",
    "evaluator.weight_stats=false",
    "output=none",
    "-m",
)
ALPHAS = "alpha=0.1,0.3,0.5,0.7,0.9"
RACE = "evaluator.race=true"
EXAMPLES = 320


@pytest.fixture
def measured() -> Counter[float]:
    """How many examples of validation were measured of each alpha."""
    return Counter()


@pytest.fixture(autouse=True)
def racing(measured: Counter[float]) -> None:
    """Registers `test_racing`: a point is the better, the nearer its alpha is to 0.3."""
    noise = np.random.default_rng(0).random((2, EXAMPLES))

    @evaluator("test_racing", metric="hits", splits=("validation", "test"), takes_examples=True)
    def score(state_dict, *, split: str, context: Context, examples=None):
        alpha = float(context.hyperparameters.get("alpha") or 0)
        places = range(EXAMPLES) if examples is None else examples["all"]
        if split == "validation":
            measured[alpha] += len(places)
        right = noise[int(split == "test")] < 0.95 - abs(alpha - 0.3)
        return Outcomes(
            {"all": right[list(places)]}, examples={"all": [f"image {place}" for place in places]}
        )


def rows(sweep: Path) -> dict[str, dict[str, str]]:
    with (sweep / "sweep.csv").open() as file:
        return {row["alpha"]: row for row in csv.DictReader(file)}


def test_a_race_chooses_what_is_chosen_without_one_and_says_who_was_dropped(app, folder, measured):
    assert app(*SWEEP, ALPHAS, "hydra.sweep.dir=all", "store=null").status == 0
    assert {measured[alpha] for alpha in (0.1, 0.3, 0.5, 0.7, 0.9)} == {EXAMPLES}

    outcome = app(*SWEEP, ALPHAS, "hydra.sweep.dir=race", "evaluator.race=true")

    assert outcome.status == 0, outcome.err
    everything, race = rows(folder / "all"), rows(folder / "race")
    assert race["0.3"]["hits"] == everything["0.3"]["hits"]
    assert race["0.3"]["test/hits"] == everything["0.3"]["test/hits"] != ""
    assert (race["0.3"]["status"], race["0.3"]["race/examples"]) == ("FINISHED", f"{EXAMPLES}.0")
    assert (race["0.9"]["status"], race["0.9"]["hits"], race["0.9"]["test/hits"]) == ("DROPPED", "", "")
    assert 0 < float(race["0.9"]["race/examples"]) < EXAMPLES / 2
    assert 0 < float(race["0.9"]["race/hits"]) < 0.6
    assert "dropped after " in outcome.out
    assert " points after " in " ".join(outcome.out.split())
    outcomes = [m for m in outcomes_of_sweep(folder / "race") if m.role == POINT]
    assert {len(m.by_metric["hits"]["validation"].values["all"]) for m in outcomes} == {EXAMPLES}
    said = " ".join(outcome.out.split())
    assert re.search(r"the (one|best of the \d) that a race left of 5 settings on 'validation'", said)


@pytest.mark.heavy
def test_a_dropped_point_stays_dropped_and_is_never_taken_for_a_whole_one(app, folder, measured):
    race = (*SWEEP, ALPHAS, "hydra.sweep.dir=race", "evaluator.race=true")
    app(*race)
    dropped = [alpha for alpha, row in rows(folder / "race").items() if row["status"] == "DROPPED"]
    measured.clear()

    again = app(*race)
    assert again.status == 0 and "nothing to do" in again.out
    assert dropped and not measured

    app(*race, "evaluator.race_alpha=0.5")  # is another race
    assert set(measured) == set(map(float, dropped))
    measured.clear()
    remaining = [alpha for alpha, row in rows(folder / "race").items() if row["status"] == "DROPPED"]

    whole = app(*SWEEP, ALPHAS, "hydra.sweep.dir=race")
    assert whole.status == 0, whole.err
    assert {row["status"] for alpha, row in rows(folder / "race").items() if alpha} == {"FINISHED"}
    assert dict(measured) == {float(alpha): EXAMPLES for alpha in remaining}


def test_later_passes_race_against_the_best_of_earlier_ones(app, folder, measured, monkeypatch):
    monkeypatch.setattr("mecha_exp.app.batch.MOST_POINTS", 2)

    outcome = app(*SWEEP, "alpha=0.3,0.4,0.9,1.0,0.8", "hydra.sweep.dir=race", "evaluator.race=true")

    assert outcome.status == 0, outcome.err
    statuses = {alpha: row["status"] for alpha, row in rows(folder / "race").items()}
    assert statuses["0.3"] == "FINISHED" and {statuses[a] for a in ("0.9", "1.0", "0.8")} == {"DROPPED"}


def test_saved_models_that_another_evaluator_measures_race_too(app, folder):
    saved = ("recipe=weighted_sum", "evaluator.weight_stats=false", "output=file", ALPHAS, "-m")
    app(*saved, "evaluator=none", "hydra.sweep.dir=saved")

    outcome = app(*saved, "evaluator.name=test_racing", "hydra.sweep.dir=race", "evaluator.race=true")

    assert outcome.status == 0, outcome.err
    assert rows(folder / "race")["0.9"]["status"] == "DROPPED"


def test_points_that_cannot_be_measured_fail_and_the_others_race(app, folder):
    @evaluator("test_racing_fails", metric="hits", takes_examples=True)
    def score(state_dict, *, context: Context, examples=None):
        if context.hyperparameters.get("alpha") == 0.5:
            raise ValueError("too middling")
        places = range(EXAMPLES) if examples is None else examples["all"]
        hit = float(context.hyperparameters.get("alpha") == 0.3)
        return Outcomes({"all": [hit] * len(places)}, examples={"all": [str(place) for place in places]})

    outcome = app(
        *SWEEP, ALPHAS, "evaluator.name=test_racing_fails", "hydra.sweep.dir=race", "evaluator.race=true"
    )

    statuses = {alpha: row["status"] for alpha, row in rows(folder / "race").items() if alpha}
    assert outcome.status == 1 and "too middling" in outcome.out + outcome.err
    assert (statuses["0.5"], statuses["0.3"], statuses["0.9"]) == ("FAILED", "FINISHED", "DROPPED")


def test_an_evaluator_without_outcomes_cannot_race(app, folder):
    @evaluator("test_racing_numbers", metric="hits", takes_examples=True)
    def score(state_dict, *, examples=None):
        return {"hits": 1.0}

    outcome = app(*SWEEP, "alpha=0.1,0.3", "evaluator.name=test_racing_numbers", "evaluator.race=true")

    assert outcome.status == 1
    words = " ".join(outcome.err.split())
    assert (
        "the evaluator 'test_racing_numbers' declares takes_examples=True and returns no outcomes, by which "
        "points race. Return Outcomes, or leave evaluator.race out." in words
    )


def test_effects_are_not_computed_of_the_points_that_are_left(app, folder):
    app(*SWEEP, "alpha=0.3,0.5,0.9", "hydra.sweep.dir=race", "evaluator.race=true")

    with pytest.raises(
        ConfigError, match=r"needs the numbers of all points, and a race dropped \d of 3\. Run the"
    ):
        why.main(["race"])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ("recipe=weighted_sum", "alpha=0.3", "evaluator.race=true"),
            "evaluator.race=true: one point has nothing to race against. Leave it out, or list several "
            "values with -m.",
        ),
        (
            ("recipe=weighted_sum", "alpha=0.3,0.5", "-m", "evaluator.race=halving", "hydra/launcher=basic"),
            "evaluator.race=halving: hydra/launcher=basic runs points apart from each other, and "
            "points that race run together. Leave one of the two out.",
        ),
        (
            (
                "recipe=dare_linear",
                "sweep.replicate=[seed]",
                "sweep.replicates=2",
                "-m",
                "evaluator.race=true",
            ),
            "evaluator.race=true: seed makes replicates, and the mean of a setting needs all of them, while "
            "a race drops points. Leave the race or the replicates out (sweep.replicate=[]).",
        ),
        (
            ("recipe=weighted_sum", "sweep=leave_one_block_out", "evaluator.race=true"),
            "evaluator.race=true: sweep=leave_one_block_out asks for effects, which need the numbers of all "
            "points, and a race drops points. Leave it out.",
        ),
        (
            ("sweep=search", "alpha=interval(0,1)", "evaluator.metric=[accuracy,accuracy/0_3]", RACE),
            "evaluator.race=true: points race by the outcomes of 'digits', whose mean is accuracy, and are "
            "chosen by evaluator.metric=accuracy,accuracy/0_3. Leave one of the two out.",
        ),
        (
            ("alpha=0.3,0.5", "-m", "evaluator.race=maybe"),
            "evaluator.race=maybe: expected true, false or halving.",
        ),
        (
            ("alpha=0.3,0.5", "-m", "evaluator.race=true", "evaluator.race_alpha=2"),
            "evaluator.race_alpha=2: expected a probability between 0 and 1, such as 0.05.",
        ),
        (
            ("alpha=0.3,0.5", "-m", "evaluator.race=halving", "evaluator.race_looks=[1/3,1/9]"),
            "evaluator.race_looks=['1/3', '1/9']: expected ascending parts of the examples between 0 and 1, "
            "such as [1/12,1/4].",
        ),
        (
            ("alpha=0.3,0.5", "-m", "evaluator=weight_stats", "evaluator.race=true"),
            "evaluator.race=true: no evaluator measures the points. Choose one, or leave it out.",
        ),
    ],
)
def test_a_race_that_cannot_be_is_refused_before_anything_is_merged(
    app, folder, passes_run, arguments, message
):
    outcome = app(*arguments, "output=none")

    assert outcome.status == 1 and not passes_run
    assert message in " ".join(outcome.err.split())


def test_halving_with_other_looks_is_another_race(app, folder, measured):
    race = (*SWEEP, ALPHAS, "hydra.sweep.dir=race", "evaluator.race=halving")
    app(*race)
    assert {row["race/examples"] for row in rows(folder / "race").values() if row["status"] == "DROPPED"} == {
        "27.0",  # a twelfth
        "80.0",  # a quarter
    }
    measured.clear()
    assert app(*race).status == 0 and not measured

    assert app(*race, "evaluator.race_looks=[1/4]").status == 0
    dropped = [row for row in rows(folder / "race").values() if row["status"] == "DROPPED"]
    assert measured and {row["race/examples"] for row in dropped} == {"80.0"}


def test_halving_as_a_choice_of_points_is_a_race_by_halving(app, folder):
    alphas = "alpha=" + ",".join(f"{i / 20:g}" for i in range(1, 19))
    words = [word for word in SWEEP if word != "-m"]

    assert app("sweep=halving", *words, alphas, "hydra.sweep.dir=short").status == 0
    assert app(*SWEEP, alphas, "evaluator.race=halving", "hydra.sweep.dir=long", "store=null").status == 0

    tables = [rows(folder / name) for name in ("short", "long")]
    status = [{alpha: row["status"] for alpha, row in table.items()} for table in tables]
    assert status[0] == status[1]
    assert Counter(status[0].values())["DROPPED"] > 9


@pytest.mark.parametrize("mode", ["gradient", "greedy_soup"])
def test_sweeps_that_make_their_points_do_not_race(app, folder, mode):
    outcome = app(f"sweep={mode}", "recipe=task_arithmetic", "evaluator.race=true", "output=none")

    assert outcome.status == 1
    assert f"evaluator.race=true: sweep={mode} needs the number of every point" in outcome.err


NET = """
import torch

def make():
    return torch.nn.Linear(3, 4)
"""


def test_points_race_by_their_agreement_and_are_judged_by_their_divergence(app, folder):
    (folder / "net.py").write_text(NET)
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        save_file(torch.nn.Linear(3, 4).state_dict(), folder / f"{name}.safetensors")
    np.savez(folder / "x.npz", input=np.random.default_rng(3).normal(size=(400, 3)))
    sweep = (
        "recipe=weighted_sum",
        "models.base=a.safetensors",
        "models.experts=[b.safetensors]",
        "alpha=0.1,0.4,0.5,5.0,9.0",
        "evaluator=forward",
        "evaluator.data=x.npz",
        "evaluator.module=net.py:make",
        "evaluator.device=cpu",
        "output=none",
        "-m",
    )

    race = app(*sweep, RACE, "hydra.sweep.dir=race")
    whole = app(*sweep, "evaluator.metric=kl", "evaluator.direction=minimize", "hydra.sweep.dir=whole")

    assert (race.status, whole.status) == (0, 0), race.err + whole.err
    said, by_kl = (" ".join(outcome.out.split()) for outcome in (race, whole))
    assert "A race dropped 4 of 5 points" in said
    assert rows(folder / "race")["0.1"]["race/examples"] == "800.0"
    assert "'alpha=0.5' has kl 0.03791 on 'all' (95 % interval" in by_kl
    assert "over 800 examples, 400 clusters" in by_kl
    assert {metric for model in outcomes_of_sweep(folder / "whole") for metric in model.by_metric} == {
        "agreement",
        "kl",
    }
