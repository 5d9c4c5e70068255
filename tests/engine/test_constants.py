"""Recipes of values alone, merged over the keys of their model config; arguments as sd-mecha takes them."""

import re
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import mecha_exp as m
from mecha_exp import Parameter, Return, StateDict, merge_method
from mecha_exp.extensions import model_configs

BLOCKS = "sdxl-supermerger_blocks"
T = TypeVar("T")


def over_blocks(kind, value, seen: list[object]):
    """A recipe of a value alone, whose method notes what it receives."""

    @merge_method(register=False)
    def passed(actual: Parameter(kind, model_config=BLOCKS), **kwargs) -> Return(kind, model_config=BLOCKS):
        seen.append(actual)
        return actual

    return passed(value)


def test_a_number_is_a_tensor_at_each_key_of_the_config():
    merged = m.merge(m.weighted_sum(m.literal({"IN00": 1.0, "default": 3.0}, BLOCKS), 5.0, alpha=0.5))

    assert merged.keys() == model_configs.resolve(BLOCKS).keys().keys()
    assert merged["IN00"] == 3 and merged["OUT05"] == 4
    assert merged["IN00"].dtype is torch.float32 and merged["IN00"].shape == ()


def test_a_file_takes_the_numbers(tmp_path: Path):
    seen: list[object] = []
    recipe = over_blocks(Tensor, {"IN00": 1, "IN01": 2.5}, seen)

    m.merge(recipe, tmp_path / "numbers.safetensors", strict_merge_space=None)

    assert load_file(tmp_path / "numbers.safetensors") == {
        "IN00": torch.tensor(1.0),
        "IN01": torch.tensor(2.5),
    }
    assert all(isinstance(value, Tensor) for value in seen)


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (float, 1, 1.0),
        (float, {"IN00": torch.tensor(1.5)}, 1.5),
        (int, 2.0, 2),
        (int, {"IN00": torch.tensor(3)}, 3),
        (str, "word", "word"),
        (str, {"IN00": "word"}, "word"),
        (T, {"IN00": 1}, 1),
        (T, {"IN00": 1.5}, 1.5),
    ],
)
def test_a_method_receives_the_type_that_it_declares(kind: type, value: object, expected: object):
    seen: list[object] = []

    merged = m.merge(over_blocks(kind, value, seen))

    assert merged["IN00"] == expected
    assert seen and all(type(each) is type(expected) and each == expected for each in seen)


@pytest.mark.parametrize("value", [2, {"w": 2}], ids=["a number", "a number by key"])
def test_a_type_variable_leaves_a_number_beside_a_model_as_it_is(value: object):
    seen: list[type] = []

    @merge_method(register=False)
    def scaled(a: Parameter(T), by: Parameter(T, "param"), **kwargs) -> Return(T):
        seen.append(type(by))
        return a * by

    assert m.merge(scaled({"w": torch.arange(3.0)}, value))["w"].tolist() == [0, 2, 4]
    assert set(seen) == {int}


def test_a_dictionary_of_numbers_is_a_state_dict_of_tensors():
    @merge_method(register=False)
    def doubled(a: Parameter(StateDict[Tensor], model_config=BLOCKS), **kwargs) -> Return(
        Tensor, model_config=BLOCKS
    ):
        return a[kwargs["key"]] * 2 if kwargs["key"] in a else m.skip_key(kwargs["key"])

    assert m.merge(doubled({"IN00": 1, "IN01": 2})) == {"IN00": torch.tensor(2.0), "IN01": torch.tensor(4.0)}


def test_words_have_no_place_in_a_file(tmp_path: Path):
    recipe = over_blocks(str, {"IN00": "word"}, [])

    with pytest.raises(m.RecipeError, match="IN00 are words, which a file of tensors does not hold"):
        m.merge(recipe, tmp_path / "words.safetensors", strict_merge_space=None)
    assert not (tmp_path / "words.safetensors").exists()


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (int, 1.5, "expected a whole number, got 1.5"),
        (str, Path("model.safetensors"), "expected a word, got model 'model.safetensors'"),
        (
            Tensor,
            {"IN00": torch.tensor(1.0), "IN01": 2.0},
            "A state dict has tensors alone, and IN01",
        ),
    ],
)
def test_what_does_not_fit_is_an_error_of_types(kind: type, value: object, message: str):
    for error in (m.RecipeError, TypeError):
        with pytest.raises(error, match=re.escape(message)):
            over_blocks(kind, value, [])


