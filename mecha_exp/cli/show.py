"""`python -m mecha_exp show`: print the recipe in a file or in a merged model, or describe a run."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mecha_exp.app.words.slips import MODELS
from mecha_exp.cli.arguments import add_offline, add_recipe, make_parser
from mecha_exp.inspection.run import show_run
from mecha_exp.runs.query import find_run
from mecha_exp.runs.record import RUN_FILE
from mecha_exp.runs.sweep import SWEEP_FILE

if TYPE_CHECKING:
    from mecha_exp.graph.nodes import Node

EXAMPLE = """\
examples:
    python -m mecha_exp show recipe.mecha
    python -m mecha_exp show merged.safetensors                    how was this model made?
    python -m mecha_exp show merged.safetensors --text > recipe.mecha
    python -m mecha_exp show 3f2a91                               the run with this signature
    python -m mecha_exp show outputs/runs/2026-01-31_12-00-00

A part that is used several times is drawn once, with a number, and then named: &1 (above).
"""


def main(arguments: list[str]) -> int:
    """Print a recipe as a tree, as text, or as JSON; or a run."""
    parser = make_parser(
        "show",
        "Show a recipe as a tree, or what is known of a run. Of models only headers are read.",
        EXAMPLE,
    )
    add_recipe(parser, "; or a run: its folder, signature, name, or MLflow id")
    add_offline(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--text", action="store_true", help="the recipe as text, as a .mecha file has it")
    form.add_argument(
        "--json", action="store_true", help="its nodes, or what is known of the run, for other programs"
    )
    options = parser.parse_intermixed_args(arguments)
    if names_a_run(options.recipe):
        show_run(find_run(str(options.recipe)), options.json)
    else:
        from mecha_exp.cli.recipes import load_recipe

        show_recipe(load_recipe(options), options)
    return 0


def names_a_run(word: Path) -> bool:
    """Whether a word names a run: its folder or, if there is no such file, its signature, name or id."""
    if (word / RUN_FILE).is_file() or (word / SWEEP_FILE).is_file():
        return True
    return not word.exists() and word.suffix not in (".mecha", *MODELS)


def show_recipe(recipe: Node, options: argparse.Namespace) -> None:
    """Print a recipe in the form that the options ask for."""
    from mecha_exp.inspection.recipe_tree import data_of, tree_of
    from mecha_exp.recipe import serialize

    if options.text:
        sys.stdout.write(serialize(recipe) + "\n")
    elif options.json:
        sys.stdout.write(json.dumps(data_of(recipe), indent=2) + "\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in tree_of(recipe))
