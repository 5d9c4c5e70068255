"""The bundled demo: its files are sound, its experts are experts, and they can be made again."""

import math
import os
import re
import subprocess
import sys
from collections import Counter
from importlib import resources
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from mecha_exp.errors import ConfigError
from mecha_exp.evaluators.digits import digits, fits
from mecha_exp.examples.digits.network import TASKS, DigitsNetwork, network_shapes

DEMO = Path(str(resources.files("mecha_exp.examples.digits")))
EXPERTS = [f"expert_{task}" for task in TASKS]


def measured(state_dict: dict[str, torch.Tensor], split: str = "validation") -> dict[str, float]:
    return digits(state_dict, split=split).means("accuracy")


def checkpoint(name: str) -> dict[str, torch.Tensor]:
    return load_file(DEMO / f"{name}.safetensors")


@pytest.mark.parametrize("name", ["base", *EXPERTS])
def test_a_checkpoint_is_a_float32_state_dict_of_the_network(name):
    state_dict = checkpoint(name)

    assert {key: tuple(tensor.shape) for key, tensor in state_dict.items()} == network_shapes()
    assert {tensor.dtype for tensor in state_dict.values()} == {torch.float32}
    DigitsNetwork().load_state_dict(state_dict)


def test_the_data_are_small_grey_images_of_every_digit():
    data = load_file(DEMO / "data.safetensors")

    assert data["images"].shape == (len(data["labels"]), 8, 8)
    assert data["images"].dtype == torch.uint8
    assert data["images"].max() == 16
    assert data["labels"].unique().tolist() == list(range(10))
    assert len(data["rows"].unique()) == len(data["labels"])


@pytest.mark.parametrize("name", ["base", *EXPERTS])
@pytest.mark.parametrize("split", ["validation", "test"])
def test_accuracies_are_those_that_the_readme_states(name, split):
    row = re.search(
        rf"^\| `{name}` \| {split} \|(.*)\|$", (DEMO / "README.md").read_text("utf-8"), re.MULTILINE
    )
    assert row is not None
    stated = [float(cell) for cell in row[1].split("|")]

    assert list(measured(checkpoint(name), split).values()) == pytest.approx(stated, abs=1e-3)


@pytest.mark.parametrize("task", TASKS)
def test_an_expert_beats_the_base_on_its_own_digits_and_loses_on_all(task):
    base, expert = measured(checkpoint("base")), measured(checkpoint(f"expert_{task}"))

    assert expert[f"accuracy/{task}"] > base[f"accuracy/{task}"]
    assert expert["accuracy"] < base["accuracy"] - 0.3


def test_a_little_of_every_expert_beats_the_base_and_all_of_every_expert_does_not():
    base, experts = checkpoint("base"), [checkpoint(name) for name in EXPERTS]

    def accuracy(alpha: float) -> float:
        merged = {k: b + alpha * sum(e[k] - b for e in experts) for k, b in base.items()}
        return measured(merged)["accuracy"]

    assert accuracy(0.3) > accuracy(0.0) + 0.02
    assert accuracy(1.0) < accuracy(0.0) - 0.1


def test_the_evaluator_does_not_change_what_it_measures():
    state_dict = checkpoint("base")
    before = {key: tensor.clone() for key, tensor in state_dict.items()}

    assert measured(state_dict) == measured(state_dict)
    assert all(torch.equal(state_dict[key], before[key]) for key in before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_evaluator_takes_any_floating_dtype(dtype):
    state_dict = {key: tensor.to(dtype) for key, tensor in checkpoint("base").items()}

    assert measured(state_dict)["accuracy"] == pytest.approx(
        measured(checkpoint("base"))["accuracy"], abs=0.01
    )


def test_validation_and_test_share_no_image_and_have_as_many_of_each_digit():
    data = load_file(DEMO / "data.safetensors")
    label_of = dict(zip(data["rows"].tolist(), data["labels"].tolist(), strict=True))
    rows = {
        split: [
            int(row) for names in digits(checkpoint("base"), split=split).examples.values() for row in names
        ]
        for split in ("validation", "test")
    }

    assert sorted(rows["validation"] + rows["test"]) == sorted(label_of)
    assert (len(rows["validation"]), len(rows["test"])) == (362, 357)
    counts = {split: Counter(label_of[row] for row in listed) for split, listed in rows.items()}
    assert all(0 <= counts["validation"][digit] - counts["test"][digit] <= 1 for digit in range(10))


def test_an_image_is_read_by_the_task_of_its_digit():
    data = load_file(DEMO / "data.safetensors")
    label_of = dict(zip(data["rows"].tolist(), data["labels"].tolist(), strict=True))

    for task, names in digits(checkpoint("base")).examples.items():
        assert {label_of[int(row)] for row in names} == set(TASKS[task])


def test_the_evaluator_turns_away_another_network():
    with pytest.raises(ConfigError) as error:
        digits({"model.embed.weight": torch.zeros(2, 2)})

    assert "bundled demo" in str(error.value)
    assert "conv1.weight is missing" in str(error.value)
    assert "evaluator=none" in str(error.value)


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        ({"fc2.bias": torch.zeros(11)}, "fc2.bias has shape (11,) instead of (10,)"),
        ({"fc3.bias": torch.zeros(10)}, "fc3.bias is unknown"),
    ],
)
def test_the_evaluator_names_what_does_not_fit(change, phrase):
    state_dict = checkpoint("base") | change

    assert not fits({key: tuple(tensor.shape) for key, tensor in state_dict.items()})
    with pytest.raises(ConfigError, match=re.escape(phrase)):
        digits(state_dict)


def test_fits_tells_the_network_by_names_and_shapes():
    shapes = network_shapes()

    assert fits(shapes)
    assert not fits({key: shape for key, shape in shapes.items() if key != "fc1.bias"})
    assert not fits({})


def test_weights_that_are_not_finite_read_every_digit_wrongly():
    state_dict = checkpoint("base")
    state_dict["conv2.weight"] = torch.full_like(state_dict["conv2.weight"], torch.nan)

    metrics = measured(state_dict)

    assert math.isnan(metrics.pop("loss"))
    assert set(metrics.values()) == {0.0}


@pytest.mark.heavy
def test_training_again_gives_the_committed_bytes(tmp_path):
    pytest.importorskip("sklearn")
    with safe_open(DEMO / "base.safetensors", framework="pt") as file:
        made_with = file.metadata()["torch"]
    if torch.__version__.split("+")[0] != made_with:
        pytest.skip(f"the committed files were made with torch {made_with}")

    command = [sys.executable, "-m", "mecha_exp.examples.digits.train", "--output", str(tmp_path)]
    root = Path(__file__).parents[1]
    path = os.pathsep.join(p for p in (str(root), os.environ.get("PYTHONPATH")) if p)
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"PYTHONPATH": path})

    made = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert made == {name: (DEMO / name).read_bytes() for name in made}
    assert len(made) == 5
