"""`python -m mecha_exp plan`: print what a merge would do, without doing it."""

from __future__ import annotations

import argparse
from pathlib import Path

from mecha_exp.cli.arguments import add_engine, add_recipe, make_parser

EXAMPLE = """\
examples:
    python -m mecha_exp plan recipe.mecha
    python -m mecha_exp plan template.mecha -p a a.safetensors -p alpha 0.3
    python -m mecha_exp plan merged.safetensors                the merge that made a model
    python -m mecha_exp plan recipe=ties alpha=0.3 k=0.1       any arguments of a merge, as with debug=plan
"""


def main(arguments: list[str]) -> int:
    """Check a merge and print what it would do."""
    parser = make_parser(
        "plan",
        "Say what a merge would do, and what is wrong with it, without doing it: inputs, keys, "
        "bytes, passes over the data, memory. Reads the headers of the models only.",
        EXAMPLE,
    )
    add_recipe(parser)
    add_engine(parser)
    if not _names_a_file(arguments):
        return _plan_of_configuration(arguments)
    options = parser.parse_intermixed_args(arguments)
    return _plan_of_file(options)


def _names_a_file(arguments: list[str]) -> bool:
    """Whether the arguments name a file or ask for help; the application's are `name=value`."""
    first = next((word for word in arguments if not word.startswith("-")), None)
    asks_for_help = any(word in ("-h", "--help") for word in arguments)
    return asks_for_help or (first is not None and ("=" not in first or Path(first).exists()))


def _plan_of_configuration(arguments: list[str]) -> int:
    from mecha_exp.app import main
    from mecha_exp.app.words.reader import reorder

    return main.main(reorder([*arguments, "debug=plan"]))


def _plan_of_file(options: argparse.Namespace) -> int:
    from mecha_exp.app.provenance import input_names
    from mecha_exp.cli.recipes import engine_options, load_recipe
    from mecha_exp.engine import Job, plan
    from mecha_exp.terminal.plan import show_plan

    recipe = load_recipe(options)
    engine = engine_options(options)
    with plan([Job(recipe, {})], engine) as planned:
        files = {model: source.path for model, source in planned.inputs.items() if source.path}
        names = input_names(files)
        listed = [names.get(model, source.name) for model, source in planned.inputs.items()]
        show_plan(planned, listed, {}, "The verb merge does it.")
    return 0
