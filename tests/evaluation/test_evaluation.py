"""Evaluators are found by name, get their parameters from the configuration, and are ended when they hang."""

import math
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from mecha_exp import ConfigError, EvaluationError, evaluator
from mecha_exp.evaluation import Evaluation, all_evaluators, find_evaluator, nan_warning, read_scoring
from mecha_exp.evaluation.isolation.process import evaluation_process
from mecha_exp.evaluators.digits import _shapes as digits_shapes
from mecha_exp.plugins import load_plugins

OTHER = {"w": (2, 3)}
MODEL = {"w": torch.tensor([[3.0, 4.0]]), "half": torch.ones(3, dtype=torch.bfloat16), "none": torch.zeros(0)}

PLUGIN = """
import time
from mecha_exp import evaluator

@evaluator("test_plugin_sum", metric="sum")
def total(state_dict, *, times: float = 1.0):
    print("an evaluator may print")
    return {"sum": times * sum(float(t.sum()) for t in state_dict.values())}

@evaluator("test_plugin_hangs", metric="x")
def hangs(state_dict):
    time.sleep(1000)

@evaluator("test_plugin_crashes", metric="x")
def crashes(state_dict):
    import os
    os._exit(7)
"""


@evaluator("test_norm", metric="norm", direction="minimize", version=3)
def norm(state_dict, *, order: int = 2, scale: float = 1.0, name_of_it: str = "norm"):
    return {name_of_it: scale * max(float(t.float().norm(order)) for t in state_dict.values() if t.numel())}


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plugin") / "plugin.py"
    path.write_text(PLUGIN)
    load_plugins([str(path)])
    return str(path)


def test_no_evaluator_is_no_evaluator():
    assert find_evaluator(None, OTHER) is None


def test_auto_takes_the_built_in_one_that_fits():
    found = find_evaluator("auto", digits_shapes())

    assert found is not None
    assert (found.name, found.metric, found.direction) == ("digits", "accuracy", "maximize")
    assert find_evaluator("auto", OTHER) is None


def test_one_that_is_named_must_fit():
    with pytest.raises(ConfigError, match="evaluator=digits cannot measure this model"):
        find_evaluator("digits", OTHER)


def test_an_unknown_name_is_met_with_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown evaluator 'digts'. Did you mean 'digits'\?"):
        find_evaluator("digts", OTHER)


def test_a_function_becomes_an_evaluator():
    found = all_evaluators()["test_norm"]

    assert found.score is norm
    assert found.direction == "minimize"


def test_a_direction_that_is_none():
    with pytest.raises(ConfigError, match=r"unknown direction 'maximise'\. Did you mean 'maximize'"):
        evaluator("x", metric="m", direction="maximise")


def test_a_parameter_must_not_be_called_like_a_setting():
    with pytest.raises(ConfigError, match="call the parameter 'timeout' something else"):

        @evaluator("x", metric="m")
        def _(state_dict, timeout=3):
            return {"m": 1.0}


def test_parameters_come_from_the_configuration_and_have_their_defaults():
    scoring = read_scoring({"name": "test_norm", "order": 1, "weight_stats": True}, OTHER)

    assert scoring.measure(MODEL) == {"norm": 7.0}
    assert (scoring.metric, scoring.direction) == ("norm", "minimize")


def test_a_measurement_is_found_by_the_evaluators_name_version_and_parameters():
    def key(**settings):
        return read_scoring({"name": "test_norm", **settings}, OTHER).evaluations[0].key

    assert re.fullmatch(r"test_norm-[0-9a-f]{16}", key())
    assert key() == key(order=2) != key(order=1)
    newer = replace(all_evaluators()["test_norm"], version=4)
    assert key() != Evaluation(newer, newer.bind({})).key


def test_everything_wrong_with_the_parameters_is_said_at_once():
    with pytest.raises(ConfigError) as error:
        read_scoring({"name": "test_norm", "ordr": 1, "scale": "x", "timeout": -1, "direction": "up"}, OTHER)

    for words in (
        "evaluator.ordr: the evaluator 'test_norm' has no such parameter. Did you mean 'order'?",
        "evaluator.scale: expected a number, got 'x'",
        "evaluator.timeout: expected seconds above 0, or null for any time, got -1",
        "evaluator.direction: unknown direction 'up'. Known: maximize, minimize.",
    ):
        assert words in str(error.value)


def test_a_parameter_that_no_evaluator_takes():
    with pytest.raises(ConfigError, match=r"evaluator.timout: no evaluator takes it. Did you mean 'timeout'"):
        read_scoring({"name": None, "timout": 3}, OTHER)


