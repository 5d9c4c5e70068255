"""`recipe=mergekit` takes a configuration of mergekit into the bench, and sweeps over any value in it."""

import csv
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sweep_folders import records, sweep_of

CONFIG = """\
merge_method: linear
models:
  - {model: a, parameters: {weight: 1.0}}
  - {model: b}
parameters:
  weight: [{filter: w, value: 3.0}]
"""
BASE = ("recipe=mergekit", "recipe.path=linear.yml", "evaluator=none")


@pytest.fixture
def models(folder: Path) -> Path:
    """Three models of one tensor each, with tokenizers, and a configuration that merges two."""
    for name, value in (("a", 0.0), ("b", 4.0), ("c", 0.0)):
        (folder / name).mkdir()
        save_file({"w": torch.full((4,), value)}, folder / name / "model.safetensors")
        (folder / name / "config.json").write_text("{}")
        (folder / name / "vocab.json").write_text(json.dumps({"x": 0, "y": 1}))
        (folder / name / "tokenizer_config.json").write_text(json.dumps({"from": name}))
    (folder / "linear.yml").write_text(CONFIG)
    return folder


@pytest.mark.parametrize(
    ("word", "results"),
    [
        ("models.0.parameters.weight=1,3,9", [3.0, 2.0, 1.0]),
        ("parameters.weight.0.value=1,3", [2.0, 3.0]),
        ("models.1.model=b,c", [3.0, 0.0]),
    ],
)
def test_a_value_is_swept_by_its_dotted_path(app, models: Path, word: str, results: list[float]):
    outcome = app(*BASE, word, "-m")

    assert outcome.status == 0, outcome.err
    rows = _rows(models)
    name, _, values = word.partition("=")
    assert {row[name].removesuffix(".0") for row in rows} == set(values.split(","))
    merged = sorted(models.glob("outputs/multiruns/*/*/model/model.safetensors"))
    assert [load_file(path)["w"][0].item() for path in merged] == results
    assert "runs without" not in outcome.out


def test_the_models_of_the_configuration_alone_are_measured(app, models: Path):
    (models / "plugin.py").write_text(
        "import mecha_exp as m\n"
        "@m.evaluator('nearness', metric='near')\n"
        "def nearness(state_dict, *, context):\n"
        "    with open('measured.txt', 'a') as file:\n"
        "        print(sorted(state_dict), file=file)\n"
        "    return m.Outcomes({'all': [1.0, 0.0]})\n"
    )

    outcome = app(*BASE[:2], "plugins=[plugin.py]", "evaluator.name=nearness", "output=none", "tracking=none")

    assert outcome.status == 0, outcome.err
    assert {*(models / "measured.txt").read_text().splitlines()} == {"['w']"}


def test_points_are_compared_with_the_base_of_the_configuration(app, models: Path):
    (models / "ties.yml").write_text(
        "merge_method: ties\nbase_model: c\nmodels:\n  - {model: a}\n  - {model: b}\n"
        "parameters: {weight: 1.0, density: 0.5}\n"
    )
    (models / "plugin.py").write_text(
        "import mecha_exp as m, numpy as np\n"
        "@m.evaluator('size', metric='size', direction='maximize')\n"
        "def size(state_dict):\n"
        "    return m.Outcomes({'all': float(state_dict['w'][0]) + np.linspace(0, 1, 60)})\n"
    )

    words = ("recipe=mergekit", "recipe.path=ties.yml", "parameters.weight=1.0,0.5", "plugins=[plugin.py]")
    outcome = app(*words, "evaluator.name=size", "output=none", "tracking=none", "-m")

    assert outcome.status == 0, outcome.err
    written = json.loads((sweep_of(models) / "verdict.json").read_text())
    assert {c["against"] for c in written["comparisons"]} >= {"c"}
    assert "it is better than 'c'" in written["sentence"]
    assert written["best_input"] == "b"


