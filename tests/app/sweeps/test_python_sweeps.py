"""`mecha_exp.sweep` runs what the command line runs, and tells it as data."""

import csv
from pathlib import Path

import hydra
import numpy as np
import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from sweep_folders import records

import mecha_exp as me
from mecha_exp.app.notebook import _text
from mecha_exp.app.words.quotes import parse

SHARED = {"recipe": "ties", "output": "none", "tracking": "none"}


@pytest.mark.usefixtures("figures")
def test_a_sweep_of_python_is_the_sweep_of_the_command_line(app, folder: Path, capsys):
    done = me.sweep(SHARED, {"alpha": [0.3, 0.5]}, folder="python")
    said = capsys.readouterr().out
    outcome = app("recipe=ties", "output=none", "alpha=0.3,0.5", "-m", "hydra.sweep.dir=typed", "store=null")

    assert outcome.status == 0 and "[2/2]" in said and str(done).splitlines()[4].split()[0] == "0.5"
    ours, theirs = records(folder / "python"), records(folder / "typed")
    assert [r["signature"] for r in ours] == [r["signature"] for r in theirs]
    assert [point.metrics["accuracy"] for point in done.points] == [r["metrics"]["accuracy"] for r in theirs]
    assert (done.folder / "verdict.json").read_bytes() == (folder / "typed" / "verdict.json").read_bytes()
    with (done.folder / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == done.columns["name"]
    assert done.figures and all(path.is_file() for path in done.figures)


def test_the_result_has_the_best_point_and_the_verdict(folder: Path, capsys):
    done = me.sweep(SHARED, {"alpha": [0.5, 0.3]}, quiet=True)

    assert capsys.readouterr().out == ""
    assert done.best is done.points[0] and done.best.settings == {"alpha": 0.5} and done.best.model is None
    assert done.verdict is not None and done.verdict.selected.point == "alpha=0.5"
    assert "'alpha=0.5' has accuracy" in done.conclusion and "accuracy" in done._repr_html_()
    assert done == me.SweepResult(done.folder)


def test_points_that_fail_are_points_with_an_error(folder: Path, capsys):
    done = me.sweep({**SHARED, "recipe": "dare_ties"}, {"density": [0.5, 7]}, quiet=True)

    assert [point.error is None for point in done.points] == [True, False]
    assert isinstance(done.points[1], me.SweepPoint) and "density" in str(done.points[1].error)


def test_an_evaluator_that_is_defined_here_measures(folder: Path):
    @me.evaluator("test_of_python", metric="first")
    def first(state_dict):
        return {"first": float(next(iter(state_dict.values())).flatten()[0])}

    done = me.sweep(
        {**SHARED, "evaluator.name": "test_of_python"}, {"alpha": np.array([0.3, 0.5])}, quiet=True
    )

    assert {point.settings["alpha"] for point in done.points} == {0.3, 0.5}
    assert all(np.isfinite(point.metrics["first"]) for point in done.points)


def test_a_program_that_uses_hydra_finds_its_own_again(folder: Path):
    with hydra.initialize_config_module("mecha_exp.conf", version_base="1.3"):
        hydra_before, job_before = GlobalHydra.instance().hydra, HydraConfig.instance().cfg

        done = me.sweep({**SHARED, "evaluator": "none"}, {"alpha": [0.3, 0.5]}, quiet=True)

        assert len(done.points) == 2
        assert GlobalHydra.instance().hydra is hydra_before is not None
        assert HydraConfig.instance().cfg is job_before


def test_an_answer_of_hydra_leaves_nothing_behind(app, folder: Path):
    before = HydraConfig.instance().cfg

    assert app("recipe=ties", "--cfg", "job").status == 0

    assert HydraConfig.instance().cfg is before and not GlobalHydra.instance().is_initialized()


@pytest.mark.parametrize(
    ("settings", "vary", "message"),
    [
        ({"recipe": "tis"}, {"alpha": [1]}, "there is no such recipe. Did you mean 'ties'"),
        ({}, {"alpha": []}, r"vary\['alpha'\] has no values"),
        ({}, {"alpha": 0.3}, r"vary\['alpha'\]: expected a list of values, got 0.3"),
        (
            {"models.base": object()},
            {"alpha": [1]},
            "expected a number, a text, a path, None, a list or a dict",
        ),
        ({}, {"alphas": [1, 2]}, "alphas: the recipe 'ties' has no 'alphas'"),
    ],
)
def test_what_is_wrong_is_an_error_before_any_work(settings, vary, message: str, folder: Path):
    with pytest.raises(me.ConfigError, match=message):
        me.sweep({**SHARED, **settings}, vary, quiet=True)

    assert not list(folder.rglob("run.json"))


@pytest.mark.parametrize(
    "value",
    [
        *(
            None,
            True,
            0.1,
            -3,
            1e-9,
            float("inf"),
            "it's [a], b",
            "null",
            "0.5",
            "",
            "a b.safetensors",
            "${x}",
        ),
        *(["a, b", 1, None, {"k": [True, "x:y"]}], {"a b": {"c": 1}}),
    ],
)
def test_a_value_means_the_same_as_an_override(value: object):
    override = parse(f"x={_text(value)}")

    assert override is not None and not override.is_sweep_override()
    assert override.value() == value


def test_a_folder_of_configurations_and_paths_can_be_given(folder: Path):
    (folder / "mine" / "recipe").mkdir(parents=True)
    (folder / "mine" / "recipe" / "half.yaml").write_text(
        "# @package _global_\nshare: 0.5\nrecipe:\n  method: weighted_sum\n  alpha: ${share}\n"
        '  a: "${models.base}"\n  b: "${models.experts.0}"\n'
    )

    done = me.sweep(
        {**SHARED, "recipe": "half", "evaluator": "none"},
        {"share": [0.1, 0.2]},
        config_dir=folder / "mine",
        quiet=True,
    )

    assert [point.settings for point in done.points] == [{"share": 0.1}, {"share": 0.2}]
    assert done.best is None and done.verdict is None and done.conclusion == ""