def test_a_recipe_of_numbers_without_a_config_has_no_keys():
    with pytest.raises(m.RecipeError, match="reads no model, so there is nothing to merge"):
        m.merge(m.weighted_sum(1.0, 2.0))


def test_a_template_is_still_to_be_filled():
    with pytest.raises(m.RecipeError, match="'x'"):
        m.merge(m.weighted_sum(m.literal({"IN00": 1.0}, BLOCKS), m.parameter("x"), alpha=0.5))


YAML = """
identifier: plain-test
components:
  all:
    x.weight: {shape: [6, 5], dtype: float32}
    x.bias: {shape: [6], dtype: float32, optional: true, aliases: [old.bias]}
  other:
    keys: {y.weight: [2]}
"""


def test_the_yaml_of_sd_mecha_needs_no_word_around_the_keys():
    config = model_configs.from_yaml(YAML)

    infos = config.keys()
    assert list(infos) == ["x.weight", "x.bias", "y.weight"]
    assert infos["x.weight"].shape == (6, 5) and infos["x.bias"].optional
    assert config.resolve_alias("old.bias") == "x.bias"
    assert config.component_of("x.weight") == "all"
    assert model_configs.from_yaml(model_configs.to_yaml(config)).keys() == infos


def test_a_key_without_a_shape_is_still_a_mistake():
    with pytest.raises(m.ConfigError, match=r"components\.all"):
        model_configs.from_yaml(YAML.replace("shape: [6, 5], ", ""))


def test_configs_and_conversions_are_declared_as_in_sd_mecha():
    def config(name: str, **keys: list[int]) -> model_configs.ModelConfig:
        own = {k.replace("_", "."): model_configs.KeyMetadata(v, torch.float32) for k, v in keys.items()}
        made = model_configs.ModelConfigImpl(name, {"component": model_configs.ModelComponent(own)})
        model_configs.register(made)
        return made

    whole, split = config("whole-mecha", key=[2, 2]), config("split-mecha", key_0=[2], key_1=[2])

    @merge_method(is_conversion=True)
    class split_rows:
        @staticmethod
        def map_keys(b):
            b["key.0", "key.1"] = b.keys["key"]

        def __call__(self, a: Parameter(StateDict[Tensor], model_config=whole), **kwargs) -> Return(
            StateDict[Tensor], model_config=split
        ):
            return {"key.0": a["key"][0], "key.1": a["key"][1]}

    @merge_method(is_conversion=True)
    class joined_rows:
        @staticmethod
        def map_keys(b):
            b["key"] = b.keys["key.0", "key.1"]

        def __call__(self, a: Parameter(StateDict[Tensor], model_config=split), **kwargs) -> Return(
            Tensor, model_config=whole
        ):
            return torch.stack([a["key.0"], a["key.1"]])

    value = m.literal({"key": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, config=whole)

    parts = m.merge(m.convert(value, split))
    back = m.merge(m.convert(m.convert(value, split), whole))

    assert parts["key.1"].tolist() == [3.0, 4.0]
    assert back["key"].tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_a_file_of_values_is_written_as_that_of_a_model_is(tmp_path: Path):
    recipe = m.literal({"default": 3.0}, BLOCKS)

    m.merge(recipe, tmp_path / "new folder" / "numbers.safetensors", strict_merge_space=None)
    assert load_file(tmp_path / "new folder" / "numbers.safetensors")["IN00"] == 3
    with pytest.raises(m.CheckpointError, match="new folder cannot be written"):
        m.merge(recipe, tmp_path / "new folder", strict_merge_space=None)
