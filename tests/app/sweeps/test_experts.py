"""Experts as factors of a sweep, and sets of experts as replicates."""

import itertools
import json
import math
from pathlib import Path

import pandas
import pytest
from safetensors.torch import load_file, save_file
from sweep_folders import NONE, overrides, records, rows, sweep_of

from mecha_exp.lab import points as lab
from mecha_exp.report.conclusion import concluded_results
from mecha_exp.report.export import columns
from mecha_exp.report.figures import draw_figures
from mecha_exp.report.intervals import intervals
from mecha_exp.report.sweep_results import results_of
from mecha_exp.runs.sweep import Sweep

DIGITS = Path(__file__).parents[3] / "examples" / "digits"
NAMES = ["expert_0_3", "expert_4_6", "expert_7_9"]
MEASURED = ("recipe=task_arithmetic", "output=none")


@pytest.fixture
def sets(tmp_path: Path) -> str:
    """Two sets of experts: the demo's, and the same scaled a little."""
    for name in NAMES:
        (tmp_path / "other").mkdir(exist_ok=True)
        weights = {k: v * 1.01 for k, v in load_file(DIGITS / f"{name}.safetensors").items()}
        save_file(weights, tmp_path / "other" / f"{name}.safetensors")
    folders = (DIGITS, tmp_path / "other")
    listed = ([f"'{folder / name}.safetensors'" for name in NAMES] for folder in folders)
    return f"models.sets=[{','.join('[' + ','.join(experts) + ']' for experts in listed)}]"


def test_points_that_differ_in_their_set_are_replicates_of_one_setting(app, folder, sets):
    outcome = app(*MEASURED, "alpha=0.2,0.4", "sweep.replicate=[experts]", sets, "-m")

    assert outcome.status == 0, outcome.err
    made = records(sweep_of(folder))
    assert [r["name"] for r in made] == [f"alpha={a},models.set={i}" for a in (0.2, 0.4) for i in (0, 1)]
    assert [Path(r["parameters"]["input/expert_0_3"]).parent.name for r in made] == ["digits", "other"] * 2
    results = results_of(Sweep.load(sweep_of(folder)), sweep_of(folder))
    assert [setting.values for setting in results.settings] == [{"alpha": 0.2}, {"alpha": 0.4}]
    for setting, pair in zip(results.settings, (made[:2], made[2:]), strict=True):
        estimate = setting.estimate("accuracy")
        assert estimate.mean == pytest.approx(sum(r["metrics"]["accuracy"] for r in pair) / 2)
        assert estimate.count == 2 and estimate.half_width is not None
    both = [r["references"]["expert_0_3"]["accuracy"] for r in made[:2]]
    assert results.references["expert_0_3"]["accuracy"] == pytest.approx(sum(both) / 2)
    assert [row["models.set"] for row in rows(sweep_of(folder))] == ["0", "1", "0", "1"]


def test_inputs_of_several_sets_are_replicates_and_each_set_has_its_own_experts(app, folder, sets):
    outcome = app(*MEASURED, "alpha=0.2,0.4", "sweep.replicate=[experts]", sets, "-m")

    assert outcome.status == 0, outcome.err
    assert "95 % interval over examples and sets of experts" in outcome.out
    results = concluded_results(Sweep.load(sweep_of(folder)), sweep_of(folder))
    scores = {(score.point, score.split): score for score in results.verdict.scores}
    bounds = intervals(results)
    for name in NAMES:
        low, high = bounds[name, "accuracy"]
        assert scores[name, "validation"].replicates == 2
        assert low <= results.references[name]["accuracy"] <= high
        assert scores[name, "validation"].overall.value == pytest.approx(results.references[name]["accuracy"])
    for setting in results.settings:
        for split, metric in (("validation", ""), ("test", "test/")):
            of_points = setting.estimate(f"{metric}accuracy/normalised").mean
            if (setting.name, split) in scores:
                assert scores[setting.name, split].normalised.overall.value == pytest.approx(of_points)
    table = pandas.read_parquet(sweep_of(folder) / "outcomes.parquet")
    assert set(table.name[table.role == "input"]) == {"base", *NAMES}
    means = table[(table.name == "expert_0_3") & (table.split == "validation")].groupby(["experts", "task"])
    assert [number for number, _ in means.value.mean().index] == [0, 0, 0, 1, 1, 1]


def test_a_point_without_some_experts_is_divided_by_those_of_its_own_set(app, folder, sets):
    words = ("sweep=leave_one_expert_out", "sweep.replicate=[experts]", sets)

    assert app(*MEASURED, *words, "models.expert_of={0_3: expert_0_3}").status == 0

    without = [r for r in records(sweep_of(folder)) if "++expert=expert_0_3" in r["overrides"]]
    assert len(without) == 2
    for record in without:
        assert record["expert_of"] == {"0_3": "expert_0_3"}
        assert "input/expert_0_3" not in record["parameters"] and "expert_0_3" in record["references"]
        assert 0 < record["metrics"]["accuracy/normalised"] < 1


