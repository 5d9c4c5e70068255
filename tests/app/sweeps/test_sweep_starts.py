"""Sweeps that were started before: nothing is computed twice, and nothing old is shown."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from programs import environment
from safetensors.torch import save_file
from sweep_folders import NONE, records, rows, sweep_of

from mecha_exp import evaluator
from mecha_exp.app import tracking
from mecha_exp.app.sweep import folder as sweep_folder
from mecha_exp.checkpoint.transaction.lock import TargetLock
from mecha_exp.errors import TrackingError
from mecha_exp.runs.sweep import Tracking


@pytest.fixture
def moody() -> list[str]:
    """An evaluator `test_moody` that fails until something is in this list."""
    works: list[str] = []

    @evaluator("test_moody", metric="x")
    def measure(state_dict):
        if not works:
            raise ZeroDivisionError("not today")
        return {"x": 1.0}

    return works


def test_the_same_command_computes_nothing_and_shows_the_whole_table(app, folder, passes_run):
    command = ("recipe=ties", "alpha=0.3,0.5", "output=none", "-m")
    first = app(*command)
    again = app(*command)

    assert passes_run == [2, 1]  # the chosen point once more, to measure it on the test images
    assert "nothing to do" in again.out
    assert [line for line in first.out.splitlines() if line.startswith(" 0.")] == [
        line for line in again.out.splitlines() if line.startswith(" 0.")
    ]
    assert len(list((folder / "outputs" / "multiruns").iterdir())) == 1


def test_added_points_are_the_only_ones_that_are_computed(app, folder, passes_run):
    app("alpha=0.3,0.5", "output=none", "-m")
    app("alpha=0.3,0.4,0.5", "output=none", "-m")

    assert passes_run == [2, 1, 1]  # the point that was added, and not the chosen one
    assert [r["found"] for r in records(sweep_of(folder))] == [True, False, True]
    assert all(float(row["accuracy"]) > 0.8 for row in rows(sweep_of(folder)))


def test_a_large_sweep_that_goes_on_begins_with_what_is_missing(app, folder, monkeypatch):
    places = {"MANY_POINTS": 4, "POINTS_AT_ONCE": 3, "OnePass.first_points": 2}
    for name, count in places.items():
        monkeypatch.setattr(f"mecha_exp.app.launchers.onepass.{name}", count)
    command = ("alpha=0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8", "output=none", *NONE, "-m")
    first = app(*command)
    made = [line.partition("]")[0] for line in first.out.splitlines() if line.startswith("[")]
    assert made == [f"[{number}/8" for number in range(1, 9)]
    for number in (4, 5, 7):
        (sweep_of(folder) / str(number) / "run.json").unlink()

    again = app(*command)

    lines = [line for line in again.out.splitlines() if line.startswith("[") or "are there already" in line]
    assert [line.partition("]")[0] for line in lines] == [
        "[5/8",
        "[6/8",
        "[8/8",
        "5 of 8 points are there already",
    ]
    assert len(records(sweep_of(folder))) == 8


def test_points_that_are_no_longer_listed_are_not_in_the_table(app, folder, passes_run):
    for values in (["0.1", "0.2", "0.3"], ["0.1", "0.3"]):
        (folder / "points.csv").write_text("\n".join(["alpha", *values]))
        assert app("sweep=points", "sweep.file=points.csv", *NONE).status == 0
        assert [row["alpha"] for row in rows(sweep_of(folder))] == values
    for values in (["0.1", "0.2", "0.3"], ["0.1", "0.3"]):
        assert app(f"alpha={','.join(values)}", "hydra.sweep.dir=fixed", *NONE).status == 0
        assert [row["alpha"] for row in rows(folder / "fixed")] == values
    assert passes_run == [3]


def test_a_single_merge_is_found_as_well_and_its_model_if_it_is_intact(app, folder, passes_run):
    app("alpha=0.3")
    found = app("alpha=0.3")
    assert passes_run == [1]
    assert "known already: nothing was merged, the model is" in found.out

    (model,) = folder.rglob("model.safetensors")
    damaged = bytearray(model.read_bytes())
    damaged[-1] ^= 1
    model.write_bytes(damaged)
    app("alpha=0.3")
    assert passes_run == [1, 1]


def test_rerun_always_computes_everything_again(app, folder, passes_run):
    app("alpha=0.3,0.5", *NONE)
    app("alpha=0.3,0.5", "rerun=always", *NONE)

    assert passes_run == [2, 2]


def test_an_unknown_choice_of_rerun(app, folder):
    outcome = app("rerun=nevr")

    assert outcome.status != 0
    assert "rerun=nevr: there is no such choice. Did you mean 'never'?" in outcome.err


def test_without_a_store_nothing_is_remembered(app, folder, passes_run):
    app("alpha=0.3,0.30", "output=none", "store=null")
    app("alpha=0.3,0.5", "store=null", *NONE)
    app("alpha=0.3,0.5", "store=null", *NONE)

    assert passes_run == [2, 2]
    assert not (folder / "outputs" / "store").exists()


def test_a_new_evaluator_measures_models_that_are_there(app, folder, passes_run):
    app("alpha=0.3,0.5", "evaluator=none", "-m")
    outcome = app("alpha=0.3,0.5", "evaluator=digits", "-m")

    assert outcome.status == 0, outcome.err
    assert passes_run == [2]
    assert all(float(row["accuracy"]) > 0.8 for row in rows(sweep_of(folder)))


def test_points_are_chosen_by_the_metric_that_is_asked_for_now(app, folder):
    @evaluator("test_two_numbers", metric="x")
    def measure(state_dict):
        return {"x": 1.0, "y": 2.0}

    words = ("evaluator.name=test_two_numbers", "alpha=0.3,0.5", "output=none", "hydra.sweep.dir=s", "-m")
    app(*words)
    app(*words, "evaluator.metric=y", "evaluator.direction=minimize")

    assert {(r["metric"], r["direction"]) for r in records(folder / "s")} == {("y", "minimize")}


def test_failed_points_are_tried_again_unless_they_are_not_to_be(app, folder, moody):
    command = ("alpha=0.3,0.5", "output=none", "evaluator.name=test_moody", "-m")
    assert app(*command).status != 0
    moody.append("works")
    never = app(*command, "rerun=never")
    assert never.status != 0
    assert "It failed before. rerun=failed tries it again." in never.err

    assert app(*command).status == 0


def test_a_point_that_succeeded_after_all_has_not_failed_before(app, folder, moody, passes_run):
    command = ("alpha=0.3,0.5", "evaluator.name=test_moody", "-m")
    assert app(*command).status != 0
    moody.append("works")
    assert app(*command).status == 0
    assert app(*command, "rerun=never").status == 0
    assert passes_run == [2]


def test_a_sweep_that_ends_when_its_folder_is_there_goes_on_in_it(app, folder, monkeypatch):
    def ended(*_):
        raise KeyboardInterrupt

    command = ("alpha=0.3,0.5", *NONE)
    with monkeypatch.context() as patched:
        patched.setattr(sweep_folder, "TargetLock", ended)
        app(*command)
    (begun,) = (folder / "outputs" / "multiruns").iterdir()

    assert app(*command).status == 0
    assert list((folder / "outputs" / "multiruns").iterdir()) == [begun]
    assert len(rows(begun)) == 2


def test_models_are_known_before_the_points_before_them_are_measured(app, folder):
    known: list[int] = []

    @evaluator("test_slow", metric="x")
    def slow(state_dict):
        until = time.monotonic() + 20
        while (count := len(list((folder / "outputs/store/points").glob("*/merge.json")))) < 3:
            assert time.monotonic() < until
            time.sleep(0.01)
        known.append(count)
        return {"x": 1.0}

    assert app("alpha=0.1,0.2,0.3", "evaluator.name=test_slow", "-m").status == 0
    assert known[0] == 3


def test_an_input_that_was_replaced_has_its_points_made_again_and_the_table_says_so(app, folder, passes_run):
    for name, value in (("a", 1.0), ("b", 2.0)):
        save_file({"w": torch.full((4,), value)}, folder / f"{name}.safetensors")
    command = ("recipe=weighted_sum", "models.base=a.safetensors", "models.experts=[b.safetensors]")
    app(*command, "alpha=0.25,0.5", "output=none", "-m")
    save_file({"w": torch.full((4,), 3.0)}, folder / "b.safetensors")

    outcome = app(*command, "alpha=0.25,0.5", "output=none", "-m")

    assert passes_run == [2, 2]
    assert "alpha=0.25: made again: the input b has changed" in outcome.out
    assert float(rows(sweep_of(folder))[1]["weights/distance/a"]) == pytest.approx(2.0)


def test_an_input_under_another_name_does_not_split_the_table(app, folder, passes_run):
    for name, value in (("a", 1.0), ("b", 2.0)):
        save_file({"w": torch.full((4,), value)}, folder / f"{name}.safetensors")
    command = ("recipe=weighted_sum", "models.base=a.safetensors", "output=none")
    app(*command, "models.experts=[b.safetensors]", "alpha=0.25", "-m")
    (folder / "b.safetensors").rename(folder / "c.safetensors")

    app(*command, "models.experts=[c.safetensors]", "alpha=0.25,0.5", "-m")

    assert passes_run == [1, 1]
    found = [float(row["weights/distance/c"]) for row in rows(sweep_of(folder))]
    assert found == pytest.approx([1.5, 1.0])


def test_a_model_in_shards_is_not_one_in_a_file(app, folder, passes_run):
    command = ("alpha=0.3", "evaluator=none", "-m")
    app(*command)
    app(*command, "output.shard_size=100kB", "output.path=sharded")

    assert passes_run == [1, 1]
    assert len(list((folder / "sharded").glob("*.safetensors"))) > 1
    assert app("reproduce", str(sweep_of(folder) / "0")).status == 0
    app("alpha=0.5", "evaluator=none", "output.path=in_a_folder", "-m")
    assert (folder / "in_a_folder").is_dir()
    assert app("reproduce", str(sweep_of(folder) / "0")).status == 0


def test_a_store_of_a_newer_version_is_refused_before_anything_is_written(app, folder):
    (folder / "outputs" / "store").mkdir(parents=True)
    (folder / "outputs" / "store" / "store.json").write_text('{"version": 99}')

    outcome = app("alpha=0.3,0.5", *NONE)

    assert outcome.status != 0
    assert "was written by a newer mecha_exp (format 99" in outcome.err
    assert not (folder / "outputs" / "multiruns").exists()


def test_a_store_on_a_full_disk_costs_no_result(app, folder, monkeypatch):
    def full(path: Path, text: str) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("mecha_exp.lab.store.atomic_write_text", full)

    outcome = app("alpha=0.3,0.5", *NONE)

    assert outcome.status == 0
    assert outcome.err.count("the disk is full") <= 2  # of the sweep, and of the first of its points
    assert "the disk is full" in outcome.err
    assert [r["status"] for r in records(sweep_of(folder))] == ["FINISHED", "FINISHED"]


@pytest.mark.parametrize("gone", ["outputs/multiruns/*", "outputs/multiruns/*/0"], ids=["sweep", "point"])
def test_a_folder_that_is_deleted_while_it_is_used_is_one_line(app, folder, gone):
    (folder / "deletes.py").write_text(
        "import shutil\nfrom pathlib import Path\nfrom mecha_exp import evaluator\n"
        "@evaluator('deletes', metric='score')\n"
        "def deletes(state_dict):\n"
        f"    for path in Path().glob({gone!r}):\n"
        "        shutil.rmtree(path)\n"
        "    return {'score': 1.0}\n"
    )

    outcome = app("alpha=0.3,0.5", "plugins=[deletes.py]", "evaluator.name=deletes", "output=none", "-m")

    assert outcome.status == 1
    assert "Traceback" not in outcome.err + outcome.out
    assert "cannot be written: its folder is gone, moved or deleted while it was used" in outcome.err


def test_two_processes_do_not_share_a_sweeps_folder(app, folder):
    app("alpha=0.3,0.5", *NONE)
    taken = TargetLock(sweep_of(folder) / "sweep")
    try:
        outcome = app("alpha=0.3,0.5", *NONE)
    finally:
        taken.release()

    assert outcome.status == 0
    assert len(list((folder / "outputs" / "multiruns").iterdir())) == 2


def test_two_projects_with_one_store_keep_their_folders_apart(app, folder, monkeypatch, passes_run):
    for name in ("one", "two"):
        (folder / name).mkdir()
        monkeypatch.chdir(folder / name)
        assert app("alpha=0.3,0.5", f"store={folder / 'store'}", *NONE).status == 0
        assert len(records(sweep_of(folder / name))) == 2
    assert passes_run == [2]


@pytest.mark.heavy
def test_two_processes_sweep_on_one_store_at_once(folder):
    command = [sys.executable, "-m", "mecha_exp", "alpha=0.3,0.5", "tracking=none", *NONE]
    both = [subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL) for _ in range(2)]

    assert [process.wait(timeout=180) for process in both] == [0, 0]
    sweeps = list((folder / "outputs" / "multiruns").iterdir())
    statuses = {path.parent: json.loads(path.read_text())["status"] for path in folder.rglob("run.json")}
    assert set(statuses.values()) == {"FINISHED"}
    assert len(statuses) == 2 * len(sweeps)
    assert len(list((folder / "outputs" / "store" / "points").iterdir())) == 2


def test_a_point_that_the_dashboard_did_not_get_is_logged_at_the_end(app, folder, monkeypatch):
    log_folder, calls = tracking.log_folder, []

    def moody(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise TrackingError("the server is away")
        return log_folder(*arguments)

    monkeypatch.setattr("mecha_exp.app.tracking.log_folder", moody)

    assert app("alpha=0.3,0.5", *NONE, tracked=True).status == 0
    logged = {record["run_id"] for record in records(sweep_of(folder))}
    assert None not in logged
    assert len(logged) == 2
    again = app("alpha=0.3,0.5", *NONE, tracked=True)
    assert "nothing to do" in again.out
    elsewhere = ("alpha=0.3,0.5", *NONE, "tracking.uri=sqlite:///outputs/other.db")
    assert app(*elsewhere, tracked=True).status == 0
    assert (folder / "outputs" / "other.db").exists()
    assert logged.isdisjoint(record["run_id"] for record in records(sweep_of(folder)))
    (folder / "outputs" / "other.db").rename(folder / "outputs" / "away.db")
    assert Tracking("sqlite:///outputs/other.db", "").is_gone
    assert not Tracking("http://localhost:5000", "").is_gone


def test_points_that_an_interrupt_kept_from_running_have_not_failed(app, folder):
    stopped: list[bool] = []

    @evaluator("test_stopped", metric="x", direction="maximize")
    def stop(state_dict, *, context):
        if context.name == "1" and not stopped:
            stopped.append(True)
            raise KeyboardInterrupt
        return {"x": 1.0}

    command = ("alpha=0.1,0.3,0.5,0.7", "output=none", "evaluator.name=test_stopped", "-m")
    first = app(*command)

    assert first.status == 130
    assert "1 of 2 points failed\n  alpha=0.3: interrupted\n" in first.out
    to_come = "2 of 4 points are not there yet: the best of all may be another one."
    assert to_come in " ".join(first.out.split())
    assert "left no record" not in first.out
    assert [row["status"] for row in rows(sweep_of(folder))] == ["FINISHED", "FAILED"]
    assert to_come in " ".join(app("table").out.split())

    assert app(*command).status == 0
    assert "not there yet" not in app("table").out


def test_a_reason_for_which_many_points_fail_is_said_once(app, moody):
    alphas = ",".join(f"0.{digit}" for digit in range(1, 8))

    out = app(f"alpha={alphas}", "output=none", "evaluator.name=test_moody", "-m").out

    named = "alpha=0.1, alpha=0.2, alpha=0.3, alpha=0.4 and 3 others"
    reason = "the evaluator 'test_moody' failed: ZeroDivisionError: not today"
    assert f"7 of 7 points failed\n  {named}: {reason}\n" in out
