"""Evaluators that misbehave: each is a clear error, and the next one measures the same model."""

import math
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from mecha_exp import ConfigError, Context, EvaluationError, Measurement, Outcomes, evaluator
from mecha_exp.evaluation import read_scoring
from mecha_exp.evaluation.normalisation import find_experts, normalised
from mecha_exp.plugins import load_plugins
from mecha_exp.terminal.console import printable

ANY = {"w": (2, 3)}

PLUGIN = """
import os, subprocess, sys, time
import mecha_exp
from mecha_exp import Context, Outcomes, evaluator

@evaluator("test_forks", metric="m")
def forks(state_dict):
    if os.fork() == 0:
        time.sleep(1000)
    time.sleep(1000)

@evaluator("test_starts", metric="m")
def starts(state_dict):
    subprocess.run([sys.executable, "-c", "import time; time.sleep(1000)"])

@evaluator("test_leaves_a_child", metric="m")
def leaves(state_dict):
    if os.fork() == 0:
        time.sleep(1000)
    return {"m": 1.0}

@evaluator("test_isolated_outcomes", metric="m", splits=("validation", "test"))
def outcomes(state_dict, *, split: str, context: Context):
    return Outcomes({"a": [1, 0], context.name or "b": [1]}, metrics={"is_test": split == "test"})
"""


@pytest.fixture
def model() -> dict[str, torch.Tensor]:
    return {"w": torch.ones(2, 3), "half": torch.ones(3, dtype=torch.bfloat16)}


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plugin") / "plugin.py"
    path.write_text(PLUGIN)
    load_plugins([str(path)])
    return str(path)


def measure(score, model, **declared):
    evaluator("test_measured", metric="m", **declared)(score)
    return read_scoring({"name": "test_measured"}, ANY).measure(model)


def test_outcomes_of_further_metrics_are_those_of_their_numbers(model):
    kl, hits = Outcomes({"a": [0.5, 1.5]}), Outcomes({"a": [1, 0]})

    def score(further, **numbers):
        return lambda state_dict: Measurement(numbers, hits, further=further)

    assert measure(score({"kl": kl}, kl=1.0), model) == {"m": 0.5, "m/a": 0.5, "kl": 1.0}
    assert measure(score({"kl": Outcomes({"a": [math.nan]})}, kl=math.nan), model)["m"] == 0.5
    for further, numbers, message in (
        ({"kl": kl}, {}, "'test_measured' returned outcomes of 'kl' and no number of that name"),
        ({"kl": kl}, {"kl": 2.0}, "'test_measured' returned 2 for 'kl', and its outcomes have the mean 1"),
        ({"m": kl}, {}, "'test_measured' returned outcomes of 'm', its main metric, as further ones"),
    ):
        with pytest.raises(EvaluationError, match=message):
            measure(score(further, **numbers), model)


@pytest.mark.parametrize("code", [0, 3, None, "done"])
def test_one_that_exits_fails_its_point(model, code):
    with pytest.raises(EvaluationError, match=rf"'test_measured' failed: it called sys\.exit\({code}\)"):
        measure(lambda state_dict: sys.exit(code), model)


def test_the_current_folder_is_put_back(model, tmp_path, caplog):
    before = os.getcwd()  # noqa: PTH109

    def leaves(state_dict):
        os.chdir(tmp_path)
        return {"m": 1.0}

    assert measure(leaves, model) == {"m": 1.0}
    assert os.getcwd() == before  # noqa: PTH109
    assert "the evaluator 'test_measured' changed the current folder" in caplog.text


def test_the_folder_is_put_back_if_it_fails_or_is_gone(model, tmp_path):
    before = Path.cwd()
    gone = tmp_path / "gone"
    gone.mkdir()

    def leaves(state_dict):
        os.chdir(gone)
        gone.rmdir()
        raise RuntimeError("lost")

    with pytest.raises(EvaluationError, match="lost"):
        measure(leaves, model)
    assert Path.cwd() == before


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors["w"].mul_(2),
        lambda tensors: tensors["w"][0].fill_(0),
        lambda tensors: tensors["w"].view(-1).copy_(torch.zeros(6)),
        lambda tensors: tensors["w"].detach().zero_(),
        lambda tensors: torch.nn.init.zeros_(tensors["w"]),
    ],
)
def test_one_that_changes_a_tensor_in_place_is_refused(model, change):
    def changes(state_dict):
        change(state_dict)
        return {"m": 1.0}

    with pytest.raises(EvaluationError, match=r"changed tensors of the model in place: w\. .*tensor\.clone"):
        measure(changes, model)


