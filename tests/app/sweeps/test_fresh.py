"""`sweep.fresh`: the chosen setting is measured once more with seeds that had no part in the choice."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from sweep_folders import records, sweep_of

from mecha_exp.runs.outcomes import FRESH_FILE, read_outcomes

DIGITS = Path(__file__).parents[3] / "examples" / "digits"
EXPERTS = ("expert_0_3", "expert_4_6", "expert_7_9")
A, B, C = (f"'{DIGITS / name}.safetensors'" for name in EXPERTS)
OF_SETS = (
    "recipe=dare_ties",
    "density=0.4,0.8",
    f"models.sets=[[{A},{B}],[{B},{A}]]",
    "sweep.replicate=[experts]",
)
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


def expert_sets(folder: Path, factors: list[float]) -> list[list[str]]:
    """The demo's experts times each factor, a folder for each."""
    listed = []
    for number, factor in enumerate(factors):
        (folder / f"set {number}").mkdir(exist_ok=True)
        listed.append([f"'{folder / f'set {number}' / name}.safetensors'" for name in EXPERTS])
        for name in EXPERTS:
            weights = {key: factor * t for key, t in load_file(DIGITS / f"{name}.safetensors").items()}
            save_file(weights, folder / f"set {number}" / f"{name}.safetensors")
    return listed


def as_words(sets: list[list[str]]) -> str:
    return f"[{','.join('[' + ','.join(experts) + ']' for experts in sets)}]"


@pytest.mark.parametrize(
    "words",
    [
        ("recipe=task_arithmetic", "alpha=0.2,0.4"),
        ("recipe=dare_linear", "density=0.5", "sweep=leave_one_expert_out"),
    ],
)
def test_the_chosen_setting_is_reported_with_new_sets_of_experts(app: Callable, folder: Path, words):
    sets = expert_sets(folder, [1.0, 1.01, 1.02, 1.03])
    outcome = app(
        *(*words, f"models.sets={as_words(sets[:2])}", "sweep.replicate=[experts]"),
        *(f"sweep.fresh={as_words(sets[2:])}", "output=none", "tracking=none", "-m"),
    )

    assert outcome.status == 0, outcome.err
    written = json.loads((sweep_of(folder) / "verdict.json").read_text())
    parts = read_outcomes(sweep_of(folder) / FRESH_FILE)
    labels = {part.name.removeprefix(f"{written['selected']['point']} (") for part in parts}
    if words[0] == "recipe=dare_linear":
        assert labels == {"seed=1,experts=2)", "seed=2,experts=3)"}
    else:
        assert labels == {"experts=2)", "experts=3)"}
        again = ("sweep.replicate=[experts]", f"models.sets={as_words(sets[2:])}", "output=none", "-m")
        outcome = app(words[0], written["selected"]["point"], *again, f"hydra.sweep.dir={folder / 'again'}")
        assert outcome.status == 0, outcome.err
        measured = [np.mean([v.mean() for v in part.outcomes.values.values()]) for part in parts]
        expected = [run["metrics"]["test/accuracy"] for run in records(folder / "again")]
        assert measured == pytest.approx(expected) and len(expected) == 2
    assert written["selected"]["fresh"] == 2 and "replicates" in written["selected"]["covers"]


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
        (("recipe=dare_ties", "density=0.4,0.8", "sweep.fresh=[[a,b,c]]"), "have no others"),
        ((*OF_SETS, "sweep.fresh=2"), "List new sets, as in sweep.fresh=[["),
        ((*OF_SETS, f"sweep.fresh=[[{A},{C}]]"), "expected 2 sets or more"),
        ((*OF_SETS, f"sweep.fresh=[[{A},{C}],[{C}]]"), "the sets have 2, 2, 2, 1 experts"),
        ((*OF_SETS, f"sweep.fresh=[[{A},{B}],[{A},{C}]]"), "sets 0 and 2 are the same experts"),
        ((*OF_SETS, f"sweep.fresh=[{A},{C}]"), "models.sets lists no sets"),
        ((*OF_SETS, f"sweep.fresh=[[{A},{C}],[{B},nowhere]]"), "the model 'nowhere' does not exist"),
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
