"""`sweep.known=true`: a search begins with what the store knows of its space, and computes nothing for it."""

import json
from pathlib import Path

import pytest
from sweep_folders import records, rows, sweep_of
from two_experts import write_two_experts

optuna = pytest.importorskip("optuna", minversion="4")


@pytest.fixture
def run(folder: Path, app):
    """Runs a sweep of the weights of two experts."""
    fixed = write_two_experts(folder)
    fixed += ["recipe=task_arithmetic", "evaluator.name=test_distance", "output=none"]
    return lambda *words: app(*fixed, *words)


def measured(folder: Path) -> int:
    """How many merges were measured, the inputs apart."""
    inputs = {"0.0 0.0", "1.0 0.0", "0.0 1.0"}
    return sum(line not in inputs for line in (folder / "measured.txt").read_text().splitlines())


SPACE = ("weights.0=interval(0,1)", "weights.1=interval(0,1)", "alpha=1", "sweep.batch=4")


def test_known_results_come_first_cost_nothing_and_are_not_counted(run, folder, passes_run):
    run("weights.0=0.25,0.5,2", "weights.1=0.5,0.75", "alpha=1", "-m")  # two of them lie outside
    run("weights.0=0.25,0.5", "weights.1=0.5", "alpha=0.5", "-m")  # and these are other merges
    passes_run.clear()
    before = measured(folder)

    words = ("sweep=search", *SPACE, "sweep.trials=8", "sweep.known=true", "hydra.sweep.dir=s")
    outcome = run(*words)

    assert outcome.status == 0, outcome.err
    assert measured(folder) - before == 8 and sum(passes_run) == 8
    asked = json.loads(Path("s/trials.json").read_text())["trials"]
    known = [trial["parameters"] for trial in asked if trial["state"].get("known")]
    expected = [(x, y) for x in (0.25, 0.5) for y in (0.5, 0.75)]
    assert sorted((p["weights.0"], p["weights.1"]) for p in known) == expected
    assert asked[: len(known)] == [trial for trial in asked if trial["state"].get("known")]
    assert len(rows(Path("s"))) == 12 and all(r["found"] for r in records(Path("s"))[:4])
    assert "[12/12]" in outcome.out
    assert json.loads(Path("s/sweep.json").read_text())["given"] == [0, 1, 2, 3]

    run(*words)
    assert measured(folder) - before == 8 and len(records(Path("s"))) == 12


def test_known_results_are_in_a_shared_study(run, folder):
    run("weights.0=0.25,0.5", "weights.1=0.75", "alpha=1", "-m")
    words = ("sweep=search", *SPACE, "sweep.trials=4", "sweep.known=true", "sweep.storage=sqlite:///s.db")

    outcome = run(*words, "name=one")

    assert outcome.status == 0, outcome.err
    study = optuna.load_study(study_name="one", storage="sqlite:///s.db")
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 6
    known = [trial.params for trial in study.trials[:2]]
    assert sorted(p["weights.0"] for p in known) == [0.25, 0.5] and known[0]["weights.1"] == 0.75


def test_a_small_space_ends_where_all_of_it_is_known(run, folder):
    run("weights.0=0.25,0.5", "weights.1=0.75", "alpha=1", "-m")

    outcome = run(
        *("sweep=search", "weights.0=0.25,0.5,0.75", "weights.1=0.75", "alpha=1,2"),
        *("sweep.trials=6", "sweep.known=true"),
    )

    assert outcome.status == 0, outcome.err
    assert len(records(sweep_of(folder))) == 6


def test_without_a_store_it_is_refused(run):
    outcome = run("sweep=search", *SPACE, "sweep.trials=4", "sweep.known=true", "store=null")

    assert outcome.status != 0
    assert "sweep.known=true begins with the results of the store, and there is no store" in " ".join(
        outcome.err.split()
    )
