"""What does not fit the evaluators of pictures is said before anything is merged."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from seen import context_of, state_dict
from tiny_tokenizers import write_tokenizer
from tiny_vision import save_clip, save_vit

from mecha_exp import Context
from mecha_exp.errors import ConfigError
from mecha_exp.evaluation import read_scoring

pytest.importorskip("transformers")
pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore")]  # theirs are not ours


@pytest.fixture
def folder(vision: Path) -> Path:
    return vision


def large_tokenizer(folder: Path, tmp_path: Path) -> dict[str, object]:
    shutil.copytree(folder / "clip_1", tmp_path / "large")
    write_tokenizer(tmp_path / "large", " ".join(f"word{n}" for n in range(20)))
    return {"model": str(tmp_path / "large")}


def heads(tmp_path: Path, shape: tuple[int, ...], name: str = "weight") -> str:
    save_file({name: torch.zeros(shape)}, tmp_path / "pets.safetensors")
    return str(tmp_path)


def without_processor(folder: Path, tmp_path: Path) -> Context:
    shutil.copytree(folder / "vit_1", tmp_path / "bare")
    (tmp_path / "bare/preprocessor_config.json").unlink()
    return Context(inputs={"a": tmp_path / "bare"})


CLASSIFIER, CLIP = "image_classification", "clip_zero_shot"


@pytest.mark.parametrize(
    ("name", "model", "more", "message"),
    [
        (
            CLASSIFIER,
            "clip",
            lambda f, t: {"heads": heads(t, (3, 16))},
            "takes 16 features, and CLIPModel of",
        ),
        (
            CLASSIFIER,
            "vit",
            lambda f, t: {"heads": heads(t, (2, 16))},
            "has 3 classes, and the head of 'pets' has 2",
        ),
        (
            CLASSIFIER,
            "vit",
            lambda f, t: {"heads": heads(t, (3, 16), "w")},
            "has no 'weight' (or 'pets.weight')",
        ),
        (
            CLASSIFIER,
            "vit",
            lambda f, t: {"heads": heads(t, (3,))},
            "has shapes [[3]]: expected [classes, width]",
        ),
        (
            CLASSIFIER,
            "vit",
            lambda f, t: {"heads": {"cars": "a"}},
            "evaluator.heads.cars: there is no such task",
        ),
        (CLASSIFIER, "vit", lambda f, t: {"heads": str(t)}, "the head of 'pets', does not exist"),
        (CLASSIFIER, "vit", lambda f, t: {"classes": ["cat", "dog"]}, "has 3 outputs, and 2 names are given"),
        (
            CLASSIFIER,
            "vit",
            lambda f, t: {"classes": ["a", "b", "c"]},
            "the class 'cat' is none of the outputs",
        ),
        (CLASSIFIER, "clip", lambda f, t: {}, "holds a CLIPModel, which does not classify"),
        (
            CLASSIFIER,
            "vit",
            lambda f, t: {"projection": str(f / "clip_1")},
            "evaluator.projection: without heads",
        ),
        (
            CLASSIFIER,
            "vit",
            lambda f, t: {"batch_size": 0},
            "evaluator.batch_size=0: expected a whole number",
        ),
        (CLASSIFIER, "vit", lambda f, t: {"data": None}, "evaluator.data: name the folder"),
        (CLASSIFIER, "vit", lambda f, t: {"processor": str(t)}, "no preprocessor_config.json lies in"),
        (CLASSIFIER, "vit", lambda f, t: {"device": "cuda:7"}, "evaluator.device=cuda:7: torch sees"),
        (
            CLASSIFIER,
            "vit",
            lambda f, t: {"context": without_processor(f, t)},
            "name its folder with evaluator.pro",
        ),
        (CLIP, "vit", lambda f, t: {}, "no tokenizer lies in"),
        (
            CLIP,
            "clip",
            lambda f, t: {"templates": ["a photo"]},
            "'a photo' needs {} once, where the class goes",
        ),
        (CLIP, "clip", lambda f, t: {"classes": ["cat", "dog"]}, "2 names for the 3 classes of 'pets'"),
        (
            CLIP,
            "clip",
            lambda f, t: {"classes": {"pets": {"cat": "a cat"}}},
            "the class 'dog' of 'pets' has no words",
        ),
        (CLIP, "clip", large_tokenizer, "has 23 tokens, and text_model.embeddings.token_embedding.weight of"),
        (CLIP, "clip", lambda f, t: {"text_model": str(f / "vit_1")}, "evaluator.text_model=PATH"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_is_merged(folder, tmp_path, name, model, more, message):
    settings = {"data": str(folder / "data/pets"), **more(folder, tmp_path)}
    context = settings.pop("context", context_of(folder / model))
    shapes = {key: tuple(tensor.shape) for key, tensor in state_dict(folder / model).items()}

    with pytest.raises(ConfigError) as error:
        read_scoring({"name": name, **settings}, shapes, context=context)

    assert message in str(error.value)


@pytest.mark.parametrize(("name", "model"), [(CLASSIFIER, "vit"), (CLIP, "clip")])
def test_a_gpu_must_have_room_for_all_of_its_workers(folder, name, model, monkeypatch):
    needed = sum(tensor.nbytes for tensor in state_dict(folder / model).values())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * needed - 1, 80_000_000_000))

    text = said(folder, name, model, data=str(folder / "data/pets"), device="cuda:0", workers=2)

    assert f"the weights of 2 workers need {2 * needed:,} bytes, and {2 * needed - 1:,} are free" in text


def said(folder: Path, name: str, model: str, /, **settings: object) -> str:
    """The error of the checks before a merge, for the shapes of the weights alone."""
    shapes = {key: tuple(tensor.shape) for key, tensor in state_dict(folder / model).items()}
    settings = {"name": name, "data": str(folder / "data/pets"), **settings}
    with pytest.raises(ConfigError) as error:
        read_scoring(settings, shapes, context=context_of(folder / model))
    return str(error.value)


@pytest.mark.parametrize(("name", "model"), [(CLASSIFIER, "vit"), (CLIP, "clip")])
def test_a_processor_of_another_size_is_said_before_a_merge(folder, tmp_path, name, model):
    save_vit(tmp_path / "large", 1, side=24)

    text = said(folder, name, model, processor=str(tmp_path / "large"))

    assert "makes pictures of 24 x 24 pixels, and the model takes 16 x 16" in text
    assert "evaluator.processor=PATH" in text


@pytest.mark.parametrize("more", [lambda f: {}, lambda f: {"text_model": str(f / "clip_2")}])
def test_the_longest_sentence_is_compared_with_the_text_tower_before_a_merge(folder, more):
    text = said(folder, CLIP, "clip", templates=["{}", "a " * 12 + "{}."], **more(folder))

    sentence = "'" + "a " * 12
    assert sentence in text
    assert "has 16 tokens, and the text tower takes 12: shorten it" in text


def text_model(target: Path, kind: str, width: int) -> str:
    """A text tower in a folder, with its tokenizer."""
    import transformers

    config = transformers.CLIPConfig.from_pretrained(save_clip(target, 1))
    (target / "model.safetensors").unlink()
    config.projection_dim = config.text_config.projection_dim = width
    model = getattr(transformers, kind)
    model(config if kind == "CLIPModel" else config.text_config).save_pretrained(target)
    return str(target)


@pytest.mark.parametrize("kind", ["CLIPModel", "CLIPTextModelWithProjection"])
def test_a_text_model_of_another_width_is_said_before_a_merge(folder, tmp_path, kind):
    text = said(folder, CLIP, "clip", text_model=text_model(tmp_path / "text", kind, 13))

    assert "its features of texts have 13 numbers, and CLIPModel of" in text
    assert "gives 12 for a picture. Name the CLIP that the models were fine-tuned from" in text


def test_a_text_tower_with_projection_reads_class_names(folder, tmp_path):
    import transformers
    from seen import measured

    whole = transformers.CLIPModel.from_pretrained(folder / "clip_1")
    tower = text_model(tmp_path / "text", "CLIPTextModelWithProjection", 12)
    part = transformers.CLIPTextModelWithProjection.from_pretrained(tower)
    part.text_model.load_state_dict(whole.text_model.state_dict())
    part.text_projection.load_state_dict(whole.text_projection.state_dict())
    part.save_pretrained(tower)
    data = str(folder / "data/pets")

    by_tower = measured(CLIP, folder / "clip", data=data, text_model=tower)

    by_whole = measured(CLIP, folder / "clip", data=data, text_model=str(folder / "clip_1"))
    assert all(by_tower[split].equals(by_whole[split]) for split in by_whole)


def test_a_text_model_without_features_of_texts_is_refused(folder, tmp_path):
    tower = text_model(tmp_path / "text", "CLIPTextModel", 12)

    text = said(folder, CLIP, "clip", text_model=tower)

    assert f"evaluator.text_model={tower}: it holds a CLIPTextModel, which gives no features of texts" in text


def test_a_text_model_without_weights_is_refused(folder, tmp_path):
    shutil.copytree(folder / "clip_1", tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))

    text = said(folder, CLIP, "clip", text_model=str(tmp_path / "bare"))

    assert f"evaluator.text_model={tmp_path / 'bare'}: its weights cannot be read" in text


@pytest.mark.parametrize(
    ("name", "model", "key", "files"),
    [
        (CLASSIFIER, "vit", "processor", " --include '*.json' '*.txt' '*.model'"),
        (CLIP, "clip", "text_model", ""),
        (CLIP, "clip", "model", " --include '*.json' '*.txt' '*.model'"),
    ],
)
def test_a_model_of_the_hub_is_named_with_the_command_that_fetches_it(
    folder, cached, name, model, key, files
):
    text = said(folder, name, model, **{key: "tiny/none"})

    assert (
        f"evaluator.{key}=tiny/none: there is no such folder, and as a model of the hub it is not in" in text
    )
    assert f"Fetch it with hub.offline=false, or: hf download tiny/none{files}" in text
    assert text.endswith(f"hf download tiny/none{files}")


def test_a_projection_of_the_hub_is_named_with_the_command_that_fetches_it(folder, tmp_path, cached):
    save_clip(tmp_path / "tower", 1, "CLIPVisionModel")
    shapes = {key: tuple(tensor.shape) for key, tensor in state_dict(tmp_path / "tower").items()}
    settings = {"name": CLASSIFIER, "data": str(folder / "data/pets"), "heads": heads(tmp_path, (3, 12))}
    context = Context(inputs={"a": tmp_path / "tower"})

    message = re.escape("evaluator.projection=tiny/none@v2: there is no such folder")
    with pytest.raises(ConfigError, match=f"{message}.*hf download tiny/none --revision v2$"):
        read_scoring({**settings, "projection": "tiny/none@v2"}, shapes, context=context)

    cached("tiny/clip", folder / "clip")
    read_scoring({**settings, "projection": "tiny/clip"}, shapes, context=context)


def test_models_in_the_cache_of_the_hub_are_found_by_their_names(folder, cached):
    cached("tiny/clip", folder / "clip_1")
    shapes = {key: tuple(tensor.shape) for key, tensor in state_dict(folder / "clip").items()}
    settings = {
        "name": CLIP,
        "data": str(folder / "data/pets"),
        "text_model": "tiny/clip",
        "processor": "tiny/clip",
    }

    scoring = read_scoring(settings, shapes, context=context_of(folder / "clip"))

    assert scoring.metric == "accuracy"


def test_weights_that_are_not_in_the_cache_are_named_with_the_command(folder, cached, tmp_path):
    shutil.copytree(folder / "clip_1", tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    cached("tiny/bare", tmp_path / "bare")

    assert said(folder, CLIP, "clip", text_model="tiny/bare").endswith("hf download tiny/bare")
