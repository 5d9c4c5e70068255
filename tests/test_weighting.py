"""Hyperparameters with a value for each key."""

import pytest

from mecha_exp.errors import RecipeError
from mecha_exp.weighting import ByKey, by_key


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("conv1.weight", 0.3),  # a name stands for its sub-tree
        ("conv1", 0.3),
        ("conv10.weight", 0.1),  # which is not a prefix
        ("conv2.weight", 0.1),
        ("conv2.bias", 0.2),  # more characters that are no wildcards
        ("fc.weight", 0.9),
    ],
)
def test_of_several_patterns_the_most_specific_one_decides(key, expected):
    value = by_key({"conv*": 0.1, "conv1": 0.3, "conv*.bias": 0.2, "default": 0.9})

    assert value(key) == expected


def test_patterns_that_are_equally_specific_and_disagree_are_an_error():
    value = by_key({"*.weight": 0.1, "layer.*": 0.2, "default": 0})
    agreeing = by_key({"*.weight": 0.1, "weight.*": 0.1})

    with pytest.raises(RecipeError) as error:
        by_key({"*weight": 0.1, "layer.*": 0.2, "default": 0})("layer.weight")

    assert value("layer.weight") == 0.1  # `.weight` has one character more than `layer.`
    assert agreeing("weight.weight") == 0.1
    assert "'*weight' = 0.1" in str(error.value)
    assert "'layer.*' = 0.2" in str(error.value)
    assert "Make one of them more specific" in str(error.value)


def test_a_key_without_a_value_is_an_error_that_offers_a_default():
    with pytest.raises(RecipeError, match=r"matches the key 'fc.weight'.*Add a 'default'"):
        by_key({"conv1": 0.3})("fc.weight")


def test_patterns_that_match_nothing_are_found():
    value = by_key({"conv1": 1, "fc?.bias": 2, "covn2": 3, "default": 0})

    assert value.unmatched(["conv1.weight", "fc1.bias"]) == ["covn2"]


def test_a_preset_of_blocks_stands_beside_a_default():
    assert by_key({"blocks": {"conv1": 0.3}, "default": 0.5}) == ByKey((("conv1", 0.3),), 0.5)
    assert by_key({"blocks": {"conv1": 0.3, "default": 0.1}, "default": 0.5}).default == 0.1
    assert by_key({"blocks": None, "default": 0.5}) == by_key({"default": 0.5}) == 0.5
    assert by_key({"blocks": 0.3})("blocks.0") == 0.3  # a layer may be called so
