"""Labelled pictures: which are found, which split they belong to, and what is wrong."""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pictures import content, picture, write_folders
from pyarrow import parquet

from mecha_exp.errors import ConfigError
from mecha_exp.evaluators.vision.heads import listed, output_places
from mecha_exp.evaluators.vision.image_data import Division, image_files, image_set, task_paths

WHOLE = Division()


def labelled(images) -> list[tuple[str, str]]:
    return [(name, images.classes[label]) for name, label in zip(images.examples, images.labels, strict=True)]


def write_table(
    path: Path, labels: list, *, pictures: str = "image", label: str = "label", names=None
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"bytes": content(seed), "path": f"{seed}.png"} for seed in range(len(labels))]
    table = pa.table({pictures: rows, label: labels})
    if names:
        features = {"info": {"features": {label: {"names": names, "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(features)})
    parquet.write_table(table, path, row_group_size=2)
    return path


@pytest.mark.parametrize("names", [("validation", "test"), ("val", "test"), ("valid", "Test")])
def test_splits_are_folders_and_classes_their_folders(tmp_path, names):
    root = write_folders(tmp_path / "pets", ["cat", "dog"], 2, splits=names)
    write_folders(tmp_path / "more", ["eel"], 1)
    (tmp_path / "more/eel").rename(root / names[1] / "eel")
    write_folders(tmp_path / "pets" / "train", ["ant"], 1)

    validation, test = (image_set("pets", root, split, WHOLE) for split in ("validation", "test"))

    cats_and_dogs = [("cat/0.png", "cat"), ("cat/1.png", "cat"), ("dog/0.png", "dog"), ("dog/1.png", "dog")]
    assert labelled(validation) == [(f"{names[0]}/{name}", label) for name, label in cats_and_dogs]
    assert labelled(test) == [
        (f"{names[1]}/{name}", label) for name, label in [*cats_and_dogs, ("eel/0.png", "eel")]
    ]
    assert validation.classes == test.classes == ("ant", "cat", "dog", "eel")
    assert not any("train" in str(file) for file in image_files(root))


@pytest.mark.parametrize("splits", [("",), ("test",), ("val",), ("train", "test")])
def test_one_set_is_divided_within_each_class(tmp_path, splits):
    root = write_folders(tmp_path / "pets", ["cat", "dog"], 10, splits=splits)
    division = Division(0.3, seed=1)

    validation, test = (image_set("pets", root, split, division) for split in ("validation", "test"))

    assert not set(validation.examples) & set(test.examples)
    assert len(set(validation.examples) | set(test.examples)) == 20
    assert np.bincount(validation.labels).tolist() == [3, 3]
    other = image_set("pets", root, "validation", Division(0.3, seed=2))
    assert set(other.examples) != set(validation.examples)
    assert other != validation
    assert image_set("pets", root, "validation", division) == validation


def test_more_pictures_move_none_that_were_there_to_the_other_split_but_at_the_border(tmp_path):
    root = write_folders(tmp_path / "pets", ["cat"], 20)
    before = set(image_set("pets", root, "validation", WHOLE).examples)
    picture(99).save(root / "cat/new.png")

    after = set(image_set("pets", root, "validation", WHOLE).examples)

    assert len(before - after) <= 1


def test_a_limit_draws_the_same_pictures_each_time(tmp_path):
    root = write_folders(tmp_path / "pets", ["cat", "dog"], 10)

    few = image_set("pets", root, "test", Division(limit=4))
    more = image_set("pets", root, "test", Division(limit=6))

    assert len(few) == 4
    assert set(few.examples) < set(more.examples)


def test_a_changed_picture_makes_another_set(tmp_path):
    root = write_folders(tmp_path / "pets", ["cat", "dog"], 4)
    before = image_set("pets", root, "test", WHOLE)
    (root / "cat/0.png").write_bytes(content(7) + b" ")

    assert image_set("pets", root, "test", WHOLE) != before


@pytest.mark.parametrize("labels", [[0, 1, 1, 0, 2], ["a", "b", "b", "a", "c"]])
def test_tables_have_pictures_in_row_groups(tmp_path, labels):
    path = write_table(tmp_path / "pets.parquet", labels)

    validation, test = (image_set("pets", path, split, WHOLE) for split in ("validation", "test"))

    rows = {name: int(name.split()[-1]) for name in [*validation.examples, *test.examples]}
    assert sorted(rows.values()) == [0, 1, 2, 3, 4]
    for images in (validation, test):
        for place, name in enumerate(images.examples):
            assert images.classes[images.labels[place]] == str(labels[rows[name]])
            np.testing.assert_array_equal(np.asarray(images.opened(place)), np.asarray(picture(rows[name])))


def test_tables_of_the_hub_have_splits_and_class_names(tmp_path):
    for split, labels in (("train", [0]), ("validation", [1, 0]), ("test", [2, 2, 1])):
        path = tmp_path / "pets/data" / f"{split}-00000-of-00001.parquet"
        write_table(path, labels, label="fine_label", names=["ant", "bee", "cat"])

    test = image_set("pets", tmp_path / "pets", "test", WHOLE)

    assert labelled(test) == [
        (f"data/test-00000-of-00001.parquet {n}", c) for n, c in enumerate(["cat", "cat", "bee"])
    ]
    assert test.classes == ("ant", "bee", "cat")


def test_tasks_are_names_or_paths(tmp_path):
    write_folders(tmp_path / "pets", ["cat"], 1)
    table = write_table(tmp_path / "cars.parquet", [0])

    assert task_paths(str(tmp_path), ["pets", "cars"]) == {"pets": tmp_path / "pets", "cars": table}
    assert task_paths(None, {"x": str(table)}) == {"x": table}
    assert task_paths(str(table), None) == {"cars": table}


def no_class(root: Path) -> None:
    root.mkdir()
    picture(1).save(root / "0.png")


def broken_table(root: Path) -> None:
    root.mkdir()
    (root / "test.parquet").write_bytes(b"PAR1 not really")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: root.mkdir(), "there are no pictures in it"),
        (no_class, "its class is unknown. Put it into a folder named after its class"),
        (
            lambda root: write_folders(root, ["cat"], 1, splits=["train"]),
            "there are pictures for training alone",
        ),
        (lambda root: write_folders(root, ["cat"], 2, splits=["val", "test"]), "has both splits"),
        (lambda root: write_folders(root, ["cat"], 1), "there is no picture for the split 'validation'"),
        (broken_table, "cannot be read as Parquet"),
        (lambda root: write_table(root / "a.parquet", [0], pictures="png"), "has no column 'image'"),
        (lambda root: write_table(root / "a.parquet", [0], label="target"), "has no column 'label'"),
        (lambda root: write_table(root / "a.parquet", [0, -1]), "the label -1 is out of range"),
        (lambda root: write_table(root / "a.parquet", [0, None]), "a.parquet 1: this row has no label"),
        (
            lambda root: write_table(root / "a.parquet", [0, 3], names=["ant", "bee"]),
            "the label 3 is out of range: there are 2 classes",
        ),
    ],
)
def test_pictures_that_cannot_be_measured_are_named(tmp_path, make, message):
    make(tmp_path / "pets")

    with pytest.raises(ConfigError, match=re.escape(message)):
        image_set("pets", tmp_path / "pets", "validation", Division(0.2))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"share": 1.0}, "validation_share=1.0"),
        ({"share": "a"}, "validation_share=a"),
        ({"limit": 0}, "limit=0"),
    ],
)
def test_a_division_has_ranges(values, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        Division(**values)


@pytest.mark.parametrize(
    ("data", "tasks", "message"),
    [
        (None, None, "evaluator.data: name the folder"),
        ("lost", None, "evaluator.data: lost does not exist"),
        (".", ["lost"], "evaluator.tasks: lost does not exist. In . there are pets"),
        (".", [], "evaluator.tasks: there is no task in it"),
    ],
)
def test_data_that_are_not_there_are_named(tmp_path, monkeypatch, data, tasks, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pets").mkdir()

    with pytest.raises(ConfigError, match=re.escape(message)):
        task_paths(data, tasks)


def test_a_file_that_is_not_a_picture_is_named(tmp_path):
    (tmp_path / "pets/cat").mkdir(parents=True)
    (tmp_path / "pets/cat/0.png").write_bytes(b"text")
    (tmp_path / "pets/cat/1.png").write_bytes(b"text")

    with pytest.raises(ConfigError, match=r"cat/\d\.png is not a picture that can be read"):
        image_set("pets", tmp_path / "pets", "test", WHOLE).opened(0)


@pytest.mark.parametrize(
    ("classes", "outputs", "names", "expected"),
    [
        (["cat", "dog"], 2, None, [0, 1]),
        (["cat", "dog"], 3, ["dog", "eel", "cat"], [2, 0]),
        (["0", "2", "10"], 11, None, [0, 2, 10]),
        (["00", "01"], 2, None, [0, 1]),
        (["0", "1"], 2, ["one", "two"], [0, 1]),
        (["1", "2"], 2, ["1", "2"], [0, 1]),
        (["cat", "dog"], 3, None, "has 2 classes, and the head has 3 outputs"),
        (["cat", "eel"], 2, ["cat", "dog"], "the class 'eel' is none of the outputs of the head: cat, dog"),
        (["1", "2"], 2, None, "the label 2 is out of range: the head has 2 outputs, 0 to 1"),
        (["cat"], 2, ["cat"], "the head has 2 outputs, and 1 names are given"),
    ],
)
def test_classes_find_their_outputs_by_name_or_by_number_or_by_order(
    tmp_path, classes, outputs, names, expected
):
    images = image_set("pets", write_folders(tmp_path / "pets", classes, 2), "test", WHOLE)

    if isinstance(expected, list):
        assert output_places(images, outputs, names, "the head").tolist() == expected
        return
    with pytest.raises(ConfigError, match=re.escape(expected)):
        output_places(images, outputs, names, "the head")


def test_names_are_listed_in_the_configuration_or_in_files(tmp_path):
    (tmp_path / "pets.txt").write_text("cat\n\ndog \n")
    (tmp_path / "words.yaml").write_text("{cat: a cat, dog: a dog}")
    (tmp_path / "broken.json").write_text("{")

    assert listed(None, "pets", "classes") is None
    assert listed(str(tmp_path), "pets", "classes") == ["cat", "dog"]
    assert listed({"pets": ["a", 1]}, "pets", "classes") == ["a", "1"]
    assert listed({"cars": ["a"]}, "pets", "classes") is None
    assert listed(str(tmp_path / "words.yaml"), "pets", "classes") == {"cat": "a cat", "dog": "a dog"}
    for file in ("broken.json", "lost.txt"):
        with pytest.raises(ConfigError, match=f"evaluator.classes: .*{file} cannot be read"):
            listed(str(tmp_path / file), "pets", "classes")
