"""A search with several objectives: the Pareto front, on validation and on test, and its hypervolume."""

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweep_folders import records, sweep_of
from two_experts import write_two_experts

from mecha_exp.report.search.hypervolume import hypervolumes

pytest.importorskip("optuna", minversion="4")

PLUGIN = """
from mecha_exp import evaluator

@evaluator("test_two", metric="near_a", direction="minimize", splits=("validation", "test"))
def two(state_dict, *, split):
    x, y = state_dict["w"].tolist()
    shift = 0.0 if split == "validation" else 0.125
    return {"near_a": (x - 1) ** 2 + y**2 + shift, "reach": -(x**2 + (y - 1) ** 2) - shift}
"""


@pytest.fixture
def search(folder: Path, app):
    """Runs a search of the weights of two experts, each of which is best in one of two metrics."""
    models = write_two_experts(folder, PLUGIN)
    fixed = ["recipe=task_arithmetic", "alpha=1", "evaluator.name=test_two", "output=none"]
    both = ["evaluator.metric=[near_a,reach]", "evaluator.direction=[minimize,maximize]"]
    space = ["weights.0=interval(0,1)", "weights.1=interval(0,1)"]
    return lambda *words, metrics=both: app("sweep=search", *models, *fixed, *metrics, *space, *words)


def on_front(pairs: list[tuple[float, float]]) -> set[int]:
    """The places of the pairs that no other one beats: less of the first and more of the second."""
    return {
        i
        for i, (a, b) in enumerate(pairs)
        if not any(x <= a and y >= b and (x, y) != (a, b) for x, y in pairs)
    }


@pytest.mark.parametrize("sampler", ["tpe", "nsga2"])
def test_the_front_is_chosen_on_validation_and_measured_on_test(search, app, folder, sampler):
    outcome = search("sweep.trials=20", "sweep.batch=5", f"sweep.sampler={sampler}", "sweep.reference=[2,-2]")

    assert outcome.status == 0, outcome.err
    measured = records(sweep_of(folder))
    pairs = [(r["metrics"]["near_a"], r["metrics"]["reach"]) for r in measured]
    expected = on_front(pairs)
    front = json.loads(app("table", "--json").out)["verdict"]["front"]
    assert {member["point"] for member in front["members"]} == expected
    assert {i for i, r in enumerate(measured) if "test/near_a" in r["metrics"]} == expected
    for member in front["members"]:
        assert member["reported"]["near_a"] == pytest.approx(member["values"]["near_a"] + 0.125)
        assert member["overrides"] == measured[member["point"]]["overrides"]
    assert front["reference"] == {"near_a": 2, "reach": -2}
    assert front["hypervolume"] == pytest.approx(area(pairs, (2, -2))) == front["hypervolumes"][-1]
    assert f"on 'validation' has {len(expected)} of 20 settings" in " ".join(outcome.out.split())
    study = (sweep_of(folder) / "study.log").read_text()
    assert '"directions":[1,2]' in study  # minimise the first, maximise the second


def test_members_of_the_front_are_named_by_their_folders(search, app, folder):
    assert search("sweep.trials=6", "hydra.sweep.dir=s").status == 0
    shutil.rmtree("s/0")  # as in a part of a shared search
    sweep = json.loads(Path("s/sweep.json").read_text())
    Path("s/sweep.json").write_text(json.dumps({**sweep, "points": 0}))

    front = json.loads(app("table", "s", "--json").out)["verdict"]["front"]

    for member in front["members"]:
        record = json.loads(Path("s", str(member["point"]), "run.json").read_text())
        assert record["overrides"] == member["overrides"]


def area(pairs: list[tuple[float, float]], reference: tuple[float, float]) -> float:
    """The hypervolume in two dimensions, as a sum over strips."""
    gains = sorted((reference[0] - a, b - reference[1]) for a, b in pairs)
    edges = [0.0, *sorted({x for x, _ in gains if x > 0})]
    heights = [max((y for x, y in gains if x >= right), default=0) for right in edges[1:]]
    return sum(
        (right - left) * height
        for (left, right), height in zip(itertools.pairwise(edges), heights, strict=True)
    )


