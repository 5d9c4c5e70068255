"""Sweeps: one pass for all points, nothing twice, modes beyond the grid, and what goes wrong in one."""

import csv
import json
import os
import shutil
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mecha_exp import evaluator
from mecha_exp.app import passes, track
from mecha_exp.app.report import CSV_FILE, Results
from mecha_exp.app.report.export import write_csv
from mecha_exp.app.sweep import Tracking
from mecha_exp.checkpoint.lock import TargetLock
from mecha_exp.errors import TrackingError

NONE = ("output=none", "evaluator=none", "-m")


def sweep_of(folder: Path) -> Path:
    return max((folder / "outputs" / "multiruns").iterdir(), key=lambda path: path.stat().st_mtime_ns)


def records(sweep: Path) -> list[dict]:
    found = sorted(sweep.glob("*/run.json"), key=lambda path: int(path.parent.name))
    return [json.loads(path.read_text()) for path in found]


def rows(sweep: Path) -> list[dict[str, str]]:
    with (sweep / "sweep.csv").open() as file:
        return [row for row in csv.DictReader(file) if row["status"] != "REFERENCE"]


def overrides(sweep: Path) -> list[list[str]]:
    return [record["overrides"] for record in records(sweep)]


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn is tested elsewhere, and takes seconds."""

    def write_table(results: Results, command: list[str], folder: Path) -> list[Path]:
        write_csv(results, folder / CSV_FILE)
        return [folder / CSV_FILE]

    monkeypatch.setattr("mecha_exp.app.sweep.write_all", write_table)


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


def test_points_that_differ_in_anything_are_merged_in_one_pass(app, folder, passes_run):
    outcome = app("recipe=ties,task_arithmetic", "alpha=0.3,0.5", "output.dtype=float32,bfloat16", *NONE)

    assert outcome.status == 0, outcome.err
    assert passes_run == [8]
    assert {r["parameters"]["method"] for r in records(sweep_of(folder))} == {
        "add_difference_ties",
        "task_arithmetic",
    }
    assert "ties, task_arithmetic by alpha, output.dtype" in outcome.out


@pytest.mark.parametrize("launcher", ["onepass", "basic"])
def test_each_of_several_recipes_gets_the_hyperparameters_that_it_has(app, folder, launcher):
    words = ["recipe=n_average,ties,dare_ties", "alpha=0.3,0.5", "k=0.1,0.2", "density=0.4"]

    outcome = app(*words, "sweep.replicates=2", f"hydra/launcher={launcher}", *NONE)

    assert outcome.status == 0, outcome.err
    assert {r["name"] for r in records(sweep_of(folder))} == {
        "recipe=n_average",
        *(f"recipe=ties,alpha={alpha},k={k}" for alpha in (0.3, 0.5) for k in (0.1, 0.2)),
        *(f"recipe=dare_ties,alpha={alpha},seed={seed}" for alpha in (0.3, 0.5) for seed in (0, 1)),
    }
    drawn = [r["parameters"]["density"] for r in records(sweep_of(folder)) if "seed" in r["name"]]
    assert drawn == [0.4] * 4
    assert "k: not of n_average, dare_ties, which run without it" in outcome.out
    assert "density: not of n_average, ties, which run without it" in outcome.out
    assert "seed: not of" not in outcome.out  # nobody has asked for one
    assert "n_average, ties, dare_ties by alpha, k, seed" in outcome.out
    noted = json.loads((sweep_of(folder) / "sweep.json").read_text())
    assert set(words) < set(noted["command"])  # as it was typed


def test_a_seed_that_is_given_is_the_first_of_every_recipe_that_draws(app, folder):
    outcome = app("recipe=ties,dare_ties,dare_linear", "seed=7", "sweep.replicates=2", *NONE)

    assert outcome.status == 0, outcome.err
    assert [r["parameters"].get("seed") for r in records(sweep_of(folder))] == [None, 7, 8, 7, 8]


def test_what_a_listed_point_names_is_not_left_out(app, folder):
    points = "sweep.points=[{recipe:ties,k:0.2},{recipe:n_average,k:0.2}]"

    outcome = app("sweep=points", points, *NONE)

    assert outcome.status != 0
    assert "k: the recipe 'n_average' has no 'k'." in outcome.err


def test_the_bytes_are_those_of_a_merge_alone(app, folder):
    app("recipe=dare_ties", "alpha=0.3,0.7", "seed=0,1", "evaluator=none", "-m")
    app("recipe=dare_ties", "alpha=0.7", "seed=1", "evaluator=none", "output.path=alone.safetensors")

    together = load_file(sweep_of(folder) / "3" / "model.safetensors")
    alone = load_file("alone.safetensors")
    assert all(torch.equal(together[key], alone[key]) for key in alone)


def test_models_in_memory_are_made_in_waves_that_fit_the_budget(app, folder, passes_run):
    outcome = app("alpha=0.1,0.2,0.3,0.4,0.5", "output=none", "engine.memory_budget=500000", "-m")

    assert outcome.status == 0, outcome.err
    assert passes_run == [2, 2, 1]  # a model takes 212 kB


def test_the_models_of_a_wave_are_gone_when_the_next_one_is_made(app, folder, monkeypatch):
    models, alive = [], []
    run = passes.run_plan

    def watched(planned, *rest):
        alive.append(sum(model() is not None for model in models))
        report = run(planned, *rest)
        models.extend(weakref.ref(tensor) for job in planned.jobs for tensor in job.output.values())
        return report

    monkeypatch.setattr(passes, "run_plan", watched)
    outcome = app("alpha=0.1,0.2,0.3,0.4,0.5", "output=none", "engine.memory_budget=500000", "-m")

    assert outcome.status == 0, outcome.err
    assert alive == [0, 0, 0]


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
    assert "point 3: recipe.k: 7 is out of range" in outcome.err.replace("\n", " ")


def test_the_same_command_computes_nothing_and_shows_the_whole_table(app, folder, passes_run):
    command = ("recipe=ties", "alpha=0.3,0.5", "output=none", "-m")
    first = app(*command)
    again = app(*command)

    assert passes_run == [2]
    assert "nothing to do" in again.out
    assert [line for line in first.out.splitlines() if line.startswith(" 0.")] == [
        line for line in again.out.splitlines() if line.startswith(" 0.")
    ]
    assert len(list((folder / "outputs" / "multiruns").iterdir())) == 1


def test_added_points_are_the_only_ones_that_are_computed(app, folder, passes_run):
    app("alpha=0.3,0.5", "output=none", "-m")
    app("alpha=0.3,0.4,0.5", "output=none", "-m")

    assert passes_run == [2, 1]
    assert [r["found"] for r in records(sweep_of(folder))] == [True, False, True]
    assert all(float(row["accuracy"]) > 0.8 for row in rows(sweep_of(folder)))


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


def test_failed_points_are_tried_again_unless_they_are_not_to_be(app, folder, moody):
    command = ("alpha=0.3,0.5", "output=none", "evaluator.name=test_moody", "-m")
    assert app(*command).status != 0
    moody.append("works")
    never = app(*command, "rerun=never")
    assert never.status != 0
    assert "It failed before. rerun=failed tries it again." in never.err

    assert app(*command).status == 0


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

    monkeypatch.setattr("mecha_exp.lab.store.write_whole", full)

    outcome = app("alpha=0.3,0.5", *NONE)

    assert outcome.status == 0
    assert outcome.err.count("the disk is full") <= 2  # of the sweep, and of the first of its points
    assert "the disk is full" in outcome.err
    assert [r["status"] for r in records(sweep_of(folder))] == ["FINISHED", "FINISHED"]


def test_models_that_do_not_fit_the_disk_together_are_refused_together(app, folder, monkeypatch):
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(passes.shutil, "disk_usage", lambda path: usage._replace(free=300_000))

    outcome = app("alpha=0.3,0.5", "evaluator=none", "-m")

    assert outcome.status != 0
    assert "the models of this sweep need" in outcome.err
    assert not list(folder.rglob("*.safetensors"))


def test_an_unknown_choice_of_rerun(app, folder):
    outcome = app("rerun=nevr")

    assert outcome.status != 0
    assert "rerun=nevr: there is no such choice. Did you mean 'never'?" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["sweep=zip", "alpha=0.3,0.5", "k=0.2,0.1"], [["alpha=0.3", "k=0.2"], ["alpha=0.5", "k=0.1"]]),
        (["alpha=range(0.1,0.5,0.2)", "-m"], [["alpha=0.1"], ["alpha=0.3"]]),
        (["alpha=range(0.7,1.1,0.1)", "-m"], [["alpha=0.7"], ["alpha=0.8"], ["alpha=0.9"], ["alpha=1.0"]]),
        (["alpha=0.3,0.30,0.5", "-m"], [["alpha=0.3"], ["alpha=0.5"]]),
        (
            ["sweep=points", "sweep.points=[{alpha:0.3,k:0.2},{recipe:slerp,alpha:0.5}]"],
            [["alpha=0.3", "k=0.2"], ["recipe=slerp", "alpha=0.5"]],
        ),
        (["sweep=one_at_a_time", "alpha=0.5,0.7"], [["alpha=1.0"], ["alpha=0.5"], ["alpha=0.7"]]),
        (
            ["recipe=dare_ties", "alpha=0.3", "sweep.replicates=2", "-m"],
            [["alpha=0.3", "seed=0"], ["alpha=0.3", "seed=1"]],
        ),
        (["alpha=0.1,0.2,0.3", "sweep.share=2/2", "-m"], [["alpha=0.2"]]),
    ],
)
def test_a_mode_makes_its_points(app, folder, arguments, expected):
    outcome = app(*arguments, "output=none", "evaluator=none")

    assert outcome.status == 0, outcome.err
    about = ("sweep", "output", "evaluator", "tracking", "recipe=dare_ties")
    made = [[o for o in point if not o.startswith(about)] for point in overrides(sweep_of(folder))]
    assert made == expected


def test_a_block_ablation_sets_each_block_of_the_model_apart(app, folder):
    outcome = app("sweep=leave_one_block_out", "recipe=task_arithmetic", "evaluator=none")

    assert outcome.status == 0, outcome.err
    names = [r["name"] for r in records(sweep_of(folder))]
    assert names == ["task_arithmetic", "block=conv1", "block=conv2", "block=fc1", "block=fc2"]
    whole, without = (load_file(sweep_of(folder) / str(n) / "model.safetensors") for n in (0, 1))
    base = load_file(Path(__file__).parents[2] / "examples" / "digits" / "base.safetensors")
    assert torch.equal(without["conv1.weight"], base["conv1.weight"])
    assert torch.equal(without["fc1.weight"], whole["fc1.weight"])


def test_a_swept_block_is_a_key_of_the_table_like_any_other(app, folder):
    outcome = app("recipe=task_arithmetic", "blocks=digits_late,none", "blocks.conv1=0.1,0.9", *NONE)

    assert outcome.status == 0, outcome.err
    found = [(row["blocks"], row["blocks.conv1"]) for row in rows(sweep_of(folder))]
    assert found == [(preset, weight) for preset in ("digits_late", "none") for weight in ("0.1", "0.9")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sweep=zip", "alpha=0.1,0.2", "k=0.1"], None),
        (["sweep=zip", "alpha=0.1,0.2", "k=0.1,0.2,0.3"], "sweep=zip needs lists of one length"),
        (["sweep=points"], "sweep=points needs points"),
        (["sweep=points", "sweep.file=none.csv"], "sweep.file=none.csv cannot be read"),
        (["sweep=latin"], "sweep=latin draws from ranges and lists, and there is none"),
        (["sweep=latin", "sweep.n=0", "alpha=interval(0,1)"], "sweep.n=0: expected how many points"),
        (["sweep=latin", "alpha=tag(log,interval(0,1))"], "above 0 for log"),
        (["alpha=interval(0,1)", "-m"], "alpha: sweep=grid needs values, not a range"),
        (["alpha=0.1,0.2", "sweep.replicates=2", "-m"], "this recipe has no seed"),
        (["sweep=leave_one_block_out", "recipe=n_average"], "takes no strength for each block"),
        (["sweep=only_one_block", "sweep.by=blok"], "sweep.by=blok: there is no such part of a model"),
        (["sweep=only_one_block", "alpha=interval(0,1)"], "alpha: sweep=only_one_block needs values"),
        (["sweep=only_one_block", "blocks=digits_late"], "gives every block its strength itself"),
        (["alpha=0.1,0.2", "sweep.mode=latin", "-m"], "sweep.n=None: expected how many points"),
        (["alpha=0.1,0.2", "sweep.share=3/2", "-m"], "sweep.share=3/2: expected a part"),
        (["alpha=0.1,0.2", "sweep.share=3/3", "-m"], "sweep.share=3/3: of 2 points there is none left"),
        (["sweep=zipp", "alpha=0.1,0.2"], "sweep=zipp: there is no such sweep. Did you mean 'zip'?"),
        (["sweep=zip", "+seed=1,2", "alpha=0.1,0.2"], "seed is swept, but the recipe 'ties' does not use it"),
    ],
)
def test_a_sweep_that_cannot_be_made_is_an_error_before_any_work(app, folder, arguments, message):
    outcome = app(*arguments, "output=none", "evaluator=none")

    if message is None:
        assert outcome.status == 0, outcome.err
        return
    assert outcome.status != 0
    assert message in outcome.err.replace("\n", " ")
    assert not (folder / "outputs").exists()


def test_two_processes_do_not_share_a_sweeps_folder(app, folder):
    app("alpha=0.3,0.5", *NONE)
    taken = TargetLock(sweep_of(folder) / "sweep")
    try:
        outcome = app("alpha=0.3,0.5", *NONE)
    finally:
        taken.release()

    assert outcome.status == 0
    assert len(list((folder / "outputs" / "multiruns").iterdir())) == 2


def test_two_processes_sweep_on_one_store_at_once(folder):
    command = [sys.executable, "-m", "mecha_exp", "alpha=0.3,0.5", "tracking=none", *NONE]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) for _ in range(2)]

    assert [process.wait(timeout=180) for process in both] == [0, 0]
    sweeps = list((folder / "outputs" / "multiruns").iterdir())
    statuses = {path.parent: json.loads(path.read_text())["status"] for path in folder.rglob("run.json")}
    assert set(statuses.values()) == {"FINISHED"}
    assert len(statuses) == 2 * len(sweeps)
    assert len(list((folder / "outputs" / "store" / "points").iterdir())) == 2


def test_points_that_are_no_longer_listed_are_not_in_the_table(app, folder, passes_run):
    for values in (["0.1", "0.2", "0.3"], ["0.1", "0.3"]):
        (folder / "points.csv").write_text("\n".join(["alpha", *values]))
        assert app("sweep=points", "sweep.file=points.csv", *NONE).status == 0
        assert [row["alpha"] for row in rows(sweep_of(folder))] == values
    for values in (["0.1", "0.2", "0.3"], ["0.1", "0.3"]):
        assert app(f"alpha={','.join(values)}", "hydra.sweep.dir=fixed", *NONE).status == 0
        assert [row["alpha"] for row in rows(folder / "fixed")] == values
    assert passes_run == [3]


def test_two_projects_with_one_store_keep_their_folders_apart(app, folder, monkeypatch, passes_run):
    for name in ("one", "two"):
        (folder / name).mkdir()
        monkeypatch.chdir(folder / name)
        assert app("alpha=0.3,0.5", f"store={folder / 'store'}", *NONE).status == 0
        assert len(records(sweep_of(folder / name))) == 2
    assert passes_run == [2]


def test_one_block_alone_has_the_strength_that_is_swept(app, folder):
    arguments = ("sweep=only_one_block", "recipe=task_arithmetic,ties", "alpha=0.3,0.7", "output=none")

    assert app(*arguments, "evaluator=none").status == 0

    made = records(sweep_of(folder))
    assert len({record["name"] for record in made}) == len(made) == 2 * 2 * 5
    for record in made:
        (weights,) = record["block_weights"].values() if record["block_weights"] else ({},)
        alone = next((word[8:] for word in record["overrides"] if word.startswith("++block=")), None)
        alpha = next(float(word[6:]) for word in record["overrides"] if word.startswith("alpha="))
        assert weights == ({block: alpha * (block == alone) for block in weights})
        assert bool(weights) is (alone is not None)


def test_the_strength_of_a_block_is_what_the_recipe_calls_it(app, folder):
    assert app("sweep=only_one_block", "recipe=passthrough", "scale=0.5", *NONE).status == 0

    weights = [record["block_weights"].get("scale", {}) for record in records(sweep_of(folder))]
    assert [sorted(of_blocks.values()) for of_blocks in weights] == [[]] + [[0.0, 0.0, 0.0, 0.5]] * 4


def test_parts_of_other_kinds_are_left_out(app, folder):
    assert app("sweep=leave_one_block_out", "sweep.by=component", *NONE).status == 0

    assert len(records(sweep_of(folder))) > 1


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


def test_a_point_that_succeeded_after_all_has_not_failed_before(app, folder, moody, passes_run):
    command = ("alpha=0.3,0.5", "evaluator.name=test_moody", "-m")
    assert app(*command).status != 0
    moody.append("works")
    assert app(*command).status == 0
    assert app(*command, "rerun=never").status == 0
    assert passes_run == [2]


def test_a_pattern_of_recipes_is_a_list_of_them(app, folder):
    assert app("recipe=glob(weighted_s*)", "alpha=0.25", *NONE).status == 0

    recipes = [word for words in overrides(sweep_of(folder)) for word in words if word.startswith("recipe=")]
    assert recipes == ["recipe=weighted_subtraction", "recipe=weighted_sum"]


def test_models_of_other_shapes_are_merged_in_passes_of_their_own(app, folder, passes_run):
    for name, size in (("a", 3), ("b", 3), ("c", 5), ("d", 5)):
        save_file({"w": torch.arange(float(size))}, folder / f"{name}.safetensors")
    arguments = ("recipe=weighted_sum", "sweep=zip", "models.base=a.safetensors,c.safetensors")

    assert app(*arguments, "models.experts=[b.safetensors],[d.safetensors]", "evaluator=none").status == 0

    assert passes_run == [1, 1]
    made = [load_file(sweep_of(folder) / str(n) / "model.safetensors")["w"].tolist() for n in range(2)]
    assert made == [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0, 3.0, 4.0]]


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


def test_sweeps_are_listed_by_their_points(app, folder):
    app("alpha=0.3,0.5", *NONE)
    app("alpha=0.1,0.2", *NONE)

    listed = json.loads(app("ls", "--sweeps", "alpha>0.4", "--json").out)

    assert [sweep["points"] for sweep in listed["sweeps"]] == [2]
    assert listed["points"] == []


def test_a_point_that_the_dashboard_did_not_get_is_logged_at_the_end(app, folder, monkeypatch):
    log_folder, calls = track.log_folder, []

    def moody(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise TrackingError("the server is away")
        return log_folder(*arguments)

    monkeypatch.setattr("mecha_exp.app.run.log_folder", moody)

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
