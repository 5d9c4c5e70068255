"""The points of a sweep over folders are folders, with the small files of the first input."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

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


def test_points_of_a_sweep_over_folders_are_folders(app, folder, folders, no_figures, files_in):
    outcome = app(*folders, "alpha=0.25,0.5", "-m")

    assert outcome.status == 0, outcome.err
    (sweep,) = (folder / "outputs" / "multiruns").iterdir()
    a, b = (load_file(folder / name / "model.safetensors")["layer.weight"] for name in "ab")
    for point, alpha in (("0", 0.25), ("1", 0.5)):
        assert files_in(sweep / point / "model") == ["config.json", "model.safetensors", "tokenizer.json"]
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