def test_several_evaluators_run_and_the_first_one_has_the_main_metric():
    also = ["test_norm", {"name": "test_norm", "order": 1, "name_of_it": "norm"}]

    scoring = read_scoring({"name": "test_norm", "scale": 2.0, "also": also[1:]}, OTHER)

    assert scoring.measure(MODEL) == {"norm": 10.0, "test_norm/norm": 7.0}
    assert len({e.key for e in scoring.evaluations}) == 2
    assert list(scoring.directions) == ["norm", "test_norm/norm"]


def test_another_metric_may_be_the_main_one_with_its_direction():
    with pytest.raises(ConfigError, match=r"say whether more of it is better: evaluator.direction"):
        read_scoring({"name": "test_norm", "metric": "other"}, OTHER)

    scoring = read_scoring({"name": "test_norm", "metric": "other", "direction": "maximize"}, OTHER)

    assert (scoring.metric, scoring.direction) == ("other", "maximize")
    assert scoring.directions == {"other": "maximize"}
    with pytest.raises(EvaluationError, match=r"evaluator.metric=other: no evaluator returned it"):
        nan_warning(scoring, scoring.measure(MODEL))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "must return a dictionary of numbers, or Outcomes, not list"),
        ({"m": 1.0, "a/": 2.0}, "returned a number named 'a/', which has an empty part beside a '/'"),
        ({"m": 1.0, "a//b": 2.0}, "which has an empty part"),
        ({"m": 1.0, "../b": 2.0}, "which has a part of dots alone"),
        ({"m": 1.0, "a\x1b[2Jb": 2.0}, "which has a character that cannot be printed"),
        ({"m": "high"}, "returned 'high' for 'm', which is not a number"),
        ({"n": 1.0}, "did not return its main metric 'm', only n"),
    ],
)
def test_what_is_no_dictionary_of_numbers_is_refused(returned, message):
    evaluator("test_returns", metric="m")(lambda state_dict: returned)

    with pytest.raises(EvaluationError, match=message):
        read_scoring({"name": "test_returns"}, OTHER).measure(MODEL)


def test_one_that_raises_is_named_with_its_error_first():
    @evaluator("test_raises", metric="m")
    def broken(state_dict):
        return {"m": state_dict["missing"]}

    with pytest.raises(
        EvaluationError, match=r"(?s)^the evaluator 'test_raises' failed: KeyError: 'missing'.*line"
    ):
        read_scoring({"name": "test_raises"}, OTHER).measure(MODEL)


def test_a_nan_is_no_error_but_said():
    evaluator("test_nan", metric="m")(lambda state_dict: {"m": math.nan})
    scoring = read_scoring({"name": "test_nan"}, OTHER)

    assert "m is nan: this point is listed last" in str(nan_warning(scoring, scoring.measure(MODEL)))


def test_with_a_timeout_models_in_memory_and_in_files_are_measured_in_a_process_of_their_own(
    plugin, tmp_path
):
    scoring = read_scoring({"name": "test_plugin_sum", "timeout": 60, "times": 2.0}, OTHER, [plugin])
    save_file(MODEL, tmp_path / "m.safetensors")

    assert scoring.measure(MODEL) == {"sum": 20.0}
    assert scoring.measure(tmp_path / "m.safetensors") == {"sum": 20.0}


def test_one_that_hangs_is_ended_and_the_next_model_is_measured(plugin):
    hangs = read_scoring({"name": "test_plugin_hangs", "timeout": 0.2}, OTHER, [plugin])
    works = read_scoring({"name": "test_plugin_sum", "timeout": 60}, OTHER, [plugin])

    with pytest.raises(EvaluationError, match=r"'test_plugin_hangs' was not done after 0.2 s and was ended"):
        hangs.measure(MODEL)
    assert works.measure(MODEL) == {"sum": 10.0}


def test_one_that_ends_its_process_and_one_that_the_process_cannot_find(plugin):
    crashes = read_scoring({"name": "test_plugin_crashes", "timeout": 60}, OTHER, [plugin])
    local = read_scoring({"name": "test_norm", "timeout": 60}, OTHER, [plugin])

    with pytest.raises(EvaluationError, match="'test_plugin_crashes' ended its process"):
        crashes.measure(MODEL)
    with pytest.raises(EvaluationError, match="'test_norm' is defined in no plugin"):
        local.measure(MODEL)
    evaluation_process((plugin,)).close()
