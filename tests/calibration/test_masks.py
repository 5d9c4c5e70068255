"""Trained masks of task vectors: the authors' formula, resumed, merged, and refused.

The formulas are those of the authors' code, in plain torch.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

import mecha_exp as m
from mecha_exp.calibration import Request, Subject, Training, load_subject, train_mask
from mecha_exp.calibration.seams import calibrate as verb
from mecha_exp.checkpoint import open_stored
from mecha_exp.errors import CheckpointError, ConfigError, EvaluationError, RecipeError
from mecha_exp.evaluators.digits import digits
from mecha_exp.sources.statistics.header import StatisticsHeader, fingerprint

DIGITS = "pkg://mecha_exp.examples.digits/"
Tensors = dict[str, Tensor]


def read(name: str) -> Tensors:
    return load_file(f"{name}.safetensors")


def trained(output: str = "a.mask.safetensors", expert: str = "a", **given: Any) -> Tensors:
    """The mask of an expert for the base `b`, by key."""
    words = {"data": f"{expert}.pt", "module": "net.py:subject", "output": output, "base": "b.safetensors"}
    settings = [f"{name}={value}" for name, value in {**words, **given, "kind": "mask"}.items()]
    assert verb.main([f"{expert}.safetensors", *settings]) == 0
    return {name.removeprefix("mask/"): tensor for name, tensor in load_file(output).items()}


def official(training: Training) -> Tensors:
    """`train_graft` of the authors for the expert `a` and the base `b`, all examples in one batch."""
    spec = importlib.util.spec_from_file_location("net", "net.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    net, data = module.Net(), torch.load("a.pt", weights_only=True)
    expert, base = (read(name) for name in "ab")
    vector = {key: expert[key] - base[key] for key in net.state_dict()}
    sizes = torch.cat([part.abs().flatten() for part in vector.values()])
    least = sizes.topk(int(training.density * len(sizes))).values.min()
    score = {key: torch.where(part.abs() > least, 1.0, -1.0) * training.bias for key, part in vector.items()}
    for _ in range(training.steps):
        weights = {key: base[key] + score[key].sigmoid() * part for key, part in vector.items()}
        leaves = {key: value.requires_grad_() for key, value in weights.items()}
        loss = F.cross_entropy(functional_call(net, leaves, (data["images"],)), data["labels"])
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        for (key, part), gradient in zip(vector.items(), gradients, strict=True):
            change = 0 if gradient is None else gradient * part
            slope = score[key].sigmoid() * (1 - score[key].sigmoid())
            penalty = training.l1 * slope
            if training.variant == "official":  # its `reg_term` is subtracted from what is subtracted
                penalty = -training.l1 * torch.where(score[key] > 0, slope, -slope)
            score[key] = score[key] - training.rate * change * slope - penalty
    return {key: (value > 0).float() for key, value in score.items()}


@pytest.mark.parametrize(("variant", "l1"), [("paper", 0.0), ("paper", 0.2), ("official", 0.2)])
def test_a_mask_is_that_of_the_authors(bench, variant, l1):
    training = Training(density=0.3, bias=2.0, steps=7, rate=20.0, l1=l1, variant=variant)

    made = trained(density=0.3, bias=2, steps=7, rate=20, l1=l1, variant=variant)

    expected = official(training)
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[key], expected[key]) for key in made)
    before = official(Training(density=0.3, bias=2.0, steps=0))
    changes = torch.cat([(made[key] - before[key]).flatten() for key in made])
    assert set(changes.tolist()) >= {0.0, 1.0, -1.0}  # entries come, go and stay


def test_the_penalty_of_the_paper_makes_masks_smaller(bench):
    masks = [trained(density=0.3, bias=2, rate=20, l1=l1) for l1 in (0, 2)]

    free, penalised = (sum(float(part.sum()) for part in mask.values()) for mask in masks)
    assert 0 < penalised < free


def test_a_trained_mask_keeps_more_of_its_task_than_the_largest_entries(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    base, expert = f"{DIGITS}base.safetensors", f"{DIGITS}expert_0_3.safetensors"
    words = [f"base={base}", "module=digits", "data=0_3", "kind=mask", "count=64", "rate=1e5"]

    assert verb.main([expert, *words, "output=a.mask.safetensors"]) == 0

    mask = load_file("a.mask.safetensors").values()
    share = sum(float(part.sum()) for part in mask) / sum(part.numel() for part in mask)
    said = capsys.readouterr().out
    assert f"the mask has {100 * share:.3g} % of the entries" in said and "warning: only 64" in said
    recipes = [
        m.stitch(base, expert, statistics=m.statistics("a.mask.safetensors", kind="mask")),
        m.localize_and_stitch(base, expert, density=share),
    ]
    learned, dataless = (digits(m.merge(r), split="test").values["0_3"].mean() for r in recipes)
    assert share < 0.03 and learned > dataless + 0.05  # seen: 0.915 and 0.803


def test_stitched_entries_are_the_mean_of_the_task_vectors_that_have_them(bench):
    other = {key: torch.randn(t.shape) if t.is_floating_point() else t for key, t in read("a").items()}
    save_file(other, "c.safetensors")
    torch.save(torch.load("a.pt", weights_only=True), "c.pt")
    masks = [trained(f"{name}.mask.safetensors", name, density=0.6, bias=2, rate=20, l1=0.2) for name in "ac"]
    node = m.stitch(
        "b.safetensors", "a.safetensors", "c.safetensors", scale=0.7,
        statistics=m.statistics("a.mask.safetensors", "c.mask.safetensors", kind="mask"),
    )  # fmt: skip
    schedules = [m.EngineOptions(workers=1, fuse="never"), m.EngineOptions(workers=3, tile_size=32)]

    made, again = (m.merge(node, options=options) for options in schedules)

    base, *experts = (read(name) for name in "bac")
    assert {0.0, 1.0, 2.0} == set(sum(mask["conv.weight"] for mask in masks).flatten().tolist())
    for key in masks[0]:
        count = sum(mask[key] for mask in masks)
        share = count.reciprocal().masked_fill(count == 0, 0)  # `reciprocal_with_zero` of the authors
        total = sum(
            mask[key] * share * (expert[key] - base[key]) for mask, expert in zip(masks, experts, strict=True)
        )
        torch.testing.assert_close(made[key], base[key] + 0.7 * total)
        assert torch.equal(made[key], again[key])


def test_keys_without_a_mask_stay_the_bases_and_are_counted(bench, caplog):
    for name in "ab":
        save_file(
            {**read(name), "more": torch.full((3,), ord(name) * 1.0)},
            f"{name}.safetensors",
        )
    trained(density=0.5)

    made = m.merge(
        m.stitch("b.safetensors", "a.safetensors", statistics=m.statistics("a.mask.safetensors", kind="mask"))
    )

    assert torch.equal(made["more"], read("b")["more"])
    assert "a.mask.safetensors: 1 of 7 keys have no mask and stay the base's: more" in caplog.text


class Stopped(BaseException):
    """Stands for a kill."""


@pytest.mark.parametrize("stop", [5, 30, 75])
def test_an_interrupted_training_goes_on_after_its_last_step(bench, stop):
    whole = trained(density=0.3, bias=2, rate=20)
    left: list[int] = []

    def run(output: str, limit: float) -> None:
        with open_stored(Path("a.safetensors")) as stored, open_stored(Path("b.safetensors")) as base:
            subject = load_subject(stored, "a.pt", "net.py:subject")
            logits, seen = subject.logits, []

            def look(example: Any) -> Tensor:
                seen.append(example)
                if len(seen) > limit:
                    raise Stopped
                return logits(example)

            watched = Subject(subject.module, subject.examples, look, subject.labels)
            try:
                train_mask(
                    watched, stored, base, Training(0.3, 2.0, rate=20.0), Request(("mask",)), Path(output)
                )
            finally:
                left.append(len(seen))

    with pytest.raises(Stopped):
        run("s.safetensors", stop)
    run("s.safetensors", float("inf"))

    assert left[1] == 300 - stop // 30 * 30  # ten steps of 30 examples
    again = load_file("s.safetensors")
    assert all(torch.equal(again[f"mask/{key}"], value) for key, value in whole.items())


def test_the_header_pins_base_and_training(bench):
    trained(density=0.3, count=20)

    with open_stored(Path("a.mask.safetensors")) as stored:
        header = StatisticsHeader.of(stored)
    with open_stored(Path("b.safetensors")) as base:
        assert header.settings["base_fingerprint"] == fingerprint(base)
    assert (header.kinds, header.labels, header.count) == (("mask",), "true", 20)
    assert header.settings["density"] == 0.3 and header.settings["variant"] == "paper"
    assert header.unmeasured["mask"] == {"steps": ("I64", [])}


def test_an_empty_mask_is_worth_a_warning(bench, capsys):
    trained(rate=1e-9)

    assert "warning: the mask is empty; raise rate or density, or lower l1" in capsys.readouterr().out


def test_a_gradient_that_is_not_finite_is_an_error_that_names_key_and_example(bench):
    weight = torch.nn.Parameter(torch.ones(2))
    module = torch.nn.ParameterDict({"w": weight}).eval()
    save_file({"w": torch.ones(2)}, "one.safetensors")
    save_file({"w": torch.zeros(2)}, "zero.safetensors")
    subject = Subject(module, [0.0, 1.0], lambda x: (weight * x).sqrt()[None], lambda x: torch.tensor([0]))

    with (
        open_stored(Path("one.safetensors")) as stored,
        open_stored(Path("zero.safetensors")) as base,
        pytest.raises(EvaluationError, match="the gradient of 'w' is NaN or infinite at example 0"),
    ):
        train_mask(subject, stored, base, Training(), Request(("mask",)), Path("s.safetensors"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"base": None}, r"base=\.\.\. is missing: a mask is of the task vector from a base"),
        ({"kind": "mask,fisher"}, "kind=mask: a mask is trained by itself"),
        ({"kind": "fisher"}, "base: is a setting of kind=mask"),
        ({"kind": "fisher", "base": None, "positions": "3"}, "positions: is a setting of kind=activations"),
        ({"labels": "sampled"}, "labels: is not a setting of kind=mask"),
        ({"positions": "3"}, "positions: is not a setting of kind=mask"),
        ({"module": "net.py:without_labels"}, "kind=mask: the data have no labels, and a mask is trained on"),
        ({"density": "2"}, r"density: expected a number from 0 to 1, got 2\.0"),
        ({"rate": "0"}, r"rate: expected a number above 0, got 0\.0"),
        ({"rate": "fast"}, "rate: expected a number, got fast"),
        ({"l1": "-1"}, r"l1: expected 0 or more, got -1\.0"),
        ({"variant": "offical"}, "variant: expected paper or official, got offical"),
        ({"base": "c.safetensors"}, r"base: c\.safetensors has no 'head\.bias' of shape \[3\]"),
        ({"output": "b.safetensors"}, r"output=b\.safetensors is an input"),
    ],
)
def test_what_cannot_be_trained_is_refused(bench, words, message):
    save_file({key: t for key, t in read("b").items() if key != "head.bias"}, "c.safetensors")
    given = {"data": "a.pt", "module": "net.py:subject", "output": "s.safetensors", "base": "b.safetensors"}
    given = {**given, "kind": "mask", **words}

    with pytest.raises(ConfigError, match=message):
        verb.main(["a.safetensors", *(f"{k}={v}" for k, v in given.items() if v is not None)])
    assert not Path("s.safetensors").exists()


def test_a_training_out_of_range_is_refused_in_python_with_all_that_is_wrong():
    with pytest.raises(ConfigError) as raised:
        Training(variant="offical", density=1.5, bias=0, rate=float("nan"), l1=-1, steps=-3)

    for text in (
        "variant: expected paper or official, got offical",
        "density: expected a number from 0 to 1, got 1.5",
        "bias: expected a number above 0, got 0",
        "rate: expected a number above 0, got nan",
        "l1: expected 0 or more, got -1",
        "steps: expected 0 or more, got -3",
    ):
        assert text in str(raised.value)


def test_a_base_that_is_computed_is_refused(bench):
    trained(density=0.3)
    base = m.n_average("a.safetensors", "b.safetensors")

    with pytest.raises(
        RecipeError, match=r"stitch: the base is .*Merge to a file first, and measure with that"
    ):
        m.merge(m.stitch(base, "a.safetensors", statistics=m.statistics("a.mask.safetensors", kind="mask")))


def test_a_mask_of_another_model_or_base_is_an_error_that_names_both(bench):
    trained(density=0.3)
    masks = m.statistics("a.mask.safetensors", kind="mask")

    with pytest.raises(RecipeError, match=r"holds statistics of a\.safetensors, whose content is not"):
        m.merge(m.stitch("b.safetensors", "b.safetensors", statistics=masks))
    with pytest.raises(
        RecipeError, match=r"belongs to a task vector from b\.safetensors, whose.*the base, a\.safetensors"
    ):
        m.merge(m.stitch("a.safetensors", "a.safetensors", statistics=masks))
    with pytest.raises(CheckpointError, match=r"holds mask of a\.safetensors, and not fisher"):
        m.merge(m.fisher("a.safetensors", statistics=m.statistics("a.mask.safetensors", kind="fisher")))
    with pytest.raises(RecipeError, match="stitch: it needs the statistics mask, got fisher"):
        verb.main(
            ["a.safetensors", "data=a.pt", "module=net.py:subject", "kind=fisher", "output=f.safetensors"]
        )
        fisher = m.statistics("f.safetensors", kind="fisher")
        m.merge(m.stitch("b.safetensors", "a.safetensors", statistics=fisher))
