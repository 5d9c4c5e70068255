"""`python -m mecha_exp compose`: fill the parameters of a recipe with models and other recipes."""

from __future__ import annotations

import sys
from pathlib import Path

from mecha_exp.cli.arguments import add_offline, add_recipe, make_parser
from mecha_exp.terminal.console import print_line, stderr

EXAMPLE = """\
example: a template with the parameters a, c and alpha

    version 0.1.0
    parameter "a"
    parameter "c"
    parameter "alpha"
    merge "weighted_sum" &0 &1 alpha=&2

becomes a recipe by

    python -m mecha_exp compose template.mecha -p a other.mecha -p c model.safetensors -o composed.mecha

Parameters that are not given stay open, and those of other.mecha become parameters of the result.
"""


def main(arguments: list[str]) -> int:
    """Compose, and write the text to a file or to standard output."""
    parser = make_parser(
        "compose",
        "Fill parameters of a recipe with models, other recipes and numbers; no model is read.",
        EXAMPLE,
    )
    add_recipe(parser)
    add_offline(parser)
    parser.add_argument(
        "-o", "--output", type=Path, help="the composed recipe (default: standard output)", metavar="FILE"
    )
    options = parser.parse_intermixed_args(arguments)
    from mecha_exp.cli.recipes import load_recipe
    from mecha_exp.recipe import parameters_of, serialize, serialize_and_save
    from mecha_exp.recipe.templates import describe

    recipe = load_recipe(options)
    if options.output is None:
        sys.stdout.write(serialize(recipe) + "\n")
    else:
        print_line(str(serialize_and_save(recipe, options.output)))
    if unfilled := parameters_of(recipe):
        stderr.print(
            f"still to be filled: {', '.join(map(describe, unfilled))}", markup=False, soft_wrap=True
        )
    return 0
