"""The evaluators of pictures give the numbers of the library on the saved model."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from seen import SPLITS, context_of, measured, state_dict
from tiny_vision import CLASSES

from mecha_exp import Context, EvaluationError, Outcomes
from mecha_exp.evaluation import read_scoring

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore")]  # theirs are not ours


@pytest.fixture
def folder(vision: Path) -> Path:
    return vision


def in_the_words_of_the_library(
    outcomes: Outcomes, root: Path, label: Callable[[Image.Image, str], str]
) -> dict[str, tuple[float, float]]:
    """Assert that each example is a hit where the library's answer is the name of its folder.

    Returns:
        the accuracy of each task, and that of the library's answers.
    """
    accuracies = {}
    for task, hits in outcomes.values.items():
        assert len(hits) == 24
        answers = []
        for name in outcomes.examples[task]:
            with Image.open(root / task / name) as picture:
                answers.append(label(picture.convert("RGB"), task) == name.split("/")[1])
        np.testing.assert_array_equal(hits, answers)
        assert 0 < hits.mean() < 1
        accuracies[task] = (hits.mean(), np.mean(answers))
    return accuracies


def test_a_merged_classifier_scores_as_the_pipeline_of_transformers(folder, beside):
    by_split = measured(
        "image_classification", folder / "vit", data=str(folder / "data"), tasks=["pets", "toys"]
    )

    pipeline = transformers.pipeline(
        "image-classification", model=str(folder / "vit"), image_processor=str(folder / "vit"), use_fast=False
    )
    for split, outcomes in by_split.items():
        found = in_the_words_of_the_library(
            outcomes, folder / "data", lambda p, _: pipeline(p, top_k=1)[0]["label"]
        )
        for task, (ours, theirs) in found.items():
            beside("image_classification", f"{split}: accuracy/{task}", ours, theirs)


def test_a_merged_clip_scores_as_the_zero_shot_pipeline(folder, beside):
    settings = {"data": str(folder / "data/pets"), "templates": "a small photo of the {}."}

    by_split = measured("clip_zero_shot", folder / "clip", **settings)

    pipeline = transformers.pipeline("zero-shot-image-classification", model=str(folder / "clip"))

    def label(picture: Image.Image, task: str) -> str:
        words = {"candidate_labels": list(CLASSES), "hypothesis_template": "a small photo of the {}."}
        return pipeline(picture, **words)[0]["label"]

    for split, outcomes in by_split.items():
        found = in_the_words_of_the_library(outcomes, folder / "data", label)
        beside("clip_zero_shot", f"{split}: accuracy", *found["pets"])


@pytest.mark.parametrize("name, model", [("image_classification", "vit"), ("clip_zero_shot", "clip")])
def test_some_pictures_are_classified_as_among_all(folder, name, model):
    settings = {"name": name, "data": str(folder / "data"), "tasks": ["pets", "toys"]}
    weights, context = state_dict(folder / model), context_of(folder / model)
    shapes = {key: tuple(tensor.shape) for key, tensor in weights.items()}
    (evaluation,) = read_scoring(settings, shapes, context=context).evaluations
    places = [1, 4, 22]

    everything = evaluation.score(weights, context).outcomes
    some = evaluation.among({"toys": places}).score(weights, context).outcomes

    assert list(some.values) == ["toys"]
    assert some.values["toys"].tolist() == everything.values["toys"][places].tolist()
    assert some.examples["toys"].tolist() == everything.examples["toys"][places].tolist()


@pytest.mark.parametrize("name, model", [("image_classification", "vit"), ("clip_zero_shot", "clip")])
def test_points_race_by_the_pictures_that_they_classify(folder, line_of_models, name, model):
    models = (folder / f"{model}_1", folder / f"{model}_2", "alpha=0.0,0.3,0.6,0.9,1.2,1.5")
    data = (f"evaluator={name}", f"evaluator.data={folder / 'data'}", "evaluator.tasks=[pets,toys]")

    whole = line_of_models(*models, *data, "store=null", to="whole")
    race = line_of_models(*models, *data, "evaluator.race=halving", to="race")

    left = [alpha for alpha, row in race.items() if row["status"] == "FINISHED"]
    assert len(left) == 1 and race[left[0]]["race/examples"] == "48.0"
    assert sorted(row["race/examples"] for row in race.values()) == ["12.0", *["4.0"] * 4, "48.0"]
    for metric in ("accuracy", "accuracy/pets", "accuracy/toys"):
        assert race[left[0]][metric] == whole[left[0]][metric] != ""


def test_templates_are_averaged_as_clip_does_it_with_words_and_a_fixed_text_tower(folder):
    words = {"pets": {"cat": "big red cat", "dog": "blue dog", "eel": "green eel"}}
    sentences = ["a photo of a {}.", "a drawing of the {}.", "{}"]

    by_split = measured(
        "clip_zero_shot", folder / "clip", data=str(folder / "data"), tasks=["pets"], classes=words,
        templates={"pets": sentences}, text_model=str(folder / "clip_2"),
    )  # fmt: skip

    text = transformers.CLIPModel.from_pretrained(folder / "clip_2").eval()
    tower = transformers.CLIPModel.from_pretrained(folder / "clip").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "clip_2")
    processor = transformers.AutoImageProcessor.from_pretrained(folder / "clip_1", backend="pil")
    rows = []
    for name in CLASSES:
        tokens = tokenizer(
            [s.format(words["pets"][name]) for s in sentences], padding=True, return_tensors="pt"
        )
        features = text.get_text_features(**tokens).pooler_output
        mean = (features / features.norm(dim=1, keepdim=True)).mean(0)
        rows.append(mean / mean.norm())

    def label(picture: Image.Image, task: str) -> str:
        pixels = processor(images=[picture], return_tensors="pt")
        return CLASSES[
            int((torch.stack(rows) @ tower.get_image_features(**pixels).pooler_output[0]).argmax())
        ]

    for outcomes in by_split.values():
        in_the_words_of_the_library(outcomes, folder / "data", label)


@pytest.mark.parametrize("kind", ["CLIPModel", "CLIPVisionModelWithProjection", "CLIPVisionModel"])
def test_text_heads_from_files_are_clips_zero_shot(folder, tmp_path, kind):
    """The features of class names as heads, on each form in which towers are published."""
    data = {"data": str(folder / "data"), "tasks": ["pets", "toys"]}
    text = transformers.CLIPModel.from_pretrained(folder / "clip_1").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "clip_1")
    tokens = tokenizer([f"a photo of a {name}." for name in CLASSES], padding=True, return_tensors="pt")
    weight = text.get_text_features(**tokens).pooler_output.detach()
    for task in data["tasks"]:
        save_file({"weight": weight / weight.norm(dim=1, keepdim=True)}, tmp_path / f"{task}.safetensors")
    expected = measured("clip_zero_shot", folder / "clip", **data, text_model=str(folder / "clip_1"))
    full = transformers.CLIPModel.from_pretrained(folder / "clip")
    full.config.vision_config.projection_dim = 12
    part = getattr(transformers, kind)(full.config if kind == "CLIPModel" else full.config.vision_config)
    inner = full if kind == "CLIPModel" else full.vision_model
    target = part if kind != "CLIPVisionModelWithProjection" else part.vision_model
    target.load_state_dict(inner.state_dict())
    if kind == "CLIPVisionModelWithProjection":
        part.visual_projection.load_state_dict(full.visual_projection.state_dict())
    part.save_pretrained(tmp_path / "tower")
    shutil.copy(folder / "clip_1/preprocessor_config.json", tmp_path / "tower")
    more = {"projection": str(folder / "clip/model.safetensors")} if kind == "CLIPVisionModel" else {}

    by_split = measured(
        "image_classification", tmp_path / "tower", context=Context(inputs={"a": tmp_path / "tower"}),
        heads=str(tmp_path), **data, **more,
    )  # fmt: skip

    for split in SPLITS:
        assert by_split[split].equals(expected[split])


def test_linear_heads_of_a_classifiers_encoder_are_the_classifier(folder, tmp_path):
    """A classifier's own layer as a frozen head, in a file with a head of another task beside it."""
    weights = state_dict(folder / "vit")
    head = {"weight": weights["classifier.weight"], "bias": weights["classifier.bias"]}
    file = tmp_path / "heads.safetensors"
    save_file(
        {f"{task}.{name}": tensor.clone() for task in ("pets", "toys") for name, tensor in head.items()}, file
    )
    data = {"data": str(folder / "data"), "tasks": ["pets", "toys"]}

    by_split = measured("image_classification", folder / "vit", heads=str(file), **data)

    expected = measured("image_classification", folder / "vit", **data)
    for split in SPLITS:
        assert by_split[split].equals(expected[split])


