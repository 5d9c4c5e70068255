"""The recipe and the settings of the engine that the arguments of verbs name."""

from __future__ import annotations

import argparse
from typing import Any

from mecha_exp.cli.arguments import OFFLINE
from mecha_exp.engine.options import SETTINGS, EngineOptions
from mecha_exp.errors import ConfigError, Problems, RecipeError, brief, did_you_mean, prefixed
from mecha_exp.graph.nodes import Node
from mecha_exp.numbers import number_in
from mecha_exp.plugins import load_plugins
from mecha_exp.recipe import deserialize_path
from mecha_exp.recipe.files import fill_from_files, find_recipe
from mecha_exp.recipe.foreign import ForeignRecipe, RecipeReader, reader_of_file
from mecha_exp.recipe.text_writer import CONSTANTS

_ENGINE = "engine."
_NUMBERS = ("across", "task")


def engine_options(options: argparse.Namespace, **defaults: Any) -> EngineOptions:
    """The engine's options, with the settings and the folders of models that the arguments name.

    Raises:
        ConfigError: a word of another form, an unknown name, or an invalid value.
    """
    settings: dict[str, Any] = {**defaults}
    problems = Problems()
    known = [f"{_ENGINE}{name}" for name in (*SETTINGS, *_NUMBERS, "cluster")]
    for word in options.setting:
        if word in OFFLINE:
            continue
        name, separator, value = word.partition("=")
        if not separator or name not in known:
            problems.add(
                f"{brief(word)} is not a setting such as engine.on_missing=skip.{did_you_mean(name, known)}"
            )
        setting = name.removeprefix(_ENGINE)
        settings[setting] = int(value) if setting in _NUMBERS and value.isdecimal() else value
    problems.raise_as(ConfigError)
    with prefixed(_ENGINE):
        return EngineOptions(**settings, model_dirs=options.models_dir)


def load_recipe(options: argparse.Namespace) -> Node:
    """The recipe that the arguments name, with its parameters filled.

    Raises:
        RecipeError: all problems of the recipe.
    """
    load_plugins(options.plugin)
    if reader := reader_of_file(options.recipe):
        return load_foreign(options, reader).recipe
    recipe = deserialize_path(find_recipe(options.recipe, options.models_dir))
    return fill_from_files(recipe, _parameters(options), options.models_dir)


def load_foreign(options: argparse.Namespace, reader: RecipeReader) -> ForeignRecipe:
    """The recipe in the form of another tool that the arguments name, with the values that they change.

    Raises:
        MechaError: as its reader raises it.
    """
    path = find_recipe(options.recipe, options.models_dir)
    is_offline = all(OFFLINE.get(word, True) for word in options.setting)
    return reader.read(path, _parameters(options), options.models_dir, is_offline)


def _parameters(options: argparse.Namespace) -> dict[str, Any]:
    """The values that the arguments give to parameters, by name."""
    arguments: dict[str, Any] = {}
    problems = Problems()
    for name, word in options.parameter:
        if name in arguments:
            problems.add(f"the parameter '{name}' is given twice")
        arguments[name] = _value(word)
    problems.raise_as(RecipeError)
    return arguments


def _value(word: str) -> Any:
    """The value of a word of the command line: a number, true, false, null, or else a path."""
    if word in CONSTANTS:
        return CONSTANTS[word]
    number = number_in(word)
    return word if number is None else number
