"""Models of timm are measured as timm itself measures them; without timm the error names it."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from pictures import write_folders
from PIL import Image
from safetensors.torch import load_file, save_file

from mecha_exp import Context, Outcomes
from mecha_exp.errors import ConfigError
from mecha_exp.evaluation import read_scoring

pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore")]  # theirs are not ours

CLASSES = ("cat", "dog", "eel")
TINY = {
    "vit_tiny_patch16_224": {"embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": 32, "patch_size": 8},
    "swin_tiny_patch4_window7_224": {"embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2), "img_size": 56},
    "mobilenetv3_small_050": {},
}
"""Models with learned positions, with tables that are computed, and with a wider last layer."""


def timm_or_skip():
    try:
        import timm
    except Exception as error:  # a torchvision of another torch raises a RuntimeError
        pytest.skip(f"timm cannot be imported here: {error}")
    return timm


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_folders(tmp_path / "data", CLASSES, 8, splits=("validation", "test"))
    return tmp_path / "data"


def saved(name: str, folder: Path):
    """A model of timm in a folder as timm writes it, and as timm reads it there."""
    timm = timm_or_skip()
    from timm.models import save_for_hf

    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=len(CLASSES), **TINY[name]).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data *= 2
    labels = {"num_classes": len(CLASSES), "label_names": list(CLASSES)}
    save_for_hf(model, folder, model_config=labels, model_args=TINY[name], safe_serialization=True)
    return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()


def measured(folder: Path, data: Path, **settings) -> Outcomes:
    weights = load_file(folder / "model.safetensors")
    shapes = {key: tuple(tensor.shape) for key, tensor in weights.items()}
    context = Context("point", inputs={"a": folder})
    settings = {"name": "image_classification", "data": str(data), **settings}
    scoring = read_scoring(settings, shapes, context=context)
    [result] = [scoring.measure_one(part, weights, context) for part in scoring.evaluations]
    return result.outcomes


def answers(model, outcomes: Outcomes, data: Path, head=None) -> list[bool]:
    """Whether timm's own model and preparation of pictures give the class of each example's folder."""
    from timm.data import create_transform, resolve_data_config

    prepare = create_transform(**resolve_data_config({}, model=model), is_training=False)
    hits = []
    for example in outcomes.examples["data"]:
        with Image.open(data / str(example)) as picture, torch.inference_mode():
            pixels = prepare(picture.convert("RGB"))[None]
            features = model.forward_head(model.forward_features(pixels), pre_logits=True)
            logits = model(pixels) if head is None else features @ head.T
        hits.append(CLASSES[int(logits.argmax())] == str(example).split("/")[1])
    return hits


@pytest.mark.parametrize("name", TINY)
def test_a_classifier_scores_as_in_timm(name, tmp_path, data):
    model = saved(name, tmp_path / "model")

    outcomes = measured(tmp_path / "model", data)

    np.testing.assert_array_equal(outcomes.values["data"], answers(model, outcomes, data))
    assert len(outcomes.values["data"]) == 24
    assert 0 < outcomes.values["data"].mean() < 1


def test_a_head_reads_the_features_that_timm_gives_to_its_last_layer(tmp_path, data):
    model = saved("mobilenetv3_small_050", tmp_path / "model")
    features = model.get_classifier().in_features
    head = torch.randn(len(CLASSES), features, generator=torch.Generator().manual_seed(1))
    save_file({"weight": head, "bias": torch.zeros(len(CLASSES))}, tmp_path / "data.safetensors")

    outcomes = measured(tmp_path / "model", data, heads={"data": str(tmp_path / "data.safetensors")})

    np.testing.assert_array_equal(outcomes.values["data"], answers(model, outcomes, data, head))


def test_a_head_of_another_width_is_refused_before_a_merge(tmp_path, data):
    saved("mobilenetv3_small_050", tmp_path / "model")
    save_file({"weight": torch.zeros(3, 5), "bias": torch.zeros(3)}, tmp_path / "data.safetensors")
    message = (
        r"the head of 'data' takes 5 features, and TimmWrapperForImageClassification of .*model gives 1024\. "
        r"Name heads that were made for this encoder with evaluator\.heads\."
    )
    with pytest.raises(ConfigError, match=message):
        measured(tmp_path / "model", data, heads={"data": str(tmp_path / "data.safetensors")})


def test_without_timm_the_error_names_it(tmp_path, data, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)  # as if it were not installed
    config = {"architecture": "resnet10t", "num_classes": 3, "pretrained_cfg": {"input_size": [3, 32, 32]}}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    save_file({"conv1.0.weight": torch.zeros(24, 3, 3, 3)}, tmp_path / "model" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"holds a model of timm \(resnet10t\).*pip install timm"):
        measured(tmp_path / "model", data)
