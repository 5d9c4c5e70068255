"""The arguments that verbs share."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mecha_exp.errors import ConfigError, Problems, brief, did_you_mean

OFFLINE = {"hub.offline=true": True, "hub.offline=false": False}
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
    if word not in OFFLINE:
        raise argparse.ArgumentTypeError(f"expected hub.offline=false, got {brief(word)}")
    return word


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
