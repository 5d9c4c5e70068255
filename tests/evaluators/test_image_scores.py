"""Scores beside pictures are those of the models, written out in torch."""

from pathlib import Path

import numpy as np
import pytest
import torch
from drawn import by_the_library, key_of, measured, pixels
from PIL import Image
from safetensors.torch import save_file
from torch.nn import functional as F

pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore")]  # theirs are not ours


@pytest.fixture
def folder(pipelines: Path) -> Path:
    return pipelines


def test_clip_scores_are_cosines_and_a_scorer_comes_first(folder, tmp_path, beside):
    (tmp_path / "mine.py").write_text(
        "def red(pictures, prompts):\n    return [p.getpixel((0, 0))[0] for p in pictures]\n"
    )
    settings = {"clip": str(folder / "clip"), "distances": False}

    by_clip = measured(folder, **settings)
    by_mine = measured(folder, **settings, scorer=f"{tmp_path / 'mine.py'}:red")

    clip = transformers.CLIPModel.from_pretrained(folder / "clip").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "clip")
    processor = transformers.AutoImageProcessor.from_pretrained(folder / "clip", backend="pil")
    scores = []
    for (prompt, _), picture in by_the_library(folder / "merged").items():
        given = clip(
            **tokenizer(prompt, return_tensors="pt"), **processor(images=[picture], return_tensors="pt")
        )
        scores.append(max(0.0, 100 * float(given.image_embeds[0] @ given.text_embeds[0])))
    assert by_clip.outcomes is not None and by_mine.outcomes is not None
    np.testing.assert_allclose(by_clip.outcomes.values["pictures"], scores, atol=1e-3)
    assert min(scores) == 0 < max(scores)
    beside("images", "clip_score", by_clip.metrics["clip_score"], np.mean(scores))
    assert by_mine.metrics["clip_score"] == pytest.approx(by_clip.metrics["score"])
    red = [int(pixels(content)[0, 0, 0]) for content in by_mine.files.values()]
    assert by_mine.outcomes.values["pictures"].tolist() == red


def embedded(clip_folder: Path, picture: np.ndarray, prompt: str) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The features of a picture and of its prompt, and the scale, by transformers alone."""
    clip = transformers.CLIPModel.from_pretrained(clip_folder).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(clip_folder)(prompt, return_tensors="pt")
    processor = transformers.AutoImageProcessor.from_pretrained(clip_folder, backend="pil")
    with torch.inference_mode():
        given = clip(**tokens, **processor(images=[Image.fromarray(picture)], return_tensors="pt"))
        return given.image_embeds[0], given.text_embeds[0], float(clip.logit_scale.exp())


def test_a_preference_is_the_cosine_times_the_scale_of_the_model(folder, beside):
    measurement = measured(folder, preference=str(folder / "clip"), distances=False)

    expected = []
    for (prompt, _), picture in by_the_library(folder / "merged").items():
        image, text, scale = embedded(folder / "clip", picture, prompt)
        expected.append(scale * float(image @ text))
    assert measurement.outcomes is not None
    np.testing.assert_allclose(measurement.outcomes.values["pictures"], expected, rtol=1e-4)
    beside("images", "preference", measurement.metrics["preference"], np.mean(expected), within=1e-4)
    assert measurement.metrics["score"] == pytest.approx(measurement.metrics["preference"])
    assert "clip_score" not in measurement.metrics


@pytest.mark.parametrize("kind", ["linear", "layers", "relu"])
def test_aesthetic_scores_are_those_of_layers_over_normalised_features(folder, tmp_path, kind, beside):
    torch.manual_seed(3)
    linear, deep = (
        torch.nn.Linear(12, 1),
        torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Dropout(), torch.nn.Linear(16, 1)),
    )
    module = linear if kind == "linear" else deep.eval()
    tensors = {f"{'' if kind == 'linear' else 'layers.'}{k}": t for k, t in module.state_dict().items()}
    save_file(
        tensors, tmp_path / "head.safetensors", metadata={"activation": "relu"} if kind == "relu" else None
    )

    measurement = measured(
        folder, clip=str(folder / "clip"), aesthetic=str(tmp_path / "head.safetensors"), distances=False
    )

    expected = []
    for (prompt, _), picture in by_the_library(folder / "merged").items():
        image, _, _ = embedded(folder / "clip", picture, prompt)
        features = F.normalize(image, dim=0)
        if kind == "relu":
            expected.append(deep[2](F.relu(deep[0](features))).item())
            assert expected[-1] != pytest.approx(deep(features).item())
        else:
            expected.append(module(features).item())
    assert measurement.outcomes is not None
    np.testing.assert_allclose(measurement.outcomes.values["pictures"], expected, rtol=1e-4, atol=1e-5)
    beside("images", f"aesthetic, {kind}", measurement.metrics["aesthetic"], np.mean(expected), within=1e-4)
    assert measurement.metrics["clip_score"] >= 0


def test_a_pickled_predictor_is_read_as_one_of_safetensors(folder, tmp_path):
    """As LAION publishes them."""
    weight = {"layers.0.weight": torch.ones(2, 12), "layers.1.weight": torch.tensor([[1.0, -0.5]])}
    torch.save(weight, tmp_path / "head.pth")
    save_file(weight, tmp_path / "head.safetensors")

    of_both = [
        measured(folder, clip=str(folder / "clip"), aesthetic=str(tmp_path / name), distances=False).metrics
        for name in ("head.pth", "head.safetensors")
    ]

    assert of_both[0] == of_both[1]


def test_what_scores_a_picture_is_in_the_key(folder, tmp_path):
    keys = set()
    for value in (1.0, 2.0):
        save_file({"weight": torch.full((1, 12), value)}, tmp_path / "head.safetensors")
        settings = {"aesthetic": str(tmp_path / "head.safetensors"), "clip": str(folder / "clip")}
        keys.add(key_of(folder, **settings))
    assert len(keys) == 2