def test_seeds_and_sets_make_replicates_together(app, folder, sets):
    words = ["recipe=dare_linear", "sweep.replicate=[seed,experts]", "sweep.replicates=2", sets]

    assert app(*words, *NONE).status == 0

    made = overrides(sweep_of(folder))
    pairs = {tuple(sorted(w for w in words if w.startswith(("seed=", "++models.set=")))) for words in made}
    assert len(made) == len(pairs) == 4
    results = results_of(Sweep.load(sweep_of(folder)), sweep_of(folder))
    assert len(results.settings) == 1


def test_each_expert_is_left_out_once(app, folder):
    outcome = app("sweep=leave_one_expert_out", *MEASURED)

    assert outcome.status == 0, outcome.err
    assert "expert left out" in outcome.out
    table = rows(sweep_of(folder))
    assert {row["expert"] for row in table} == {"", *NAMES}
    for row in table:
        assert [row[f"expert/{name}"] for name in NAMES] == [
            str(int(name != row["expert"])) for name in NAMES
        ]
        assert row["experts"] == str(3 - bool(row["expert"]))
    without = next(r for r in records(sweep_of(folder)) if r["name"] == "expert=expert_0_3")
    assert {name for name in without["parameters"] if name.startswith("input/")} == {
        "input/base",
        "input/expert_4_6",
        "input/expert_7_9",
    }


def test_lists_of_experts_have_a_column_for_each_expert(app, folder):
    lists = ",".join(
        f"[{','.join(str(DIGITS / f'{n}.safetensors') for n in names)}]" for names in (NAMES[:2], NAMES)
    )

    assert app("recipe=task_arithmetic", f"models.experts={lists}", "-m", *NONE[:2]).status == 0

    table = rows(sweep_of(folder))
    assert [[row[f"expert/{name}"] for name in NAMES] for row in table] == [["1", "1", "0"], ["1", "1", "1"]]
    assert [row["experts"] for row in table] == ["2", "3"]


def test_every_subset_of_a_size_is_a_point_with_each_set(app, folder, sets):
    words = ["sweep=experts", "sweep.size=2", "sweep.replicate=[experts]", sets]

    assert app(*words, "recipe=task_arithmetic", *NONE).status == 0

    table = rows(sweep_of(folder))
    pairs = [tuple(row[f"expert/{name}"] for name in NAMES) for row in table if row["models.set"] == "1"]
    assert sorted(pairs) == sorted({("1", "1", "0"), ("1", "0", "1"), ("0", "1", "1")})
    for record in records(sweep_of(folder)):
        inputs = [Path(v) for k, v in record["parameters"].items() if k.startswith("input/expert")]
        number = next(w[-1] for w in record["overrides"] if w.startswith("++models.set="))
        assert {path.parent.name for path in inputs} == {("digits", "other")[int(number)]}
        label = next(w.partition("=")[2] for w in record["overrides"] if w.startswith("++subset="))
        assert label == f"[{','.join(path.stem for path in inputs)}]"


def test_drawn_subsets_say_how_many_are_better_than_the_base(app, folder):
    outcome = app("sweep=subsets", "sweep.sizes=[1,3]", "sweep.n=2", *MEASURED)

    assert outcome.status == 0, outcome.err
    made = records(sweep_of(folder))
    assert len(made) == 3
    base = made[0]["references"]["base"]["accuracy"]
    better = sum(r["metrics"]["accuracy"] > base for r in made[:2])
    assert f"subsets of 1: {better} of 2 are better than the base ({base:.4f})" in outcome.out


def test_shapley_values_of_experts_add_up_to_what_all_of_them_add(app, folder):
    outcome = app("sweep=shapley", *MEASURED)

    assert outcome.status == 0, outcome.err
    made = records(sweep_of(folder))
    worth = {
        frozenset(next(w for w in r["overrides"] if w.startswith("++subset="))[10:-1].split(",")): r[
            "metrics"
        ]["accuracy"]
        for r in made
    }
    worth[frozenset()] = made[0]["references"]["base"]["accuracy"]
    assert len(worth) == 8
    for name in NAMES:  # the mean over all orders of what it adds to those before it
        gains = []
        for order in itertools.permutations(NAMES):
            before = frozenset(order[: order.index(name)])
            gains.append(worth[before | {name}] - worth[before])
        assert f"{name} {math.fsum(gains) / 6:+.4f}" in outcome.out
    together = worth[frozenset(NAMES)] - worth[frozenset()]
    assert f"together {together:+.4f}" in outcome.out
    assert draw_figures(results_of(Sweep.load(sweep_of(folder)), sweep_of(folder)), folder)[0].path.is_file()
    (said,) = json.loads(app("why", "--json").out)["shapley"]
    assert math.fsum(v["value"] for v in said["values"].values()) == pytest.approx(together, abs=1e-9)
    assert all(v["ci95"][0] < v["value"] < v["ci95"][1] for v in said["values"].values())
    assert (said["players"], said["intervals_cover"]) == ("expert", "examples")
    assert "Intervals are over examples." in app("why").out
    for name, value in said["values"].items():  # the closing lines have them too
        low, high = value["ci95"]
        assert f"{name} {value['value']:+.4f} ({low:+.4f} to {high:+.4f})" in " ".join(outcome.out.split())


