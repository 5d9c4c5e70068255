"""Sweeps: one pass for all points, what it plans, and what goes wrong in one."""

import json
import shutil
import weakref

import torch
from safetensors.torch import load_file, save_file
from sweep_folders import NONE, records, sweep_of

from mecha_exp.app import batch
from mecha_exp.checkpoint.transaction.lock import TargetLock


def test_points_that_differ_in_anything_are_merged_in_one_pass(app, folder, passes_run):
    outcome = app("recipe=ties,task_arithmetic", "alpha=0.3,0.5", "output.dtype=float32,bfloat16", *NONE)

    assert outcome.status == 0, outcome.err
    assert passes_run == [8]
    assert {r["parameters"]["method"] for r in records(sweep_of(folder))} == {
        "ties",
        "task_arithmetic",
    }
    assert "ties, task_arithmetic by alpha, output.dtype" in outcome.out


def test_the_bytes_are_those_of_a_merge_alone(app, folder):
    app("recipe=dare_ties", "alpha=0.3,0.7", "seed=0,1", "evaluator=none", "-m")
    app("recipe=dare_ties", "alpha=0.7", "seed=1", "evaluator=none", "output.path=alone.safetensors")

    together = load_file(sweep_of(folder) / "3" / "model.safetensors")
    alone = load_file("alone.safetensors")
    assert all(torch.equal(together[key], alone[key]) for key in alone)


def test_models_in_memory_are_made_in_waves_that_fit_the_budget(app, folder, passes_run):
    outcome = app("alpha=0.1,0.2,0.3,0.4,0.5", "output=none", "engine.memory_budget=500000", "-m")

    assert outcome.status == 0, outcome.err
    assert passes_run == [2, 2, 1, 1]  # a model takes 212 kB; the last one is the chosen point again


def test_the_models_of_a_wave_are_gone_when_the_next_one_is_made(app, folder, monkeypatch):
    models, alive = [], []
    run = batch.run_plan

    def watched(planned, *rest):
        alive.append(sum(model() is not None for model in models))
        report = run(planned, *rest)
        models.extend(weakref.ref(tensor) for job in planned.jobs for tensor in job.output.values())
        return report

    monkeypatch.setattr(batch, "run_plan", watched)
    outcome = app("alpha=0.1,0.2,0.3,0.4,0.5", "output=none", "engine.memory_budget=500000", "-m")

    assert outcome.status == 0, outcome.err
    assert alive == [0, 0, 0, 0]


def test_the_plan_of_a_sweep_counts_passes_and_what_each_reads_and_keeps(app, folder, passes_run):
    outcome = app("alpha=0.1,0.2,0.3,0.3", "output=none", "engine.memory_budget=500000", "debug=plan", "-m")

    assert outcome.status == 0, outcome.err
    assert [line.split() for line in outcome.out.splitlines() if line[1:2] in ("1", "2")] == [
        ["1", "2", "1.7", "MB", "0", "B", "424.0", "kB"],
        ["2", "1", "1.7", "MB", "0", "B", "212.0", "kB"],
    ]
    assert "to make  3 in 2 passes: 3.4 MB read, 0 B written" in outcome.out
    assert passes_run == []
    assert list(folder.iterdir()) == []


def test_the_plan_of_a_sweep_knows_what_is_there_and_what_cannot_be_made(app, folder):
    app("k=0.1,0.2", *NONE)

    outcome = app("plan", "k=0.1,0.2,0.3,7", *NONE)

    assert outcome.status == 1
    assert "points   4; swept: k" in outcome.out
    assert "known    2: nothing is computed for them" in outcome.out
    assert "to make  1 in 1 passes" in outcome.out
    assert "point 3: k: 7 is out of range" in outcome.err.replace("\n", " ")


def test_a_point_that_fails_does_not_stop_the_others(app, folder):
    outcome = app("k=0.2,7,0.3", *NONE)

    assert outcome.status != 0
    assert [r["status"] for r in records(sweep_of(folder))] == ["FINISHED", "FAILED", "FINISHED"]
    assert "k: 7 is out of range" in outcome.err


def test_a_point_that_fails_in_the_pass_that_all_share_does_not_stop_the_others(app, folder, passes_run):
    values = ",".join(["0.1", "0.2", "0.3", "1e30", "0.4"])
    strict = ("output.dtype=float16", "engine.strict=true", "evaluator=none", "-m")
    outcome = app("recipe=task_arithmetic", f"alpha={values}", *strict)

    assert outcome.status != 0
    status = [r["status"] for r in records(sweep_of(folder))]
    assert status == ["FINISHED", "FINISHED", "FINISHED", "FAILED", "FINISHED"]
    assert "1 of 5 points failed" in outcome.out


def test_models_that_do_not_fit_the_disk_together_are_refused_together(app, folder, monkeypatch):
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(batch.shutil, "disk_usage", lambda path: usage._replace(free=300_000))

    outcome = app("alpha=0.3,0.5", "evaluator=none", "-m")

    assert outcome.status != 0
    assert "the models of this sweep need" in outcome.err
    assert not list(folder.rglob("*.safetensors"))


def test_models_of_other_shapes_are_merged_in_passes_of_their_own(app, folder, passes_run):
    for name, size in (("a", 3), ("b", 3), ("c", 5), ("d", 5)):
        save_file({"w": torch.arange(float(size))}, folder / f"{name}.safetensors")
    arguments = ("recipe=weighted_sum", "sweep=zip", "models.base=a.safetensors,c.safetensors")

    assert app(*arguments, "models.experts=[b.safetensors],[d.safetensors]", "evaluator=none").status == 0

    assert passes_run == [1, 1]
    made = [load_file(sweep_of(folder) / str(n) / "model.safetensors")["w"].tolist() for n in range(2)]
    assert made == [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0, 3.0, 4.0]]


def test_sweeps_are_listed_by_their_points(app, folder):
    app("alpha=0.3,0.5", *NONE)
    app("alpha=0.1,0.2", *NONE)

    listed = json.loads(app("ls", "--sweeps", "alpha>0.4", "--json").out)

    assert [sweep["points"] for sweep in listed["sweeps"]] == [2]
    assert listed["points"] == []


def test_points_of_a_running_sweep_that_are_still_to_come_have_not_failed(app, folder):
    app("alpha=0.3,0.5", *NONE)
    sweep = sweep_of(folder)
    shutil.rmtree(sweep / "1")
    taken = TargetLock(sweep / "sweep")
    try:
        running = json.loads(app("ls", "--json").out)["sweeps"][0]
    finally:
        taken.release()
    ended = json.loads(app("ls", "--json").out)["sweeps"][0]

    assert (running["points"], running["failed"]) == (1, 0)
    assert (ended["points"], ended["failed"]) == (2, 1)


def test_no_plan_holds_more_points_than_a_pass(app, folder, monkeypatch, passes_run):
    """A plan grows with the square of its points, so a long sweep is cut before it is planned."""
    planned: list[int] = []
    plan = batch.plan
    monkeypatch.setattr(batch, "plan", lambda jobs, options: planned.append(len(jobs)) or plan(jobs, options))
    monkeypatch.setattr(batch, "MOST_POINTS", 4)
    command = ("alpha=range(0.1,1.1,0.1)", "evaluator=none", "output=none", "-m")

    assert app("plan", *command).status == 0
    looked_at, planned[:] = list(planned), []
    assert app(*command).status == 0

    assert looked_at == planned == passes_run == [4, 4, 2]