@given(
    st.integers(2, 4).flatmap(
        lambda width: st.lists(st.lists(st.integers(0, 5), min_size=width, max_size=width), max_size=7)
    )
)
def test_the_hypervolume_counts_the_cells_that_some_point_dominates(points):
    width = len(points[0]) if points else 2
    names = [f"m{i}" for i in range(width)]
    volumes = hypervolumes(
        {name: [point[i] for point in points] for i, name in enumerate(names)},
        dict.fromkeys(names, "maximize"),
        dict.fromkeys(names, 0.0),
    )

    for end, volume in enumerate(volumes, 1):
        cells = itertools.product(range(5), repeat=width)
        counted = sum(any(all(np.array(p) > cell) for p in points[:end]) for cell in cells)
        assert volume == pytest.approx(counted)


@pytest.mark.parametrize(
    ("words", "metrics", "message"),
    [
        (
            ["sweep.sampler=cmaes"],
            None,
            "sweep.sampler=cmaes searches for one objective, and evaluator.metric names 2. Choose "
            "one of tpe, nsga2, nsga3, gp, qmc, random.",
        ),
        (["sweep.direction=[minimize,minimize]"], None, "looks for the worst reach, whose evaluator says"),
        (["sweep.direction=[minimize]"], None, "expected a direction for each of near_a, reach"),
        (["sweep.reference=[1]"], None, "sweep.reference=[1]: expected a number for each of near_a, reach"),
        (["sweep.reference=[1,x]"], None, "expected a number for each of near_a, reach, as in [0,0]"),
        (
            ["sweep.reference=[1]"],
            ["evaluator.metric=near_a"],
            "sweep.reference=[1]: one metric has no hypervolume. Name several with evaluator.metric=[a,b]",
        ),
        ([], ["evaluator.metric=[near_a,reach]"], "evaluator.metric=reach: say whether more of it is better"),
        ([], ["evaluator.metric=[near_a,near_a]"], "expected the names of different metrics, as in [a,b]"),
        (
            [],
            ["evaluator.metric=[near_a,reach]", "evaluator.direction=[minimize]"],
            "evaluator.direction=['minimize']: expected a direction for each of near_a, reach",
        ),
    ],
)  # fmt: skip
def test_bad_objectives_are_said_before_any_work(search, folder, words, metrics, message):
    outcome = search(*words, **({} if metrics is None else {"metrics": metrics}))

    assert outcome.status != 0 and message in outcome.err.replace("\n", " ")
    assert "Traceback" not in outcome.err and not (folder / "outputs" / "multiruns").exists()


def test_points_do_not_race_for_several_objectives(app, folder):
    outcome = app(
        "alpha=0.2,0.4", "evaluator.race=true", "evaluator.metric=[accuracy/0_3,accuracy/7_9]", "-m"
    )

    assert outcome.status != 0
    assert "are chosen by evaluator.metric=accuracy/0_3,accuracy/7_9" in outcome.err.replace("\n", " ")


@pytest.mark.usefixtures("figures")
def test_a_metric_of_a_task_has_the_direction_and_the_intervals_of_its_mean(app, folder):
    words = ("recipe=task_arithmetic", "alpha=0.2,0.4,0.6", "output=none", "-m")
    outcome = app(*words, "evaluator.metric=[accuracy/0_3,accuracy/7_9]")

    assert outcome.status == 0, outcome.err
    front = json.loads((sweep_of(folder) / "verdict.json").read_text())["front"]
    assert front["objectives"] == {"accuracy/0_3": "maximize", "accuracy/7_9": "maximize"}
    assert "95 % interval over examples" in outcome.out
    figures = {path.name for path in sweep_of(folder).glob("sweep*.png")}
    assert {"sweep.png", "sweep-hypervolume.png"} <= figures and "sweep-pareto.png" not in figures


def test_an_objective_that_nothing_returns_fails_the_points(search):
    outcome = search(
        "sweep.trials=2", metrics=["evaluator.metric=[near_a,raech]", "evaluator.direction=minimize"]
    )

    assert outcome.status != 0
    assert "evaluator.metric=raech: no evaluator returned it. Did you mean 'reach'?" in outcome.err.replace(
        "\n", " "
    )