def test_a_tokenizer_is_that_of_the_configuration(app, models: Path):
    (models / "linear.yml").write_text(f"{CONFIG}tokenizer_source: b\n")
    for name in "ab":
        tokenizer = {"model": {"type": "WordLevel", "vocab": {"x": 0, "y": 1}, "unk_token": "x"}}
        (models / name / "tokenizer.json").write_text(json.dumps(tokenizer))
        tensors = {"w": torch.zeros(4), "model.embed_tokens.weight": torch.ones(2, 4)}
        save_file(tensors, models / name / "model.safetensors")

    outcome = app(*BASE, "output.path=merged")

    assert outcome.status == 0, outcome.err
    assert json.loads((models / "merged" / "tokenizer_config.json").read_text()) == {"from": "b"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["recipe=mergekit"], "recipe.path"),
        (["recipe=mergekit", "recipe.path=no.yml"], "'no.yml' does not exist"),
        ([*BASE, "parameters.wieght=1"], "parameters.wieght"),
        ([*BASE, "models.0.parameters.normalize=true"], "linear has one value for all inputs"),
        ([*BASE, "models.0.model=d"], "the model 'd' does not exist"),
        ([*BASE, "merge_method=krcher"], "merge_method: unknown method 'krcher'. Did you mean 'karcher'"),
    ],
)
def test_what_is_wrong_is_said(app, models: Path, words: list[str], message: str):
    outcome = app(*words)

    assert outcome.status == 1
    assert message in " ".join(outcome.err.split())
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("parameters.wieght=1", "parameters.wieght: no such value in the configuration of mergekit."),
        ("models.0.parameters.wieght=1", "Did you mean 'models.0.parameters.weight'"),
        ("models.7.parameters.weight=1", "Did you mean 'models.1.parameters.weight' or"),
        ("engine.on_mising=skip", "engine.on_mising: engine has no 'on_mising'. Did you mean 'on_missing'"),
    ],
)
def test_a_misspelt_path_is_an_error_with_the_nearest_one(app, models: Path, word: str, said: str):
    outcome = app(*BASE, word, "output=none")

    assert outcome.status == 1
    assert said in outcome.err
    assert "A block gets its own strength" not in outcome.err


DARE = """\
merge_method: dare_linear
base_model: c
parameters: {weight: 1, density: 0.5}
models: [{model: a}, {model: b}]
"""


@pytest.mark.parametrize(("arguments", "seeds"), [((), "01"), (("parameters.seed=7",), "78")])
def test_replicates_draw_other_masks(app, models: Path, arguments: tuple[str, ...], seeds: str):
    (models / "dare.yml").write_text(DARE)
    for name, value in (("a", 1.0), ("b", 4.0), ("c", 0.0)):
        save_file({"w": torch.full((64,), value)}, models / name / "model.safetensors")
    (models / "plugin.py").write_text(
        "import mecha_exp as m\n"
        "@m.evaluator('energy', metric='energy')\n"
        "def energy(state_dict):\n"
        "    return {'energy': float(state_dict['w'].square().sum())}\n"
    )
    words = ["recipe=mergekit", "recipe.path=dare.yml", "plugins=[plugin.py]", "evaluator.name=energy"]

    outcome = app(*words, "parameters.lambda=0.5,1", *arguments, "sweep.replicates=2", "output=none", "-m")

    assert outcome.status == 0, outcome.err
    rows = _rows(models)
    assert [row["parameters.lambda"] for row in rows] == ["0.5", "0.5", "1", "1"]
    assert [row["parameters.seed"] for row in rows] == [*seeds, *seeds]
    assert [record["name"] for record in records(sweep_of(models))] == [
        f"parameters.lambda={scale},parameters.seed={seed}" for scale in ("0.5", "1") for seed in seeds
    ]
    assert len({row["energy"] for row in rows}) == 4
    assert "over 2 replicates), the best of 2 settings" in " ".join(outcome.out.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["recipe.path=linear.yml"], "and this recipe has no seed."),
        (["recipe.path=dare.yml", "parameters.seed=0,1"], "and seed is swept already."),
    ],
)
def test_replicates_of_what_draws_nothing_or_is_drawn_again_are_refused(
    app, models: Path, words: list[str], message: str
):
    (models / "dare.yml").write_text(DARE)

    outcome = app("recipe=mergekit", *words, "evaluator=none", "sweep.replicates=2", "-m")

    assert outcome.status != 0
    assert message in outcome.err.replace("\n", " ")


def _rows(folder: Path) -> list[dict[str, str]]:
    """The points in the table of the one sweep."""
    (table,) = folder.glob("outputs/multiruns/*/sweep.csv")
    with table.open(encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["status"] == "FINISHED"]
