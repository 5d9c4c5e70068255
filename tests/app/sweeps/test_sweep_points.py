"""Which points a sweep has: modes beyond the grid, several recipes, blocks."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sweep_folders import NONE, overrides, records, rows, sweep_of


@pytest.mark.parametrize("launcher", ["onepass", "basic"])
def test_each_of_several_recipes_gets_the_hyperparameters_that_it_has(app, folder, launcher):
    words = ["recipe=n_average,ties,dare_linear", "alpha=0.3,0.5", "k=0.1,0.2", "density=0.4"]

    outcome = app(*words, "sweep.replicates=2", f"hydra/launcher={launcher}", *NONE)

    assert outcome.status == 0, outcome.err
    assert {r["name"] for r in records(sweep_of(folder))} == {
        "recipe=n_average",
        *(f"recipe=ties,alpha={alpha},k={k}" for alpha in (0.3, 0.5) for k in (0.1, 0.2)),
        *(f"recipe=dare_linear,alpha={alpha},seed={seed}" for alpha in (0.3, 0.5) for seed in (0, 1)),
    }
    drawn = [r["parameters"]["density"] for r in records(sweep_of(folder)) if "seed" in r["name"]]
    assert drawn == [0.4] * 4
    assert "k: not of n_average, dare_linear, which run without it" in outcome.out
    assert "density: not of n_average, ties, which run without it" in outcome.out
    assert "seed: not of" not in outcome.out  # nobody has asked for one
    assert "n_average, ties, dare_linear by alpha, k, seed" in outcome.out
    noted = json.loads((sweep_of(folder) / "sweep.json").read_text())
    assert set(words) < set(noted["command"])  # as it was typed


def test_a_seed_that_is_given_is_the_first_of_every_recipe_that_draws(app, folder):
    outcome = app("recipe=ties,dare_ties,dare_linear", "seed=7", "sweep.replicates=2", *NONE)

    assert outcome.status == 0, outcome.err
    assert [r["parameters"].get("seed") for r in records(sweep_of(folder))] == [None, 7, 8, 7, 8]


def test_a_seed_that_is_given_is_the_first_of_the_replicates(app, folder):
    outcome = app("recipe=dare_ties", "seed=7", "alpha=0.3,0.5", "sweep.replicates=2", *NONE)

    assert outcome.status == 0, outcome.err
    assert [row["seed"] for row in rows(sweep_of(folder))] == ["7", "8", "7", "8"]


def test_what_a_listed_point_names_is_not_left_out(app, folder):
    points = "sweep.points=[{recipe:ties,k:0.2},{recipe:n_average,k:0.2}]"

    outcome = app("sweep=points", points, *NONE)

    assert outcome.status != 0
    assert "k: the recipe 'n_average' has no 'k'." in outcome.err


def test_a_pattern_of_recipes_is_a_list_of_them(app, folder):
    assert app("recipe=glob(weighted_s*)", "alpha=0.25", *NONE).status == 0

    recipes = [word for words in overrides(sweep_of(folder)) for word in words if word.startswith("recipe=")]
    assert recipes == ["recipe=weighted_subtraction", "recipe=weighted_sum"]


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
    base = load_file(Path(__file__).parents[3] / "examples" / "digits" / "base.safetensors")
    assert torch.equal(without["conv1.weight"], base["conv1.weight"])
    assert torch.equal(without["fc1.weight"], whole["fc1.weight"])


def test_a_swept_block_is_a_key_of_the_table_like_any_other(app, folder):
    outcome = app("recipe=task_arithmetic", "blocks=digits_late,none", "blocks.conv1=0.1,0.9", *NONE)

    assert outcome.status == 0, outcome.err
    found = [(row["blocks"], row["blocks.conv1"]) for row in rows(sweep_of(folder))]
    assert found == [(preset, weight) for preset in ("digits_late", "none") for weight in ("0.1", "0.9")]


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sweep=zip", "alpha=0.1,0.2", "k=0.1"], None),
        (["sweep=zip", "alpha=0.1,0.2", "k=0.1,0.2,0.3"], "sweep=zip needs lists of one length"),
        (["sweep=points"], "sweep=points needs points"),
        (["sweep=points", "sweep.file=none.csv"], "sweep.file=none.csv cannot be read"),
        (["sweep=latin"], "sweep=latin draws from ranges and lists, and there is none"),
        (["sweep=latin", "sweep.n=0", "alpha=interval(0,1)"], "sweep.n=0: expected how many points"),
        (["sweep=latin", "alpha=tag(log,interval(0,1))"], "bounds of a logarithmic interval are above 0"),
        (["sweep=latin", "alpha=interval(1,0)"], "alpha=interval(1,0): the first bound is the smaller one"),
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
