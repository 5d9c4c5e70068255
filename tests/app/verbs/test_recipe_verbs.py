"""The verbs on recipe files: merge, compose, show and plan."""

import json
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mecha_exp import (
    deserialize,
    model,
    n_average,
    parameter,
    serialize,
    slerp,
    subtract,
    weighted_sum,
)
from mecha_exp.inspection.recipe_tree import data_of, tree_of

TEMPLATE = dedent("""\
    version 0.1.0
    parameter "a"
    parameter "c" merge_space="weight"
    parameter "alpha"
    merge "weighted_sum" &0 &1 alpha=&2""")


@pytest.fixture
def models(folder: Path) -> Path:
    """Three models and a template in the current folder."""
    for name, value in (("a", 0.0), ("b", 1.0), ("c", 3.0)):
        save_file({"w": torch.full((4,), value)}, folder / f"{name}.safetensors")
    (folder / "template.mecha").write_text(TEMPLATE)
    (folder / "average.mecha").write_text(serialize(n_average("a.safetensors", "c.safetensors")))
    return folder


def merged(path: Path) -> list[float]:
    return load_file(path)["w"].tolist()


def test_a_recipe_file_is_merged_under_its_own_name(app, models):
    outcome = app("merge", "average.mecha")

    assert outcome.status == 0, outcome.err
    assert "average.safetensors" in outcome.out
    assert "merged 1 key in" in outcome.out
    assert merged(models / "average.safetensors") == [1.5] * 4


def test_parameters_are_filled_with_models_recipes_and_numbers(app, models):
    given = ["-p", "a", "b.safetensors", "-p", "c", "average.mecha", "-p", "alpha", "0.5"]

    outcome = app("merge", "template.mecha", *given, "-o", "out/m.safetensors")

    assert outcome.status == 0, outcome.err
    assert merged(models / "out" / "m.safetensors") == [1.25] * 4


def test_a_merged_model_carries_its_recipe_and_is_merged_again_to_the_same_bytes(app, models):
    given = ["-p", "a", "average.mecha", "-p", "c", "b", "-p", "alpha", "0.3"]
    app("merge", "template.mecha", *given, "-o", "m.safetensors")

    outcome = app("merge", "m.safetensors", "-o", "again.safetensors")

    assert outcome.status == 0, outcome.err
    assert (models / "again.safetensors").read_bytes() == (models / "m.safetensors").read_bytes()


def test_the_output_may_have_another_dtype(app, models):
    app("merge", "average.mecha", "--dtype", "float16", "-o", "half.safetensors")

    assert load_file(models / "half.safetensors")["w"].dtype is torch.float16
    app("merge", "half.safetensors", "-o", "again.safetensors")
    assert (models / "again.safetensors").read_bytes() == (models / "half.safetensors").read_bytes()


def test_models_and_recipes_are_looked_for_in_given_folders(app, models, tmp_path_factory, monkeypatch):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(elsewhere)

    given = app("merge", "average.mecha", "--models-dir", str(models), "-o", "given.safetensors")
    monkeypatch.setenv("MECHA_MODELS_DIR", str(models))
    named = app("merge", "average.mecha", "-o", "named.safetensors")

    assert (given.status, named.status) == (0, 0), given.err + named.err
    assert merged(elsewhere / "given.safetensors") == merged(elsewhere / "named.safetensors") == [1.5] * 4


def test_unfilled_parameters_are_listed(app, models):
    outcome = app("merge", "template.mecha", "-p", "a", "a.safetensors")

    assert outcome.status == 1
    assert "the recipe has 2 unfilled parameters: 'c' (weight), 'alpha'." in outcome.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.mecha"], "the recipe 'nowhere.mecha' does not exist. Looked in"),
        (["a.safetensors"], "a.safetensors carries no recipe"),
        (["template.mecha", "-p", "x", "1"], "the recipe has no parameter 'x'. Known: a, alpha, c."),
        (["template.mecha", "-p", "a", "b", "-p", "a", "c"], "the parameter 'a' is given twice"),
        (["template.mecha", "-p", "a", "other.mecha"], "the recipe 'other.mecha' does not exist"),
        (["template.mecha", "-p", "alpha", "x.st"], "weighted_sum: alpha: expected a number, got 'x.st'"),
        (["broken.mecha"], "broken.mecha: line 2, column 1: unknown command 'modle'"),
        (["bytes.mecha"], "bytes.mecha is not a text in UTF-8: invalid start byte at byte 0"),
        (["average.mecha", "--dtype", "flaot16"], "unknown dtype 'flaot16'. Did you mean 'float16'"),
        (["average.mecha", "-o", "a.safetensors"], "the output a.safetensors is the input"),
    ],
)
def test_what_is_wrong_is_said(app, models, arguments, said):
    (models / "broken.mecha").write_text('version 0.1.0\nmodle "a"')
    (models / "bytes.mecha").write_bytes(b"\xff\xfe")

    outcome = app("merge", *arguments)

    assert outcome.status == 1
    assert said in outcome.err


