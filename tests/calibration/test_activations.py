"""Activations of units, and Git Re-Basin by them: the authors' formula, trained networks, and refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from matched_networks import (
    CONFIGS,
    KINDS,
    Convolutions,
    Perceptron,
    barrier,
    images_of_digits,
    loss,
    measured,
    network,
    saved,
    statistics,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn import functional as F

import mecha_exp as m
from mecha_exp.architectures import from_yaml, register
from mecha_exp.architectures.library.registry import isolated
from mecha_exp.calibration.seams import calibrate as verb
from mecha_exp.sources.statistics.header import METADATA

pytestmark = pytest.mark.usefixtures("units_known")
StateDict = dict[str, Tensor]


def hidden(weights: StateDict, images: Tensor) -> list[Tensor]:
    """What the units of both hidden layers of a perceptron give."""
    first = F.relu(images @ weights["0.weight"].T + weights["0.bias"])
    return [first, F.relu(first @ weights["2.weight"].T + weights["2.bias"])]


# calibration


def test_activations_are_the_inputs_of_the_layers_that_read_the_units(networks):
    images, _ = images_of_digits()
    expected = hidden(networks[0], images[:300])

    made = load_file("a.stats.safetensors")

    assert made.keys() == {"activations/2.weight", "activations/4.weight"}
    for key, value in zip(("2", "4"), expected, strict=True):
        torch.testing.assert_close(made[f"activations/{key}.weight"], value)


def test_some_positions_of_each_image_are_drawn_the_same_in_each_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    images = torch.randn(7, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    weights = [saved(Convolutions, name, seed) for seed, name in enumerate("ab")]
    first = [F.relu(F.conv2d(images, model["first.weight"])).movedim(1, -1) for model in weights]

    made = [measured(Convolutions, name, images, positions=3) for name in "ab"]

    rows = [x["activations/second.weight"].view(7, 3, 6) for x in made]
    for image in range(7):
        places = [
            [int((every[image].reshape(-1, 6) - row).abs().sum(1).argmin()) for row in drawn[image]]
            for every, drawn in zip(first, rows, strict=True)
        ]
        assert places[0] == places[1] == sorted(set(places[0]))
        torch.testing.assert_close(first[0][image].reshape(-1, 6)[places[0]], rows[0][image])
    other = measured(Convolutions, "a", images, positions=3, seed=1)["activations/second.weight"]
    assert not torch.equal(other, made[0]["activations/second.weight"])
    every = measured(Convolutions, "a", images, positions=99)["activations/second.weight"]
    assert every.shape == (7 * 16, 6)


@pytest.mark.parametrize("memory", [2 << 30, 1])
def test_an_interrupted_calibration_of_activations_goes_on(tmp_path, monkeypatch, memory):
    monkeypatch.chdir(tmp_path)
    saved(Convolutions, "a", 0)
    images = torch.randn(9, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    expected = measured(Convolutions, "a", images, positions=5)
    Path("a.stats.safetensors").unlink()
    forward, calls = Convolutions.forward, [0]

    def fails_at_the_sixth(self: Convolutions, batch: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] == 6:
            raise KeyboardInterrupt
        return forward(self, batch)

    monkeypatch.setattr(Convolutions, "forward", fails_at_the_sixth)
    with pytest.raises(KeyboardInterrupt):
        measured(Convolutions, "a", images, positions=5, chunk=2, memory=memory)
    made = measured(Convolutions, "a", images, positions=5, chunk=2, memory=memory)

    assert made.keys() == expected.keys()
    assert all(torch.equal(made[key], expected[key]) for key in made)
    assert calls[0] == 6 + (5 if memory > 1 else 5 + 9)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": ""}, r"compared example by example\. Name the data in the Request"),
        ({"positions": 0}, "positions=0: expected 1 or more"),
    ],
)
def test_activations_that_could_not_be_compared_are_refused(networks, given, message):
    with pytest.raises(m.ConfigError, match=message):
        measured(Perceptron, "a", torch.zeros(2, 64), **given)


def test_a_model_without_units_that_may_change_places_is_refused(bench):
    words = ["data=a.pt", "module=net.py:subject", "kind=activations", "output=x.safetensors"]

    with pytest.raises(
        m.ConfigError, match=r"config of a\.safetensors names no units that may change places"
    ):
        verb.main(["a.safetensors", *words])


def test_the_command_line_measures_activations_of_a_config_beside_it(bench):
    Path("model_configs").mkdir()
    Path("model_configs/net.yaml").write_text(
        "identifier: net-test\ncomponents: {net: {keys: {conv.weight: [4, 2, 3, 3], conv.bias: [4], "
        "head.weight: [3, 16], head.bias: [3], unused: [2], steps: []}, "
        "symmetries: {'': [{rows: 'conv.{weight,bias}'}, {rows: 'head.{weight,bias}'}]}}}"
    )
    words = ["data=a.pt", "module=net.py:subject", "kind=activations", "positions=2"]

    assert verb.main(["a.safetensors", *words, "output=x.safetensors"]) == 0

    made = load_file("x.safetensors")
    assert {key: tuple(value.shape) for key, value in made.items()} == {
        "activations/conv.weight (outputs)": (60, 4),
        "activations/head.weight (outputs)": (30, 3),
    }
    with safe_open("x.safetensors", framework="pt") as file:
        header = json.loads(file.metadata()[METADATA])
    assert header["settings"]["positions"] == 2
    assert header["rows"] == {
        "activations/conv.weight (outputs)": 120,
        "activations/head.weight (outputs)": 30,
    }


# Git Re-Basin


def likenesses(reference: Tensor, model: Tensor, likeness: str) -> Tensor:
    """The authors' `E_ab` or `pearson_correlation` of activations [examples, units]."""
    if likeness == "product":
        return reference.T @ model / len(model)
    return torch.corrcoef(torch.cat([reference, model], 1).T)[:32, 32:].nan_to_num()


