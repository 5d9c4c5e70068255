"""A sweep whose points are measured by several processes at the same time."""

import csv
from pathlib import Path

import pytest

from mecha_exp.app.batch import merge_points
from mecha_exp.evaluation.isolation import pool

PLUGIN = """
import os
from mecha_exp import evaluator

@evaluator("NAME", metric="size")
def size(state_dict, *, context):
    if context.hyperparameters.get("alpha") == 0.2:
        raise ValueError("too small")
    return {"size": sum(float(t.double().norm()) for t in state_dict.values()), "process": float(os.getpid())}
"""
SWEEP = ("recipe=weighted_sum", "alpha=0.1,0.2,0.3,0.4", "-m", "plugins=[size.py]")


def rows(folder: Path) -> dict[str, dict[str, str]]:
    with (folder / "sweep.csv").open() as file:
        return {row["alpha"]: row for row in csv.DictReader(file)}


def test_workers_measure_what_one_process_measures_and_a_failing_point_fails_alone(app, folder):
    (folder / "size.py").write_text(PLUGIN.replace("NAME", "test_size"))
    sweep = (*SWEEP, "evaluator.name=test_size", "store=null")

    alone = app(*sweep, "hydra.sweep.dir=alone")
    together = app(*sweep, "hydra.sweep.dir=together", "evaluator.workers=2")

    first, second = rows(folder / "alone"), rows(folder / "together")
    assert (alone.status, together.status) == (1, 1)
    assert "too small" in together.err + together.out
    assert {alpha: row["size"] for alpha, row in first.items()} == {a: r["size"] for a, r in second.items()}
    assert {row["process"] for row in second.values()}.isdisjoint(
        {row["process"] for row in first.values() if row["process"]}
    )


@pytest.mark.parametrize(("setting", "expected"), [("store=null", 2), ("evaluator.workers=1", 0)])
def test_the_next_model_goes_to_the_gpus_while_a_point_is_measured(
    app, folder, monkeypatch, setting, expected
):
    (folder / "size.py").write_text(PLUGIN.replace("NAME", f"test_size_ahead_{expected}"))
    models = []
    monkeypatch.setattr("mecha_exp.evaluation.transfers.expect", models.append)
    sweep = ("recipe=weighted_sum", "alpha=0.1,0.3,0.4", "-m", "plugins=[size.py]", "output=none")

    outcome = app(*sweep, f"evaluator.name=test_size_ahead_{expected}", setting)

    assert outcome.status == 0, outcome.err
    assert len(models) == expected
    assert all(set(model) == set(models[0]) for model in models)


@pytest.mark.parametrize("swept", [("recipe=weighted_sum", "alpha=0.1,0.3"), ("recipe=weighted_sum,slerp",)])
def test_workers_start_before_their_models_are_merged(app, folder, monkeypatch, swept):
    (folder / "size.py").write_text(PLUGIN.replace("NAME", "test_size_early"))
    begun: list[object] = []

    def note_workers(points, progress):
        begun.extend(worker for each in pool._pools.values() for worker in each._workers if worker._running)
        return merge_points(points, progress)

    monkeypatch.setattr("mecha_exp.app.workbench.merge_points", note_workers)
    sweep = (*swept, *SWEEP[2:], "evaluator.name=test_size_early", "evaluator.workers=2")

    app(*sweep)
    assert len(begun) == 2
    begun.clear()
    app(*sweep, "hydra.sweep.dir=again")
    assert not begun


def test_a_new_evaluator_measures_the_stored_models_of_a_sweep_with_workers(app, folder):
    (folder / "size.py").write_text(PLUGIN.replace("NAME", "test_size_again"))
    sweep = ("recipe=weighted_sum", "alpha=0.1,0.3", "-m", "output=file")
    app(*sweep, "evaluator=none")

    again = app(
        *sweep,
        "plugins=[size.py]",
        "evaluator.name=test_size_again",
        "evaluator.workers=2",
        "hydra.sweep.dir=again",
    )

    assert again.status == 0
    assert all(float(row["size"]) > 0 for row in rows(folder / "again").values())
