"""`sweep.fresh`: the chosen setting is measured once more with seeds that had no part in the choice."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from sweep_folders import sweep_of

from mecha_exp.runs.outcomes import FRESH_FILE, read_outcomes

SWEEP = ("recipe=dare_ties", "density=0.4,0.8", "sweep.replicates=2", "output=none", "tracking=none", "-m")


def test_the_chosen_setting_is_reported_with_new_seeds_on_test_alone(app: Callable, folder: Path):
    outcome = app(*SWEEP, "sweep.fresh=2")
    assert outcome.status == 0, outcome.err
    written = json.loads((sweep_of(folder) / "verdict.json").read_text())
    parts = read_outcomes(sweep_of(folder) / FRESH_FILE)

    chosen = written["selected"]["point"]
    assert {part.name for part in parts} == {f"{chosen} (seed=2)", f"{chosen} (seed=3)"}
    assert {part.split for part in parts} == {"test"}
    means = [
        sum(v.mean() for v in part.outcomes.values.values()) / len(part.outcomes.values) for part in parts
    ]
    assert written["selected"]["estimate"] == pytest.approx(sum(means) / 2)
    assert (written["selected"]["fresh"], written["selected"]["covers"]) == (2, ["examples", "replicates"])
    assert "2 new replicates" in written["sentence"]
    assert len([c for c in written["comparisons"] if (c["point"], c["against"]) == (chosen, "base")]) == 1

    again = app(*SWEEP, "sweep.fresh=2", f"hydra.sweep.dir={sweep_of(folder)}")
    assert again.status == 0 and "new seed" not in again.out


def test_without_new_seeds_the_interval_counts_the_choice_and_names_the_cure(app: Callable, folder: Path):
    outcome = app(*SWEEP)
    written = json.loads((sweep_of(folder) / "verdict.json").read_text())

    assert outcome.status == 0, outcome.err
    assert written["selected"]["covers"] == ["examples", "replicates", "choice"]
    assert any("sweep.fresh=5 measures it again" in note for note in written["notes"])


def test_one_seed_of_a_method_that_draws_is_said_to_be_one(app: Callable, folder: Path):
    outcome = app("recipe=dare_ties", "density=0.4,0.8", "output=none", "tracking=none", "-m")
    written = json.loads((sweep_of(folder) / "verdict.json").read_text())

    assert outcome.status == 0, outcome.err
    assert any("was drawn with one seed" in note for note in written["notes"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("recipe=dare_ties", "density=0.4,0.8", "sweep.fresh=1"), "2 or more"),
        (("recipe=ties", "k=0.1,0.2", "sweep.fresh=2"), "no recipe of this sweep has a seed"),
        (
            ("recipe=dare_ties", "density=0.4,0.8", "sweep.fresh=2", "evaluator=weight_stats"),
            "an evaluator with two splits",
        ),
    ],
)
def test_what_cannot_be_measured_again_is_refused_before_anything_is_merged(app: Callable, words, said: str):
    outcome = app(*words, "output=none", "tracking=none", "-m")

    assert outcome.status != 0 and said in " ".join(outcome.err.split())