@pytest.mark.parametrize("likeness", ["product", "correlation"])
def test_units_are_assigned_by_the_products_of_their_activations(networks, likeness):
    reference, model = networks[:2]
    images = images_of_digits()[0][:300]

    made = m.merge(
        m.rebasin_by_activations("b.safetensors", "a.safetensors", statistics("b", "a"), likeness=likeness)
    )

    for layer in (0, 1):
        z_ref, z_a, z_made = (hidden(weights, images)[layer].double() for weights in (reference, model, made))
        scores = likenesses(z_ref, z_a, likeness)
        best = scores[linear_sum_assignment(scores.numpy(), maximize=True)].sum()
        torch.testing.assert_close(likenesses(z_ref, z_made, likeness).trace(), best, rtol=1e-6, atol=0)
        assert best > scores.trace() + 1
    assert sorted(made["0.bias"].tolist()) == sorted(model["0.bias"].tolist())
    torch.testing.assert_close(network(Perceptron, made)(images), network(Perceptron, model)(images))


@pytest.mark.parametrize(("kind", "shape"), KINDS.values(), ids=KINDS)
def test_a_random_order_is_taken_back_byte_for_byte(tmp_path, monkeypatch, kind, shape):
    monkeypatch.chdir(tmp_path)
    model = saved(kind, "a", 3)
    m.merge(m.randperm("a.safetensors", seed=1), "moved.safetensors")
    moved = load_file("moved.safetensors")
    examples = torch.randn(40, *shape, generator=torch.Generator().manual_seed(0))
    for name in ("a", "moved"):
        measured(kind, name, examples)

    found = m.merge(m.rebasin_by_activations("moved.safetensors", "a.safetensors", statistics("moved", "a")))

    torch.testing.assert_close(network(kind, moved)(examples), network(kind, model)(examples))
    assert any(not torch.equal(moved[key], model[key]) for key in model)
    assert all(torch.equal(found[key], model[key]) for key in model)


def test_the_mean_of_two_trained_networks_loses_less_in_one_order(networks):
    models = ("a.safetensors", "b.safetensors")
    in_order = m.rebasin_by_activations(models[1], models[0], statistics("b", "a"))

    naive, ordered = (
        barrier(m.merge(m.weighted_sum(models[0], other, alpha=0.5)), networks[:2])
        for other in (models[1], in_order)
    )

    assert naive > 0.5
    assert ordered < 0.3 * naive
    torch.testing.assert_close(loss(m.merge(in_order)), loss(networks[1]))


@isolated()
def test_units_without_activations_stay_where_they_are_and_are_counted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = CONFIGS.split("---")[2].replace("columns: last.weight", "columns: other.weight")
    register(from_yaml(text.replace("last.weight: [2, 5]", '"{last,other}.weight": [2, 5]')))
    for seed, name in enumerate("ab"):
        weights = saved(Convolutions, name, seed)
        save_file({**weights, "other.weight": torch.rand(2, 5)}, f"{name}.safetensors")
    examples = torch.randn(5, 1, 6, 6)

    class WithMore(Convolutions):
        def load_state_dict(self, weights: Any, **_: Any) -> Any:
            return super().load_state_dict({k: v for k, v in weights.items() if k != "other.weight"})

    for name in "ab":
        measured(WithMore, name, examples)
    model = load_file("b.safetensors")
    node, made = m.rebasin_by_activations("b.safetensors", "a.safetensors", statistics("b", "a")), {}

    report = m.merge_many([m.Job(node, made)])

    assert torch.equal(made["other.weight"], model["other.weight"])
    assert torch.equal(made["scale.weight"], model["scale.weight"])
    assert not torch.equal(made["first.weight"], model["first.weight"])
    assert any("keys have no activations and their units keep their places" in w for w in report.warnings)