def test_shapley_values_of_blocks(app, folder):
    outcome = app("sweep=shapley", "sweep.by=block", "recipe=task_arithmetic", *NONE[:-1])

    assert outcome.status == 0, outcome.err
    assert len(records(sweep_of(folder))) == 2**4
    table = rows(sweep_of(folder))
    for block in ("conv1", "conv2", "fc1", "fc2"):
        assert sum(row[f"block/{block}"] == "1" for row in table) == 8


def test_more_players_than_can_be_exact_are_sampled():
    from mecha_exp.app.sweep.experts import block_coalitions

    points = block_coalitions([], [f"b{i}" for i in range(12)], "shapley")

    assert 12 < len(points) < 2**12
    assert {"++blocks_merged": "[]", **{f"++blocks.b{i}": "0" for i in range(12)}} in points


def test_the_table_has_the_recipe_and_every_effective_hyperparameter(app, folder):
    assert app("sweep=points", "sweep.points=[{alpha:0.3},{k:0.4}]", *NONE[:-1]).status == 0

    table = columns(results_of(Sweep.load(sweep_of(folder)), sweep_of(folder)))

    assert table["recipe"] == ["ties", "ties"]
    assert table["alpha"] == [0.3, 1.0] and table["k"] == [0.2, 0.4]
    assert table["variant"] == ["paper", "paper"]
    assert json.loads(json.dumps(table["weights"])) == [1.0, 1.0]


@pytest.mark.parametrize("n", [1, 5, 99])
def test_subsets_are_different_and_of_their_size(n: int):
    drawn = lab.subsets_at_random(6, 3, n, seed=0)

    assert len(drawn) == len(set(drawn)) == min(n, 20)
    assert all(len(set(group)) == 3 and list(group) == sorted(group) for group in drawn)
    assert drawn == lab.subsets_at_random(6, 3, n, seed=0)


A, B, C = "a.safetensors", "b.safetensors", "c.safetensors"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sweep=experts", "sweep.size=4"], "sweep.size=4: there are 3 experts, so a subset has 1 to 3"),
        (["sweep=experts", "sweep.size=0"], "sweep.size=0: there are 3 experts"),
        (["sweep=subsets", "sweep.sizes=[2,9]"], "sweep.sizes=9: there are 3 experts"),
        (["sweep=subsets", "sweep.sizes=[]"], "sweep.sizes=[]: expected a list of different sizes"),
        (["sweep=subsets", "sweep.sizes=[2]", "sweep.n=0"], "sweep.n=0: expected how many subsets"),
        (
            ["sweep=shapley", "sweep.by=exprt"],
            "sweep.by=exprt: there are no such players. Did you mean 'expert'",
        ),
        (["sweep=shapley", "sweep.by=block", "recipe=n_average"], "takes no strength for each block"),
        (["sweep=shapley", "weights=[1,2,3]"], "weights lists a value for each of 3 experts"),
        (["sweep=leave_one_expert_out", f"models.experts=[{A}]"], "models.experts lists 1: give two or more"),
        (["sweep=shapley", f"models.experts=[{A},{A}]"], f"models.experts lists {A} twice"),
        (["sweep.replicate=[experts]", "-m"], "models.sets lists no sets"),
        (["sweep.replicate=[experts]", "models.sets=[]", "-m"], "models.sets lists no sets"),
        (["sweep.replicate=[experts]", f"models.sets=[[{A}],[]]", "-m"], "models.sets lists no sets"),
        (["sweep.replicate=[experts]", f"models.sets=[[{A},{B}],[{C}]]", "-m"], "the sets have 2, 1 experts"),
        (
            ["sweep.replicate=[experts]", f"models.sets=[[{A}],[{A}]]", "-m"],
            "sets 0 and 1 are the same experts",
        ),
        (
            ["sweep.replicate=[experts]", f"models.sets=[[{A}],[{B}]]", f"models.experts=[{C}]", "-m"],
            "models.experts is given, and sweep.replicate runs each point with every list",
        ),
        (
            ["sweep=experts", "sweep.replicate=[experts]", f"models.sets=[[{A},{B}],[{A},{C}]]"],
            "set 1 has the experts a, c, and set 0 has a, b",
        ),
        (
            ["sweep.replicate=[data]", "alpha=0.3,0.5", "evaluator=none", "-m"],
            "sweep.replicate has data, and no evaluator measures the points",
        ),
        (["sweep.replicate=[expert]", "-m"], "not in 'expert'. Did you mean 'experts'"),
        (["sweep.replicate=[seed]", "-m"], "say how many seeds with sweep.replicates=5"),
        (
            ["sweep.replicate=[experts]", "sweep.replicates=2", "-m"],
            "sweep.replicates=2 is a number of seeds, and sweep.replicate=[experts] has no seed",
        ),
    ],
)
def test_what_cannot_be_swept_is_an_error(app, folder, words, message):
    outcome = app("recipe=task_arithmetic", *words, "output=none", "evaluator=none")

    assert outcome.status != 0
    assert message in " ".join(outcome.err.split())
    assert not (folder / "outputs").exists()