def test_one_may_change_its_dictionary(model):
    def pops(state_dict):
        state_dict.pop("half")
        state_dict["w"] = state_dict["w"] * 2
        return {"m": float(len(state_dict))}

    assert measure(pops, model) == {"m": 1.0}
    assert list(model) == ["w", "half"]
    assert model["w"].eq(1).all()


def test_outcomes_become_numbers(model):
    outcomes = Outcomes({"a": [1, 0], "b": [1, 1]}, metrics={"loss": 0.5})

    assert measure(lambda state_dict: outcomes, model) == {"m": 0.75, "m/a": 0.5, "m/b": 1.0, "loss": 0.5}


@pytest.mark.parametrize(
    ("outcomes", "message"),
    [
        (lambda: Outcomes({"a": [1]}, metrics={"m/a": 1}), "returned 'm/a' as a metric and as outcomes"),
        (lambda: Outcomes({"a": [1]}, metrics={"m": 1}), "returned 'm' as a metric and as outcomes"),
        (lambda: Outcomes({"normalised": [1]}), "call the task 'normalised' something else"),
        (lambda: Outcomes({"a/": [1]}), "returned a number named 'm/a/', which has an empty part"),
        (lambda: Outcomes({"a": []}), "'test_measured': outcomes: the task 'a' needs one value an example"),
    ],
)
def test_outcomes_whose_names_clash_are_refused(model, outcomes, message):
    with pytest.raises(EvaluationError, match=message):
        measure(lambda state_dict: outcomes(), model)


def test_an_error_with_escape_sequences_is_written_out():
    assert printable("\x1b[2J\x1b[31mred\r\nnext\tcell é") == "\\x1b[2J\\x1b[31mred\\r\nnext\tcell é"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
@pytest.mark.parametrize("name", ["test_forks", "test_starts"])
def test_one_that_hangs_in_a_child_is_ended(model, plugin, name):
    read_scoring({"name": "test_isolated_outcomes", "timeout": 60}, ANY, [plugin]).measure(model)
    started = time.monotonic()

    with pytest.raises(EvaluationError, match=r"was not done after 1 s and was ended"):
        read_scoring({"name": name, "timeout": 1}, ANY, [plugin]).measure(model)

    assert time.monotonic() - started < 30


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_a_child_that_is_left_behind_does_not_hold_the_answer_back(model, plugin):
    scoring = read_scoring({"name": "test_leaves_a_child", "timeout": 60}, ANY, [plugin])

    assert scoring.measure(model) == {"m": 1.0}


def test_a_process_of_its_own_gets_the_split_and_the_context_and_returns_outcomes(model, plugin):
    scoring = read_scoring({"name": "test_isolated_outcomes", "timeout": 60}, ANY, [plugin])
    evaluation = scoring.evaluations[0].on("test")

    measurement = scoring.measure_one(evaluation, model, Context("mine"))

    assert measurement.outcomes is not None
    assert {task: v.tolist() for task, v in measurement.outcomes.values.items()} == {"a": [1, 0], "mine": [1]}
    assert measurement.metrics == {"m": 0.75, "m/a": 0.5, "m/mine": 1.0, "is_test": 1.0}


def test_splits_need_the_parameter():
    with pytest.raises(ConfigError, match="its function needs a parameter `split: str`"):
        evaluator("x", metric="m", splits=("validation", "test"))(lambda state_dict: {"m": 1.0})


@pytest.mark.parametrize("splits", [("a", "a"), ("a/b",), ("",)])
def test_splits_are_different_words(splits):
    with pytest.raises(ConfigError, match="expected different words without '/'"):
        evaluator("x", metric="m", splits=splits)(lambda state_dict, split: {"m": 1.0})


@pytest.mark.parametrize(
    ("splits", "chosen", "reported"),
    [
        (("validation", "test"), "validation", "test"),
        (("test", "validation"), "validation", "test"),
        (("train", "validation", "test"), "validation", "test"),
        (("dev", "held_out"), "dev", "held_out"),
        (("validation",), "validation", None),
    ],
)
def test_points_are_chosen_on_validation_and_reported_on_test(splits, chosen, reported):
    evaluator("test_split", metric="m", splits=splits)(lambda state_dict, split: {"m": 1.0})
    scoring = read_scoring({"name": "test_split"}, ANY)

    assert (scoring.selection_split, scoring.report_split) == (chosen, reported)


def test_another_split_of_a_single_run_is_measured_beside_it(model):
    @evaluator("test_split", metric="m", splits=("validation", "test"))
    def split_of(state_dict, *, split: str, times: int = 1):
        return {"m": times * len(split)}

    assert read_scoring({"name": "test_split", "split": "test"}, ANY).measure(model) == {
        "m": 10.0,
        "test/m": 4.0,
    }
    assert read_scoring({"name": "test_split", "split": "validation"}, ANY).measure(model) == {"m": 10.0}
    with pytest.raises(ConfigError, match=r"evaluator\.split=tset: .*Did you mean 'test'"):
        read_scoring({"name": "test_split", "split": "tset"}, ANY)


