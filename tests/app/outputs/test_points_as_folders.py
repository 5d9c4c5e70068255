"""The points of a sweep over folders are folders, with the small files of the first input."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

EVALUATOR = """
from mecha_exp import evaluator

@evaluator("first", metric="mass", direction="maximize", units={"mass": "units"})
def first(state_dict):
    return {"mass": float(state_dict["layer.weight"].abs().sum())}
"""
CONFIG = {"model_type": "tiny", "architectures": ["Tiny"]}


@pytest.fixture
def folders(folder: Path) -> list[str]:
    for number, name in enumerate("ab"):
        torch.manual_seed(number)
        (folder / name).mkdir()
        save_file({"layer.weight": torch.randn(4, 3)}, folder / name / "model.safetensors", {"format": "pt"})
        (folder / name / "config.json").write_text(json.dumps(CONFIG))
        (folder / name / "tokenizer.json").write_text("{}")
    return ["recipe=weighted_sum", "models.base=a", "models.experts=[b]", "evaluator=none"]


def test_points_of_a_sweep_over_folders_are_folders(app, folder, folders, files_in):
    outcome = app(*folders, "alpha=0.25,0.5", "-m")

    assert outcome.status == 0, outcome.err
    (sweep,) = (folder / "outputs" / "multiruns").iterdir()
    a, b = (load_file(folder / name / "model.safetensors")["layer.weight"] for name in "ab")
    for point, alpha in (("0", 0.25), ("1", 0.5)):
        files = ["README.md", "config.json", "model.safetensors", "tokenizer.json"]
        assert files_in(sweep / point / "model") == files
        merged = load_file(sweep / point / "model" / "model.safetensors")["layer.weight"]
        assert torch.equal(merged, torch.lerp(a, b, alpha))
        record = json.loads((sweep / point / "run.json").read_text())
        assert Path(record["model"]) == sweep / point / "model"
    assert app(*folders, "alpha=0.25,0.5", "-m").out.count("2 of 2 points are there already") == 1
    assert app("reproduce", str(sweep / "1")).status == 0


def test_files_stay_files_and_a_point_without_a_model_has_none(app, folder, folders):
    files = ["recipe=weighted_sum", "models.base=a/model.safetensors", "models.experts=[b]", "evaluator=none"]

    assert app(*files).status == app(*folders, "output=none", "alpha=0.1").status == 0

    runs = sorted((folder / "outputs" / "runs").iterdir())  # two folders, even where one second has both
    kept = [[*run.glob("model*")] for run in runs]
    assert [[path.name for path in paths] for paths in kept] == [["model.safetensors"], []]


def test_the_card_of_a_point_has_its_numbers_and_the_verdict(app, folder, folders):
    (folder / "first.py").write_text(EVALUATOR)
    measured = [*folders[:-1], "plugins=[first.py]", "evaluator.name=first"]

    assert app(*measured, "alpha=0.25,0.5", "-m").status == 0

    (sweep,) = (folder / "outputs" / "multiruns").iterdir()
    for point in ("0", "1"):
        card = (sweep / point / "model" / "README.md").read_text()
        mass = json.loads((sweep / point / "run.json").read_text())["metrics"]["mass"]
        assert card.count("## Results") == 1
        assert f"| **mass** | {mass:.6g} | units |" in card
        assert "time/" not in card
    assert "The point `alpha=0.5` of a sweep, whose verdict is:" in card
    assert "\n- 'alpha=0.25' has mass" in card
    assert "| `weighted_sum` | alpha = 0.5 |" in card


def test_a_card_is_written_where_it_is_wanted_and_with_the_numbers_of_its_run(app, folder, folders):
    (folder / "first.py").write_text(EVALUATOR)
    measured = [*folders[:-1], "plugins=[first.py]", "evaluator.name=first"]

    assert app(*measured, "output.path=bare", "output.card=false").status == 0
    assert app(*measured, "output.path=with_card").status == 0

    assert not (folder / "bare" / "README.md").exists()
    assert "| **mass** |" in (folder / "with_card" / "README.md").read_text()
