"""`evaluator=images`: the pictures are those of diffusers on the saved pipeline, with their scores."""

import io
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tiny_tokenizers import write_tokenizer
from tiny_vision import save_clip, save_pipeline

from mecha_exp import Context, EvaluationError, Job, merge_many, weighted_sum
from mecha_exp.checkpoint import open_stored
from mecha_exp.errors import ConfigError
from mecha_exp.evaluation import Measurement, read_scoring

diffusers = pytest.importorskip("diffusers")
pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore")]  # theirs are not ours

PROMPTS = ["a photo of a cat", "a drawing of the dog."]
FEW = {"prompts": PROMPTS, "seeds": [0, 3], "steps": 2, "guidance": 3.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pipelines, what is merged of them, and a CLIP."""
    root = tmp_path_factory.mktemp("images")
    inputs = [save_pipeline(root / name, seed) for seed, name in enumerate("ab")]
    merge_many([Job(weighted_sum(*inputs, alpha=0.25), root / "merged")])
    save_clip(root / "clip", 5)
    return root


def context_of(folder: Path) -> Context:
    return Context("point", inputs={name: folder / name for name in "ab"})


def weights(path: Path) -> dict[str, torch.Tensor]:
    with open_stored(path) as model:
        return {key: model.read(key) for key in model.keys()}


def measured(folder: Path, state_dict=None, **settings) -> Measurement:
    state_dict = weights(folder / "merged") if state_dict is None else state_dict
    shapes = {key: tuple(tensor.shape) for key, tensor in state_dict.items()}
    context = context_of(folder)
    scoring = read_scoring({"name": "images", **FEW, **settings}, shapes, context=context)
    return scoring.measure_one(scoring.evaluations[0], state_dict, context)


def pixels(content: bytes | Path) -> np.ndarray:
    assert isinstance(content, bytes)
    return np.asarray(Image.open(io.BytesIO(content)))


def by_the_library(path: Path, scheduler: str | None = None) -> dict[tuple[str, int], np.ndarray]:
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(path, safety_checker=None)
    pipeline.set_progress_bar_config(disable=True)
    if scheduler:
        pipeline.scheduler = getattr(diffusers, scheduler).from_config(pipeline.scheduler.config)
    return {
        (prompt, seed): np.asarray(
            pipeline(
                prompt,
                num_inference_steps=2,
                guidance_scale=3.0,
                generator=torch.Generator().manual_seed(seed),
            ).images[0]
        )
        for prompt in PROMPTS
        for seed in (0, 3)
    }


def test_pictures_are_those_of_the_saved_pipeline_and_distances_follow(folder, beside):
    measurement = measured(folder)
    again = measured(folder, weights(folder / "a"))

    expected, of_a, of_b = (by_the_library(folder / name) for name in ("merged", "a", "b"))
    for (prompt, seed), picture in expected.items():
        number = PROMPTS.index(prompt) + 1
        name = f"{number:02} {prompt.removesuffix('.')} seed {seed}"
        np.testing.assert_array_equal(pixels(measurement.files[f"{name}.png"]), picture)
        np.testing.assert_array_equal(pixels(again.files[f"{name}.png"]), of_a[prompt, seed])
    assert len(measurement.files) == 4
    for name, pictures in (("a", of_a), ("b", of_b)):
        apart = [np.sqrt(((expected[shot].astype(float) - pictures[shot]) ** 2).mean()) for shot in expected]
        beside("images", f"distance/{name}", measurement.metrics[f"distance/{name}"], np.mean(apart))
        assert np.mean(apart) > 0
    to_both = measurement.metrics["distance/a"] + measurement.metrics["distance/b"]
    assert measurement.metrics["score"] == pytest.approx(-to_both / 2)
    assert again.metrics["distance/a"] == 0
    assert again.metrics["score"] == pytest.approx(-again.metrics["distance/b"] / 2)
    assert measurement.outcomes is not None
    assert measurement.outcomes.clusters["pictures"].tolist() == [p for p in PROMPTS for _ in range(2)]


def test_schedulers_are_those_of_diffusers(folder):
    measurement = measured(
        folder, schedulers=["EulerDiscreteScheduler"], distances=False, clip=str(folder / "clip")
    )

    expected = by_the_library(folder / "merged", "EulerDiscreteScheduler")
    picture = pixels(measurement.files["01 a photo of a cat seed 3 EulerDiscrete.png"])
    np.testing.assert_array_equal(picture, expected[PROMPTS[0], 3])


def test_clip_scores_are_cosines_and_a_scorer_comes_first(folder, tmp_path):
    import transformers

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
    assert by_mine.metrics["clip_score"] == pytest.approx(by_clip.metrics["score"])
    red = [int(pixels(content)[0, 0, 0]) for content in by_mine.files.values()]
    assert by_mine.outcomes.values["pictures"].tolist() == red


def test_one_component_is_merged_into_the_rest_of_a_pipeline(folder):
    unet = load_file(folder / "merged/unet/diffusion_pytorch_model.safetensors")

    of_unet = measured(
        folder,
        unet,
        component="unet",
        model=str(folder / "merged"),
        distances=False,
        clip=str(folder / "clip"),
    )

    whole = measured(folder, distances=False, clip=str(folder / "clip"))
    assert of_unet.files == whole.files


def test_weights_under_older_names_are_loaded_by_the_library(folder):
    """The attention of VAEs from before diffusers 0.15 has other names."""
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    renamed = {}
    for key, tensor in weights(folder / "merged").items():
        for new, name in old.items():
            if key.startswith("vae.") and ".attentions." in key:
                key = key.replace(f".{new}.", f".{name}.")
        renamed[key] = tensor
    assert any(".query." in key for key in renamed)

    assert (
        measured(folder, renamed, distances=False, clip=str(folder / "clip")).files == measured(folder).files
    )


def test_pixels_that_are_not_numbers_are_an_error_of_that_point(folder):
    broken = weights(folder / "merged")
    broken["unet.conv_out.bias"] = torch.full_like(broken["unet.conv_out.bias"], torch.nan)

    with pytest.raises(
        EvaluationError, match="the picture '01 a photo of a cat seed 0' has pixels that are not"
    ):
        measured(folder, broken)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompts": None}, "evaluator.prompts: name a file with a prompt on each line"),
        ({"prompts": "lost.txt"}, "evaluator.prompts: lost.txt cannot be read"),
        ({"seeds": 3}, "evaluator.seeds=3: expected a list of whole numbers"),
        (
            {"schedulers": ["EulerDiscreteSheduler"]},
            "no scheduler 'EulerDiscreteSheduler'. Did you mean 'EulerDiscreteScheduler'",
        ),
        ({"steps": 0}, "evaluator.steps=0: expected at least 1"),
        ({"component": "transformer"}, "has the components text_encoder, unet, vae"),
        ({"dtype": "float8"}, "evaluator.dtype=float8: expected one of auto, float32"),
        ({"clip": "lost"}, "evaluator.clip=lost: there is no config.json"),
        ({"scorer": "lost.py:f"}, "expected FILE.py:function, and there is no file 'lost.py'"),
        ({"distances": False}, "evaluator.distances=false leaves no score"),
    ],
)
def test_settings_that_do_not_fit_are_said_before_anything_is_merged(folder, settings, message):
    with pytest.raises(ConfigError) as error:
        measured(folder, **settings)

    assert message in str(error.value)


def test_a_gpu_that_is_too_small_is_an_error_with_both_sizes(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5_000, 80_000_000_000))
    tensors = weights(folder / "merged").values()
    stored, halves = (sum(t.numel() for t in tensors) * size for size in (4, 2))

    for dtype, needed in (("auto", stored), ("float16", halves)):
        message = f"evaluator.device=cuda: the weights need {needed:,} bytes, and 5,000 are free there"
        with pytest.raises(ConfigError, match=message):
            measured(folder, device="cuda", dtype=dtype)


def test_a_tokenizer_with_more_tokens_than_the_text_encoder_has_rows_is_named(folder, tmp_path):
    shutil.copytree(folder / "a", tmp_path / "a")
    write_tokenizer(tmp_path / "a/tokenizer", " ".join(f"word{n}" for n in range(20)))

    with pytest.raises(
        ConfigError,
        match=r"tokenizer has 23 tokens, and text_encoder.*token_embedding.weight of the .* has 12",
    ):
        measured(folder, model=str(tmp_path / "a"))


def test_a_pipeline_without_a_component_is_named(folder, tmp_path):
    shutil.copytree(folder / "a", tmp_path / "a")
    shutil.rmtree(tmp_path / "a/vae")
    part = {key: tensor for key, tensor in weights(folder / "merged").items() if not key.startswith("vae.")}

    with pytest.raises(ConfigError, match="the component 'vae' of the pipeline is missing"):
        measured(folder, model=str(tmp_path / "a"))
    with pytest.raises(ConfigError, match="the model has no keys of the component 'vae'"):
        measured(folder, part)
    with pytest.raises(ConfigError, match="is not the folder of a diffusers pipeline"):
        measured(folder, model=str(folder / "clip"))
