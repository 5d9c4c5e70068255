"""A recipe template in a configuration: its parameters are filled, and swept, from the command line."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mecha_exp import deserialize_path, model, n_average, parameter, serialize_and_save, weighted_sum

BASE = ["recipe=mecha", "recipe.path=template.mecha", "evaluator=none"]


@pytest.fixture
def template(folder: Path) -> Path:
    """Models and a template in the current folder."""
    for name, value in (("a", 0.0), ("b", 1.0), ("c", 3.0)):
        save_file({"w": torch.full((4,), value)}, folder / f"{name}.safetensors")
    serialize_and_save(
        weighted_sum(parameter("a"), parameter("c", "weight"), alpha=parameter("alpha")), "template.mecha"
    )
    return folder


def test_parameters_are_filled_by_name(app, template):
    outcome = app(*BASE, "a=a.safetensors", "c=b.safetensors", "alpha=0.25", "output.path=m.safetensors")

    assert outcome.status == 0, outcome.err
    assert load_file("m.safetensors")["w"].tolist() == [0.25] * 4
    assert deserialize_path("m.safetensors") is weighted_sum("a.safetensors", "b.safetensors", alpha=0.25)


def test_a_recipe_may_fill_a_parameter(app, template):
    serialize_and_save(n_average("b.safetensors", "c.safetensors"), "other.mecha")

    outcome = app(*BASE, "a=a.safetensors", "c=other.mecha", "alpha=0.5", "output.path=m.safetensors")

    assert outcome.status == 0, outcome.err
    assert load_file("m.safetensors")["w"].tolist() == [1.0] * 4


def test_a_template_is_swept(app, template):
    outcome = app(
        *BASE, "a=a.safetensors", "c=b.safetensors,c.safetensors", "alpha=0.25,0.5",
        "output.path=m-${c}-${alpha}.safetensors", "-m",
    )  # fmt: skip

    assert outcome.status == 0, outcome.err
    assert "c=b.safetensors,alpha=0.25" in outcome.out
    assert "++" not in outcome.out
    made = {path.name: load_file(path)["w"][0].item() for path in sorted(template.glob("m-*"))}
    assert made == {
        "m-b.safetensors-0.25.safetensors": 0.25,
        "m-b.safetensors-0.5.safetensors": 0.5,
        "m-c.safetensors-0.25.safetensors": 0.75,
        "m-c.safetensors-0.5.safetensors": 1.5,
    }


def test_a_configuration_of_ones_own_may_have_a_template_and_its_values(app, template):
    (template / "mine" / "recipe").mkdir(parents=True)
    (template / "mine" / "recipe" / "own.yaml").write_text(
        "# @package _global_\n"
        "strength: 0.5\n"
        "recipe:\n"
        "  method: weighted_sum\n"
        "  a: {parameter: first}\n"
        "  b: {mecha: template.mecha}\n"
        "  alpha: ${strength}\n"
        "a: a.safetensors\n"
        "c: c.safetensors\n"
        "alpha: 1\n"
    )

    outcome = app(
        "--config-dir",
        "mine",
        "recipe=own",
        "first=b.safetensors",
        "evaluator=none",
        "output.path=m.safetensors",
    )

    assert outcome.status == 0, outcome.err
    assert load_file("m.safetensors")["w"].tolist() == [2.0] * 4


def test_a_merged_model_is_a_recipe_too(app, template):
    serialize_and_save(n_average(model("a.safetensors"), "c.safetensors"), "average.mecha")
    app("merge", "average.mecha", "-o", "first.safetensors")

    outcome = app(
        "recipe=mecha", "recipe.path=first.safetensors", "evaluator=none", "output.path=again.safetensors"
    )

    assert outcome.status == 0, outcome.err
    first, again = load_file("first.safetensors"), load_file("again.safetensors")
    assert again["w"].tolist() == first["w"].tolist() == [1.5] * 4


def test_a_model_that_a_configuration_made_is_merged_again_to_the_same_bytes(app, template):
    words = ["a=a.safetensors", "c=c.safetensors", "alpha=0.3", "output.dtype=bfloat16"]
    app(*BASE, *words, "engine.compute_dtype=float64", "output.path=first.safetensors")

    outcome = app("merge", "first.safetensors", "-o", "again.safetensors")

    assert outcome.status == 0, outcome.err
    assert Path("again.safetensors").read_bytes() == Path("first.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a=a.safetensors"], "the recipe has 2 unfilled parameters: 'c' (weight), 'alpha'."),
        (["a=a.safetensors", "d=b.safetensors"], "d: the recipe 'mecha' has no 'd'."),
        (["a=a", "c=b", "alpha=high"], "weighted_sum: alpha: expected a number, got 'high'"),
        (["a=a", "c=nowhere.mecha", "alpha=1"], "the recipe 'nowhere.mecha' does not exist."),
        (["recipe.path=nowhere.mecha", "a=a"], "the recipe 'nowhere.mecha' does not exist. Looked in"),
        (["a=a", "c=b", "alpha=1", "k=1,2", "-m"], "k: the recipe 'mecha' has no 'k'."),
    ],
)
def test_what_is_wrong_is_said_before_any_work(app, template, words, said):
    outcome = app(*BASE, *words)

    assert outcome.status == 1
    assert said in outcome.err
    assert not (template / "outputs").exists()
