"""Recipes of methods by their signatures, `info methods NAME --recipe`, and the files in `conf/recipe`."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from mecha_exp.app.config.compose import composer_of
from mecha_exp.app.config.method_recipes import recipe_text, text_of, titled
from mecha_exp.cli import info
from mecha_exp.method_api.registry import all_methods, resolve_method
from mecha_exp.recipe.yaml_reader import TITLE

FILES = sorted((Path(__file__).parents[3] / "conf" / "recipe").glob("*.yaml"))
OTHERWISE = {
    "add_difference": {"clamp_to_ab"},
    "lines": {"alpha"},
    "passthrough": {"alpha", "scale"},
    "ramplus": {"alpha", "limit", "scale"},
    "ramplus_tl": {"alpha", "limit", "scale"},
    "rotate": {"alpha"},
    "ties": {"density", "k"},
}
"""What recipes name otherwise than their method, or leave out, on purpose."""


def read(text: str) -> dict[str, Any]:
    return yaml.safe_load(text)


def calls_one_method(config: dict[str, Any]) -> bool:
    call = config["recipe"]
    nested = any(isinstance(value, dict) and "method" in value for value in call.values())
    return "method" in call and "defaults" not in config and not nested


@pytest.mark.parametrize(
    "path", [p for p in FILES if calls_one_method(read(p.read_text()))], ids=lambda path: path.stem
)
def test_a_recipe_has_the_arguments_of_its_method(path: Path):
    config = read(path.read_text())
    method = resolve_method(config["recipe"]["method"])
    models = {spec.name for spec in method.signature.parameters if spec.is_model}

    expected = read(recipe_text(method))

    apart = OTHERWISE.get(path.stem, set()) | {TITLE}
    assert (config.keys() ^ expected.keys()) <= apart
    assert (config["recipe"].keys() ^ expected["recipe"].keys()) <= apart
    for name in config["recipe"].keys() - models - apart:
        assert config["recipe"][name] == expected["recipe"][name]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_says_more_than_the_signature_of_its_method(path: Path):
    config, made = read(path.read_text()), text_of(path.stem)
    config["recipe"].pop(TITLE, None)

    assert made is None or config != read(made)


def test_the_methods_with_a_title_are_told_without_importing_them():
    assert titled() == [method.identifier for method in all_methods() if method.title]


@pytest.mark.parametrize("name", ["fisher", "iso_c", "stitch", "weighted_sum"])
def test_a_recipe_by_the_name_of_its_method_is_the_file_that_is_printed(name: str, tmp_path: Path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(recipe_text(resolve_method(name)))

    with composer_of(["--config-dir", str(tmp_path)]) as composer:
        own, printed = composer.compose([f"recipe={name}"]), composer.compose(["recipe=mine"])
        options = composer.options("recipe")

    assert {**own, "hydra": None} == {**printed, "hydra": None}
    assert {name, "mine", "ties"} <= options


@pytest.mark.parametrize("method", all_methods(), ids=lambda method: method.identifier)
def test_every_method_has_a_recipe_that_is_valid_yaml(method):
    config = read(recipe_text(method))

    hyperparameters = [spec for spec in method.signature.parameters if not spec.is_model]
    assert config["recipe"]["method"] == method.identifier
    assert len(config) == 1 + len(hyperparameters)


def test_a_recipe_is_printed_for_a_method_by_name(capsys):
    assert info.main(["methods", "slerp", "--recipe"]) == 0

    assert read(capsys.readouterr().out)["recipe"]["method"] == "slerp"


def test_a_recipe_without_a_method_is_an_error(capsys):
    with pytest.raises(SystemExit):
        info.main(["methods", "--recipe"])

    assert "--recipe needs the NAME of a method" in capsys.readouterr().err