def test_pictures_are_split_by_a_share_where_there_is_one_set(folder):
    by_split = measured(
        "image_classification",
        folder / "vit",
        data=str(folder / "data/pets/test"),
        validation_share=0.25,
        limit=5,
    )

    names = {split: set(outcomes.examples["test"]) for split, outcomes in by_split.items()}
    assert {split: len(examples) for split, examples in names.items()} == {"validation": 5, "test": 5}
    assert not names["validation"] & names["test"]


def test_what_decides_a_number_is_in_its_key(folder, tmp_path):
    """Pictures, processor and class names by content; the test split's too."""
    root = tmp_path / "copy"
    shutil.copytree(folder / "data/pets", root)
    shutil.copytree(folder / "vit_1", tmp_path / "vit_1")
    (tmp_path / "names.txt").write_text("cat\ndog\neel\n")
    context = Context(inputs={"a": tmp_path / "vit_1"})
    shapes = {key: tuple(t.shape) for key, t in state_dict(folder / "vit").items()}

    def key() -> str:
        settings = {"name": "image_classification", "data": str(root), "classes": str(tmp_path / "names.txt")}
        return read_scoring(settings, shapes, context=context).evaluations[0].key

    keys = [key()]
    shutil.copy(root / "test/cat/0.png", root / "test/cat/9.png")
    keys.append(key())
    processor = tmp_path / "vit_1/preprocessor_config.json"
    processor.write_text(processor.read_text().replace('"resample": 2', '"resample": 3'))
    keys.append(key())
    (tmp_path / "names.txt").write_text("eel\ndog\ncat\n")
    keys.append(key())
    assert len(set(keys)) == 4
    (tmp_path / "vit_1/README.md").write_text("nothing")
    assert key() == keys[-1]


@pytest.mark.parametrize(
    ("name", "model", "broken"),
    [
        ("image_classification", "vit", "classifier.bias"),
        ("clip_zero_shot", "clip", "visual_projection.weight"),
    ],
)
def test_logits_that_are_not_numbers_are_an_error_of_that_point(folder, name, model, broken):
    weights = state_dict(folder / model)
    weights[broken] = torch.full_like(weights[broken], torch.nan)

    with pytest.raises(EvaluationError, match="NaN or infinite logits for 24 of 24 pictures of 'pets'"):
        measured(name, folder / model, weights, data=str(folder / "data/pets"))
