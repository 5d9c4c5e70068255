"""`experiment=clip8`: the protocol of the eight published tasks, with a tiny CLIP."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from pictures import write_folders
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_vision import save_clip

import mecha_exp

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore")]  # theirs are not ours

CONF = Path(mecha_exp.__file__).parents[1] / "conf"
TASKS = yaml.safe_load((CONF / "models/clip8.yaml").read_text())["experts"]
CLASSES = ("cat", "dog", "eel")


@pytest.fixture
def files(folder: Path) -> Path:
    """Towers in `models`, pictures in `data`, heads in `data/heads`."""
    clip = transformers.CLIPModel.from_pretrained(save_clip(folder / "models/clip", 0))
    tower = transformers.CLIPVisionModel(clip.config.vision_config)
    tower.load_state_dict(clip.vision_model.state_dict())
    tower.save_pretrained(folder / "models/base")
    base = load_file(folder / "models/base/model.safetensors")
    (folder / "data/heads").mkdir(parents=True)
    for seed, task in enumerate(TASKS):
        chance = torch.Generator().manual_seed(seed)
        expert = folder / "models" / task
        expert.mkdir()
        (expert / "config.json").write_text((folder / "models/base/config.json").read_text())
        tuned = {key: t + 0.1 * torch.randn(t.shape, generator=chance) for key, t in base.items()}
        save_file(tuned, expert / "model.safetensors")
        head = torch.randn(len(CLASSES), 12, generator=chance)
        save_file({"weight": head}, folder / f"data/heads/{task}.safetensors")
        write_folders(folder / "data" / task, CLASSES, 2, splits=("test",) if seed % 2 else ("val", "test"))
    return folder


def test_the_eight_tasks_are_chosen_on_validation_and_reported_on_test(app, files):
    outcome = app(
        "experiment=clip8",
        "models.dir=models",
        "data.dir=data",
        "recipe=task_arithmetic,tsv_m",
        "alpha=0.2,1.0",
    )

    assert outcome.status == 0, outcome.err
    (sweep,) = (files / "outputs/multiruns").iterdir()
    records = [json.loads(path.read_text()) for path in sorted(sweep.glob("*/run.json"))]
    assert [record["status"] for record in records] == ["FINISHED"] * 4
    for record in records:
        assert {f"accuracy/{task}" for task in TASKS} < record["metrics"].keys()
        assert record["expert_of"] == {task: task for task in TASKS}
    assert set(records[0]["references"]) == {"base", *TASKS}
    reported = [record for record in records if "test/accuracy/normalised" in record["metrics"]]
    assert {record["parameters"]["recipe"] for record in reported} == {"task_arithmetic", "tsv_m"}
    assert len(reported) == 2

    app(
        "recipe=task_arithmetic",
        "alpha=0.2",
        "models=clip8",
        "models.dir=models",
        "output.path=merged",
        "evaluator=none",
    )
    validation = accuracy_by_hand(files, files / "merged", TASKS[0], "val")
    (point,) = (r for r in records if r["name"] == "recipe=task_arithmetic,alpha=0.2")
    assert point["metrics"][f"accuracy/{TASKS[0]}"] == pytest.approx(validation)


@torch.no_grad()
def accuracy_by_hand(root: Path, model: Path, task: str, split: str) -> float:
    """The accuracy of a saved tower, in transformers' own words."""
    tower = transformers.CLIPVisionModel.from_pretrained(model).eval()
    clip = transformers.CLIPModel.from_pretrained(root / "models/clip").eval()
    processor = transformers.AutoImageProcessor.from_pretrained(root / "models/clip", backend="pil")
    head = load_file(root / f"data/heads/{task}.safetensors")["weight"]
    hits = []
    for path in sorted((root / "data" / task / split).rglob("*.png")):
        pixels = processor(images=[Image.open(path).convert("RGB")], return_tensors="pt")
        features = clip.visual_projection(tower(**pixels).pooler_output)[0]
        hits.append(CLASSES[int((head @ features).argmax())] == path.parent.name)
    return float(np.mean(hits))


def test_data_that_are_not_named_are_asked_for(app, files):
    outcome = app("experiment=clip8", "models.dir=models", "recipe=ties", "alpha=0.2,1.0")

    assert outcome.status != 0
    assert "evaluator.data: name the folder with the pictures" in outcome.err
