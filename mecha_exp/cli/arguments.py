"""What the verbs on recipe files share: their arguments, and the recipe that these name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mecha_exp.errors import Problems, RecipeError
from mecha_exp.graph.nodes import Node
from mecha_exp.plugins import load_plugins
from mecha_exp.recipe import deserialize_path
from mecha_exp.recipe.files import fill_from_files, find_recipe
from mecha_exp.recipe.text_writer import CONSTANTS


def add_recipe(parser: argparse.ArgumentParser, or_else: str = "") -> None:
    """The arguments that name a recipe, or something else that a verb takes, and fill its parameters."""
    parser.add_argument(
        "recipe",
        type=Path,
        help="a .mecha file, or a merged model, which carries its recipe in its header" + or_else,
    )
    parser.add_argument(
        "-p",
        "--parameter",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "VALUE"),
        help="fill a parameter of the recipe with a model's path, another .mecha file, or a number; may be "
        "repeated",
    )
    parser.add_argument(
        "--models-dir",
        action="append",
        type=Path,
        default=[],
        metavar="DIR",
        help="where models and recipes are looked for, after the current folder and before those that the "
        "environment variable MECHA_MODELS_DIR lists; may be repeated",
    )

    add_plugins(parser)


def add_plugins(parser: argparse.ArgumentParser) -> None:
    """The argument that names plugins."""
    parser.add_argument(
        "--plugin",
        action="append",
        default=[],
        metavar="FILE",
        help="a Python file, folder or module that defines merge methods, which is run; may be repeated. "
        "Those in the folder `methods` are found by themselves",
    )


def load_recipe(options: argparse.Namespace) -> Node:
    """The recipe that the arguments name, with its parameters filled.

    Raises:
        RecipeError: everything that is wrong with it.
    """
    load_plugins(options.plugin)
    recipe = deserialize_path(find_recipe(options.recipe, options.models_dir))
    given: dict[str, Any] = {}
    problems = Problems()
    for name, word in options.parameter:
        if name in given:
            problems.add(f"the parameter '{name}' is given twice")
        given[name] = _value(word)
    problems.raise_as(RecipeError)
    return fill_from_files(recipe, given, options.models_dir)


def _value(word: str) -> Any:
    """What a word of the command line means: a number, true, false, null, or else a path."""
    if word in CONSTANTS:
        return CONSTANTS[word]
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
