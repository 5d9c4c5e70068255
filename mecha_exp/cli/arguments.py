"""The arguments that verbs share, and the recipe that they name."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

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
_OFFLINE = {"hub.offline=true": True, "hub.offline=false": False}
"""Words that say whether models in configurations of mergekit must lie on this machine."""


def make_parser(verb: str, summary: str, examples: str) -> argparse.ArgumentParser:
    """The parser of a verb, still without arguments; its examples keep their lines."""
    return argparse.ArgumentParser(
        prog=f"python -m mecha_exp {verb}",
        description=textwrap.fill(summary, max(shutil.get_terminal_size().columns - 2, 20)),
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_recipe(parser: argparse.ArgumentParser, alternatives: str = "") -> None:
    """Add the arguments that name a recipe and fill its parameters.

    Args:
        parser: of the verb.
        alternatives: what else the verb takes instead of a recipe, for the help.
    """
    parser.add_argument(
        "recipe",
        type=Path,
        help="a .mecha file, a merged model, which carries its recipe in its header, or a configuration of "
        "mergekit (.yml)" + alternatives,
    )
    parser.add_argument(
        "-p",
        "--parameter",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "VALUE"),
        help="fill a parameter of the recipe with a model's path, another .mecha file, or a number; in a "
        "configuration of mergekit NAME is a dotted path, as parameters.weight; may be repeated",
    )
    add_models_dir(
        parser,
        "where models and recipes are looked for, after the current folder and before those that the "
        "environment variable MECHA_MODELS_DIR lists; may be repeated",
    )
    add_plugins(parser)


def add_models_dir(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Add the argument that names folders of models, `models_dir`."""
    parser.add_argument("--models-dir", action="append", type=Path, default=[], metavar="DIR", help=meaning)


def add_plugins(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names plugins."""
    parser.add_argument(
        "--plugin",
        action="append",
        default=[],
        metavar="FILE",
        help="a Python file, folder or module that defines merge methods, which is run; may be repeated. "
        "Those in the folder `methods` are found by themselves",
    )


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the words that set what decides a merge, `setting`."""
    parser.add_argument(
        "setting",
        nargs="*",
        default=[],
        metavar="engine.NAME=VALUE",
        help="a setting of the engine, such as engine.on_missing=skip; may be repeated. hub.offline=false "
        "fetches what a configuration of mergekit names",
    )


def add_offline(parser: argparse.ArgumentParser) -> None:
    """Add the word `hub.offline=false` for verbs that have no settings of the engine."""
    parser.add_argument(
        "setting",
        nargs="*",
        default=[],
        type=_offline_word,
        metavar="hub.offline=false",
        help="fetch what a configuration of mergekit names",
    )


def _offline_word(word: str) -> str:
    if word not in _OFFLINE:
        raise argparse.ArgumentTypeError(f"expected hub.offline=false, got {brief(word)}")
    return word


def engine_options(options: argparse.Namespace, **defaults: Any) -> EngineOptions:
    """The engine's options, with the settings and the folders of models that the arguments name.

    Raises:
        ConfigError: a word of another form, an unknown name, or an invalid value.
    """
    settings: dict[str, Any] = {**defaults}
    problems = Problems()
    known = [f"{_ENGINE}{name}" for name in (*SETTINGS, *_NUMBERS, "cluster")]
    for word in options.setting:
        if word in _OFFLINE:
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
    is_offline = all(_OFFLINE.get(word, True) for word in options.setting)
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


def read_words(
    words: Sequence[str],
    kinds: Mapping[str, Callable[[str], Any]],
    verb: str,
    check: Callable[[Mapping[str, Any]], Iterable[str]] = lambda values: (),
) -> dict[str, Any]:
    """The values of words such as `data=FILE`, each of its type.

    Args:
        words: of the command line.
        kinds: what makes a value of each name's text; `data` and `output` are needed.
        verb: for messages.
        check: tells what else is wrong.

    Raises:
        ConfigError: every unknown name and wrong value, and what is missing.
    """
    values: dict[str, Any] = {}
    problems = Problems()
    for word in words:
        name, separator, value = word.partition("=")
        if not separator or name not in kinds:
            problems.add(f"{brief(word)} is not a setting such as data=FILE.{did_you_mean(name, kinds)}")
            continue
        try:
            values[name] = kinds[name](value)
        except ValueError:
            number = "number" if kinds[name] is float else "whole number"
            problems.add(f"{name}: expected a {number}, got {value}")
            continue
        if isinstance(values[name], int) and values[name] < (0 if name == "seed" else 1):
            problems.add(f"{name}: expected a number above 0, got {value}")
    problems.add_all(
        f"{name}=... is missing. `python -m mecha_exp {verb} --help` has examples"
        for name in ("data", "output")
        if name not in values
    )
    problems.add_all(check(values))
    if "output" in values and values["output"].suffix != ".safetensors":
        problems.add(f"output: expected a .safetensors file, got {values['output']}")
    problems.raise_as(ConfigError)
    return values