def test_a_file_that_is_there_is_replaced_only_if_it_is_named(app, models):
    app("merge", "average.mecha")

    refused, named = app("merge", "average.mecha"), app("merge", "average.mecha", "-o", "average.safetensors")

    assert refused.status == 1
    assert "average.safetensors is there already. Say with -o where the model goes." in refused.err
    assert named.status == 0


def test_compose_fills_parameters_and_says_what_is_left(app, models):
    outcome = app("compose", "template.mecha", "-p", "a", "average.mecha", "-p", "alpha", "0.25")

    expected = weighted_sum(n_average("a.safetensors", "c.safetensors"), parameter("c", "weight"), alpha=0.25)
    assert deserialize(outcome.out) is expected
    assert outcome.err.strip() == "still to be filled: 'c' (weight)"


def test_compose_writes_a_file_that_can_be_composed_and_merged(app, models):
    app("compose", "template.mecha", "-p", "a", "template.mecha", "-p", "alpha", "0.5", "-o", "composed")
    outcome = app("merge", "composed.mecha", "-p", "c", "c", "-p", "a", "b", "-p", "alpha", "0")

    assert outcome.status == 0, outcome.err
    assert merged(models / "composed.safetensors") == [2.0] * 4


def test_show_draws_a_tree_of_a_file_and_of_a_model(app, models):
    app("merge", "average.mecha")

    of_file, of_model = app("show", "average.mecha"), app("show", "average.safetensors")

    assert of_file.out == of_model.out
    assert of_file.out.splitlines() == [
        "n_average",
        "├─ models[0]: a.safetensors",
        "└─ models[1]: c.safetensors",
    ]


def test_show_gives_the_text_and_the_nodes(app, models):
    text, nodes = app("show", "average.mecha", "--text"), app("show", "average.mecha", "--json")

    assert text.out == (models / "average.mecha").read_text() + "\n"
    assert json.loads(nodes.out)["nodes"][-1] == {
        "id": 2,
        "method": "n_average",
        "merge_space": "weight",
        "arguments": {"models": [0, 1]},
    }


def test_a_tree_marks_what_is_shared_and_names_it_again():
    part = slerp("a", parameter("b", "weight"), alpha={"fc": 0.1, "conv": 0.2, "default": 0.5})
    recipe = weighted_sum(part, n_average(part, part, model("c", "sdxl-sgm")), alpha=0.3)

    assert list(tree_of(recipe)) == [
        "weighted_sum  alpha=0.3",
        "├─ a: &1 slerp  alpha={conv: 0.2, fc: 0.1, default: 0.5}",
        "│  ├─ a: a",
        "│  └─ b: parameter 'b' (weight)",
        "└─ b: n_average",
        "   ├─ models[0]: &1 (above)",
        "   ├─ models[1]: &1 (above)",
        "   └─ models[2]: c (sdxl-sgm)",
    ]


def test_the_tree_of_a_deep_and_of_a_doubling_recipe_is_short():
    deep = doubling = model("a")
    for _ in range(3_000):
        deep = weighted_sum(deep, "b", alpha=0.25)
    for _ in range(40):
        doubling = n_average(doubling, doubling)

    assert len(list(tree_of(deep))) < 200
    assert any("nodes, too deep to draw" in line for line in tree_of(deep))
    assert len(list(tree_of(doubling))) == 81
    assert len(data_of(deep)["nodes"]) > 3_000


def test_plan_of_a_file_checks_it_and_writes_nothing(app, models):
    before = sorted(models.iterdir())

    outcome = app("plan", "template.mecha", "-p", "a", "a", "-p", "c", "b", "-p", "alpha", "0.3")

    assert outcome.status == 0, outcome.err
    assert "Nothing was merged. The verb merge does it." in outcome.out
    assert "b.safetensors" in outcome.out
    assert sorted(models.iterdir()) == before


def test_plan_of_a_configuration_is_that_of_debug_plan(app, models):
    arguments = ["recipe=weighted_sum", "models.base=a.safetensors", "models.experts=[b.safetensors]"]

    assert app("plan", *arguments).out == app(*arguments, "debug=plan").out


def test_plan_says_what_is_wrong(app, models):
    save_file({"w": torch.zeros(5)}, models / "b.safetensors")
    (models / "bad.mecha").write_text(serialize(subtract("a", "b")))

    outcome = app("plan", "bad.mecha")

    assert outcome.status == 1
    assert "1 key has shapes that differ between the inputs" in outcome.err


@pytest.mark.parametrize("verb", ["merge", "compose", "show", "plan"])
def test_each_verb_explains_itself_with_an_example(app, verb):
    outcome = app(verb, "--help")

    assert outcome.status == 0
    assert f"python -m mecha_exp {verb} " in outcome.out.partition("example")[2]


def test_the_help_of_the_application_names_the_verbs(app):
    said = app("--help").out

    assert all(f"python -m mecha_exp {verb} " in said for verb in ("merge", "compose", "show", "plan"))


def test_the_recipe_in_a_header_is_its_text(app, models):
    app("merge", "average.mecha")

    with safe_open(models / "average.safetensors", "pt") as file:
        assert file.metadata()["mecha_recipe"] == (models / "average.mecha").read_text()