def test_split_is_a_parameter_like_any_other_without_splits(model):
    evaluator("test_own", metric="m")(lambda state_dict, split="ab": {"m": len(split)})

    assert read_scoring({"name": "test_own", "split": None}, ANY).measure(model) == {"m": 2.0}
    assert read_scoring({"name": "test_own", "split": "abc"}, ANY).measure(model) == {"m": 3.0}


def test_a_split_that_nothing_takes_is_an_error():
    evaluator("test_none", metric="m")(lambda state_dict: {"m": 1.0})

    with pytest.raises(ConfigError, match=r"evaluator\.split=test: .*'test_none' declares no splits"):
        read_scoring({"name": "test_none", "split": "test"}, ANY)


def test_the_same_evaluator_twice_needs_names(model):
    evaluator("test_twice", metric="m")(lambda state_dict, images=1: {"m": images})
    settings = {"name": "test_twice", "also": [{"name": "test_twice", "images": n} for n in (2, 3)]}

    with pytest.raises(ConfigError, match=r"'test_twice' is there twice.*Name them with `as`"):
        read_scoring(settings, ANY)

    settings["also"][1]["as"] = "three"
    assert read_scoring(settings, ANY).measure(model) == {"m": 1, "test_twice/m": 2, "three/m": 3}


@pytest.mark.parametrize("label", ["a/", "", "..", "a\n"])
def test_a_name_that_makes_no_metric_is_refused(label):
    evaluator("test_twice", metric="m")(lambda state_dict, images=1: {"m": images})

    with pytest.raises(ConfigError, match=r"evaluator\.also: as: "):
        read_scoring({"name": "test_twice", "also": [{"name": "test_twice", "as": label}]}, ANY)


@pytest.mark.parametrize("metric", ["a/", "", "../a", "a//b"])
def test_a_metric_that_makes_no_name_is_refused_when_it_is_declared(metric):
    with pytest.raises(ConfigError, match=r"x: the metric '"):
        evaluator("x", metric=metric)


BASE = Outcomes({"a": [1, 0, 1, 0] * 10, "b": [1, 1, 1, 0] * 10})
EXPERT_A = Outcomes({"a": [1] * 40, "b": [0] * 40})
EXPERT_B = Outcomes({"a": [0] * 40, "b": [1, 1, 1, 1, 0] * 8})


def test_normalised_scores_are_shares_of_the_experts():
    experts = find_experts({"base": BASE, "x": EXPERT_A, "y": EXPERT_B}, "base", {}, minimized=False)

    assert experts == {"a": EXPERT_A, "b": EXPERT_B}
    assert normalised(BASE, experts) == pytest.approx((0.5 / 1 + 0.75 / 0.8) / 2)
    assert normalised(EXPERT_A, experts) == 0.5


def test_less_is_better_where_the_metric_is_minimised():
    experts = find_experts({"x": EXPERT_A, "y": EXPERT_B}, None, {}, minimized=True)

    assert experts == {"a": EXPERT_B, "b": EXPERT_A}


def test_no_expert_is_guessed_where_none_leads_by_far():
    nearly = Outcomes({"a": [1] * 39 + [0], "b": [0] * 40})

    assert find_experts({"x": EXPERT_A, "z": nearly}, None, {}, minimized=False).keys() == set()
    assert normalised(BASE, {"a": EXPERT_A}) is None


def test_the_base_is_no_expert_and_nothing_worse_than_it_is():
    worse = Outcomes({"a": [1, 0, 0, 0] * 10, "b": [1] * 40})

    assert find_experts({"base": BASE, "x": worse}, "base", {}, minimized=False) == {"b": worse}
    assert find_experts({"base": BASE}, "base", {}, minimized=False) == {}


def test_an_expert_may_be_named():
    experts = find_experts({"x": EXPERT_A, "y": EXPERT_B}, None, {"a": EXPERT_B}, minimized=False)

    assert experts["a"] is EXPERT_B
    assert normalised(BASE, experts) is None  # the expert scores 0
    with pytest.raises(EvaluationError, match=r"models\.expert_of\.c: the evaluator measures no such task"):
        find_experts({"x": EXPERT_A}, None, {"c": EXPERT_A}, minimized=False)


def test_nan_makes_no_normalised_score():
    broken = Outcomes({"a": [math.nan] * 40, "b": [1] * 40})

    assert normalised(BASE, {"a": broken, "b": EXPERT_B}) is None
