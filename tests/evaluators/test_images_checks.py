"""What does not fit `evaluator=images` is said before anything is merged."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drawn import FEW, context_of, key_of, measured
from safetensors.torch import save_file
from state_dicts import numbers_of, write_holes
from tiny_tokenizers import write_tokenizer
from tiny_vision import save_clip, save_vit

from mecha_exp.errors import ConfigError
from mecha_exp.evaluation import Context, read_scoring
from mecha_exp.evaluators.pictures.pipelines import pipeline_folder

pytest.importorskip("diffusers")
pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore")]  # theirs are not ours


@pytest.fixture
def folder(pipelines: Path) -> Path:
    return pipelines


def said(folder: Path, state_dict: dict[str, torch.Tensor] | None = None, **settings: object) -> str:
    """The error of the checks before a merge, for the shapes of the weights alone."""
    state_dict = numbers_of(folder / "merged") if state_dict is None else state_dict
    shapes = {key: tuple(tensor.shape) for key, tensor in state_dict.items()}
    with pytest.raises(ConfigError) as error:
        read_scoring({"name": "images", **FEW, **settings}, shapes, context=context_of(folder))
    return str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompts": None}, "evaluator.prompts: name a file with a prompt on each line"),
        ({"prompts": "lost.txt"}, "evaluator.prompts: lost.txt cannot be read"),
        ({"seeds": 3}, "evaluator.seeds: expected a list of whole numbers, got 3"),
        (
            {"schedulers": ["EulerDiscreteSheduler"]},
            "no scheduler 'EulerDiscreteSheduler'. Did you mean 'EulerDiscreteScheduler'",
        ),
        ({"steps": 0}, "evaluator.steps=0: expected at least 1"),
        ({"component": "transformer"}, "has the components text_encoder, unet, vae"),
        ({"dtype": "float8"}, "evaluator.dtype=float8: expected one of auto, float32"),
        ({"clip": "lost"}, "evaluator.clip=lost: this folder does not exist"),
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
    tensors = numbers_of(folder / "merged").values()
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
    part = {
        key: tensor for key, tensor in numbers_of(folder / "merged").items() if not key.startswith("vae.")
    }

    with pytest.raises(ConfigError, match="the component 'vae' of the pipeline is missing"):
        measured(folder, model=str(tmp_path / "a"))
    with pytest.raises(ConfigError, match="the model has no keys of the component 'vae'"):
        measured(folder, part)
    with pytest.raises(ConfigError, match="is not the folder of a diffusers pipeline"):
        measured(folder, model=str(folder / "clip"))


def changed_index(folder: Path, target: Path, **entries: object) -> str:
    """A pipeline with other entries in its index."""
    shutil.copytree(folder / "a", target)
    index = json.loads((target / "model_index.json").read_text())
    (target / "model_index.json").write_text(json.dumps({**index, **entries}))
    return str(target)


@pytest.mark.parametrize(
    ("key", "shape", "message"),
    [
        (
            "unet.conv_in.weight",
            (8, 4, 5, 5),
            "conv_in.weight has shape [8, 4, 5, 5] instead of [8, 4, 3, 3]",
        ),
        ("unet.conv_in.weight", None, "does not fit UNet2DConditionModel of"),
        ("vae.decoder.more", (1,), "decoder.more has no place in the network"),
        ("text_encoder.final_layer_norm.bias", (3,), "final_layer_norm.bias has shape [3] instead of [16]"),
        ("text_encoder.final_layer_norm.bias", None, "it lacks final_layer_norm.bias"),
    ],
)
def test_weights_that_do_not_fit_a_component_are_said_before_a_merge(folder, key, shape, message):
    state_dict = numbers_of(folder / "merged")
    state_dict.pop(key, None)
    if shape is not None:
        state_dict[key] = torch.zeros(shape)

    text = said(folder, state_dict)

    assert message in text
    assert "evaluator.model=PATH" in text


def test_weights_of_one_component_are_checked_too(folder):
    unet = {k.removeprefix("unet."): t for k, t in numbers_of(folder / "a").items() if k.startswith("unet.")}
    del unet["conv_in.bias"]

    assert "it lacks conv_in.bias" in said(folder, unet, component="unet", model=str(folder / "a"))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("StableDiffusionImg2ImgPipeline", "which does not make pictures of prompts"),
        ("StableDiffusionInpaintPipeline", "which needs a picture beside each prompt"),
        ("AnimateDiffPipeline", "which does not make pictures of prompts"),
        ("DDPMPipeline", "which does not make pictures of prompts"),
        (
            "StableDifusionPipeline",
            "no pipeline 'StableDifusionPipeline'. Did you mean 'StableDiffusionPipeline'",
        ),
        (["mine", "MyPipeline"], "pipelines with code of their own are not run"),
    ],
)
def test_a_pipeline_that_does_not_draw_from_texts_is_refused(folder, tmp_path, kind, message):
    model = changed_index(folder, tmp_path / "a", _class_name=kind)

    assert message in said(folder, model=model)


def test_arguments_that_a_pipeline_does_not_take_are_named(folder, tmp_path):
    model = changed_index(folder, tmp_path / "a", _class_name="LatentConsistencyModelPipeline")

    text = said(folder, model=model, negative="blurred")

    assert "evaluator.negative: the LatentConsistencyModelPipeline of" in text
    assert "takes no negative_prompt. Set evaluator.negative=null" in text


def test_a_component_whose_class_the_library_lacks_is_named(folder, tmp_path):
    model = changed_index(folder, tmp_path / "a", unet=["diffusers", "UNet9DModel"])

    assert "diffusers has no class UNet9DModel for the component 'unet'" in said(folder, model=model)


def test_a_pipeline_without_weights_is_named_with_the_command_that_fetches_them(folder, tmp_path):
    shutil.copytree(folder / "a", tmp_path / "a", ignore=shutil.ignore_patterns("*.safetensors"))

    text = said(folder, model=str(tmp_path / "a"))

    assert "the weights of the component 'text_encoder' are missing" in text
    assert f"hf download ORG/NAME --local-dir {tmp_path / 'a'}" in text


def other_kind(folder: Path, target: Path) -> str:
    return str(save_vit(target, 1))


def without(name: str) -> Callable[[Path, Path], str]:
    def copied(folder: Path, target: Path) -> str:
        shutil.copytree(folder / "clip", target, ignore=shutil.ignore_patterns(name))
        return str(target)

    return copied


def of_another_width(folder: Path, target: Path) -> str:
    shutil.copytree(folder / "clip", target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "projection_dim": 13}))
    return str(target)


def large_tokenizer(folder: Path, target: Path) -> str:
    save_clip(target, 1)
    write_tokenizer(target, " ".join(f"word{n}" for n in range(20)))
    return str(target)


@pytest.mark.parametrize("key", ["clip", "preference"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (other_kind, "config.json is of a model of type 'vit', and only a CLIP of transformers"),
        (without("p*processor_config.json"), "there is no preprocessor_config.json"),
        (without("tokenizer*"), "no tokenizer lies in"),
        (without("*.safetensors"), "its weights cannot be read"),
        (of_another_width, "the model does not fit CLIPModel of"),
        (large_tokenizer, "has 23 tokens, and text_model.embeddings.token_embedding.weight"),
    ],
)
def test_a_folder_that_is_not_a_whole_clip_is_refused(folder, tmp_path, key, make, message):
    text = said(folder, **{key: make(folder, tmp_path / "other")})

    assert message in text
    assert f"evaluator.{key}" in text


def predictor(**tensors: torch.Tensor) -> Callable[[Path], str]:
    def saved(target: Path) -> str:
        named = {key.replace("_", "."): tensor for key, tensor in tensors.items()}
        save_file(named, target, metadata={"activation": "sine"} if "more_0_bias" in tensors else None)
        return str(target)

    return saved


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: str(path), "this file does not exist"),
        (lambda path: str(path.parent), "this file does not exist"),
        (predictor(weight=torch.zeros(1, 5)), "reads 5 features, and the CLIP in"),
        (
            predictor(weight=torch.zeros(2, 12)),
            "its layers have the shapes [[2, 12]]: expected [outputs, inputs]",
        ),
        (predictor(weight=torch.zeros(12)), "its layers have the shapes [[12]]"),
        (predictor(weight=torch.zeros(1, 12), bias=torch.zeros(2)), "its layers have the shapes [[1, 12]]"),
        (
            predictor(layers_0_weight=torch.zeros(4, 12), layers_2_weight=torch.zeros(1, 5)),
            "its layers have the shapes [[4, 12], [1, 5]]",
        ),
        (predictor(bias=torch.zeros(1)), "its layers have the shapes []"),
        (predictor(head=torch.zeros(1, 12)), "and it has head"),
        (
            predictor(more_0_weight=torch.zeros(1, 12), more_0_bias=torch.zeros(1)),
            "its metadata have the unknown activation 'sine'",
        ),
    ],
)
def test_an_aesthetic_predictor_that_does_not_fit_is_refused(folder, tmp_path, make, message):
    text = said(folder, clip=str(folder / "clip"), aesthetic=make(tmp_path / "head.safetensors"))

    assert message in text
    assert "evaluator.aesthetic" in text


def test_an_aesthetic_predictor_needs_the_clip_that_it_was_trained_for(folder, tmp_path):
    head = predictor(weight=torch.zeros(1, 12))(tmp_path / "head.safetensors")

    text = said(folder, aesthetic=head)

    assert "evaluator.aesthetic reads the features of a CLIP" in text
    assert "evaluator.clip=FOLDER" in text


def test_a_pipeline_of_the_hub_is_found_with_its_weights_or_named_with_the_command(folder, tmp_path, cached):
    shutil.copytree(folder / "a", tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    cached("tiny/whole", folder / "a")
    cached("tiny/bare", tmp_path / "bare")

    assert key_of(folder, model="tiny/whole", distances=False, clip=str(folder / "clip"))
    for name in ("tiny/bare", "tiny/none"):
        text = said(folder, model=name)
        assert (
            f"evaluator.model={name}: there is no such folder, and as a model of the hub it is not in" in text
        )
        assert text.endswith(f"hf download {name}")


@pytest.mark.parametrize("key", ["clip", "preference"])
def test_a_clip_of_the_hub_is_found_or_named_with_the_command(folder, cached, key):
    cached("tiny/clip", folder / "clip")

    assert key_of(folder, **{key: "tiny/clip"}) != key_of(folder)
    assert said(folder, **{key: "tiny/none"}).endswith("hf download tiny/none")


def test_single_files_come_with_the_command_that_makes_a_folder_of_them(tmp_path):
    file = tmp_path / "photo.safetensors"
    write_holes(file, "sd1-ldm")

    with pytest.raises(ConfigError) as error:
        pipeline_folder(Context(inputs={"photo": file}), None)

    command = f"python -m mecha_exp convert {file} --to sd1-diffusers -o {tmp_path / 'photo'}"
    assert "no config.json lies beside the inputs" in str(error.value)
    assert str(error.value).endswith(command)