@pytest.mark.parametrize("likeness", ["product", "correlation"])
def test_units_of_a_layer_that_no_example_reaches_stay_where_they_are(tmp_path, monkeypatch, likeness):
    class WithoutLast(Convolutions):
        def forward(self, images: Tensor) -> Tensor:
            made: Tensor = self.second(F.relu(self.first(images))).mean((2, 3))
            return made

    monkeypatch.chdir(tmp_path)
    models = [saved(WithoutLast, name, seed) for seed, name in enumerate("ab")]
    for name in "ab":
        made = measured(WithoutLast, name, torch.randn(5, 1, 6, 6))
        assert made["activations/last.weight"].shape == (0, 5)

    ordered: StateDict = {}
    units = statistics("b", "a")
    report = m.merge_many(
        [m.Job(m.rebasin_by_activations("b.safetensors", "a.safetensors", units, likeness=likeness), ordered)]
    )
    zipped = m.merge(m.zipit("b.safetensors", "a.safetensors", statistics=units))

    assert torch.equal(ordered["last.weight"], models[1]["last.weight"])
    assert not torch.equal(ordered["first.weight"], models[1]["first.weight"])
    torch.testing.assert_close(
        zipped["last.weight"], (models[0]["last.weight"] + models[1]["last.weight"]) / 2
    )
    assert any("3 of 4 keys have no activations and their units keep" in w for w in report.warnings)


# what does not belong together

DIFFERENT: dict[str, tuple[Callable[[], Any], str]] = {
    "data": (
        lambda: measured(Perceptron, "b", torch.ones(300, 64), data="others"),
        "their data are examples and others",
    ),
    "content": (
        lambda: measured(Perceptron, "b", torch.ones(300, 64), data_sha256="12"),
        "their hashes of the data are  and 12",
    ),
    "count": (lambda: measured(Perceptron, "b", torch.ones(20, 64)), "their count are 300 and 20"),
    "seed": (lambda: measured(Perceptron, "b", torch.ones(300, 64), seed=3), "their seed are 0 and 3"),
    "positions": (
        lambda: measured(Perceptron, "b", torch.ones(300, 64), positions=3),
        r"their settings are \{'positions': 16\} and \{'positions': 3\}",
    ),
    "rows": (
        lambda: measured(Perceptron, "b", torch.ones(300, 2, 64)),
        "their rows of 'activations/2.weight' are 300 and 600",
    ),
}


@pytest.fixture
def untrained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[StateDict]:
    """Two networks by chance, and activations of the first, in the current folder."""
    monkeypatch.chdir(tmp_path)
    weights = [saved(Perceptron, name, seed) for seed, name in enumerate("ab")]
    measured(Perceptron, "a", torch.ones(300, 64))
    return weights


@pytest.mark.parametrize(("measure", "message"), DIFFERENT.values(), ids=DIFFERENT)
def test_activations_of_different_examples_are_an_error_that_names_both_files(untrained, measure, message):
    measure()

    for node in (
        m.rebasin_by_activations("a.safetensors", "b.safetensors", statistics("a", "b")),
        m.zipit("a.safetensors", "b.safetensors", statistics=statistics("a", "b")),
    ):
        with pytest.raises(
            m.CheckpointError,
            match=r"a\.stats\.safetensors and .*b\.stats\.safetensors hold activations of different "
            rf"examples: {message}\. Calibrate both models with the same data, count, order and seed",
        ):
            m.merge(node)


def test_statistics_in_another_order_than_the_models_are_refused(networks):
    with pytest.raises(m.RecipeError, match=r"whose content is not that of models\[0\], .*b\.safetensors"):
        m.merge(m.rebasin_by_activations("b.safetensors", "a.safetensors", statistics("a", "b")))


def test_statistics_of_another_kind_are_refused(networks):
    files = ("a.stats.safetensors", "b.stats.safetensors")

    with pytest.raises(m.MechaError, match=r"holds activations of .*a\.safetensors, and not gram"):
        m.merge(m.zipit("a.safetensors", "b.safetensors", statistics=m.statistics(*files, kind="gram")))


@pytest.mark.parametrize("given", [1.0, torch.ones(2)])
def test_a_value_is_not_statistics(networks, given):
    with pytest.raises(
        m.RecipeError, match=r"zipit: statistics is .*, and not statistics\(FILE, FILE, kind=act"
    ):
        m.merge(m.zipit("a.safetensors", "b.safetensors", statistics=given))
