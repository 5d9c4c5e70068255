"""Evaluators are found by name, and say when they cannot measure a model."""

import pytest

from mecha_exp import ConfigError, evaluator
from mecha_exp.evaluation import find_evaluator
from mecha_exp.evaluation.digits import _shapes as digits_shapes

OTHER = {"w": (2, 3)}


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
    @evaluator("test_norm", metric="norm", direction="minimize")
    def norm(state_dict):
        return {"norm": float(sum(t.norm() for t in state_dict.values()))}

    found = find_evaluator("test_norm", OTHER)

    assert found is not None
    assert found.score is norm
    assert found.direction == "minimize"


def test_a_direction_that_is_none():
    with pytest.raises(ConfigError, match=r"unknown direction 'maximise'\. Did you mean 'maximize'"):
        evaluator("x", metric="m", direction="maximise")
