"""`python -m mecha_exp info`: the model configs, a model, and the merge methods."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mecha_exp.app.config.method_recipes import recipe_text
from mecha_exp.cli.arguments import add_models_dir, add_plugins, make_parser
from mecha_exp.errors import CheckpointError, ConfigError, brief, did_you_mean, nearest
from mecha_exp.method_api.registry import all_methods, resolve_method

if TYPE_CHECKING:
    from mecha_exp.architectures import ModelConfig

EXAMPLE = """\
examples:
    python -m mecha_exp info                          the model configs
    python -m mecha_exp info sdxl-sgm -v              one of them, with its keys
    python -m mecha_exp info model.safetensors        what a model is, by its header
    python -m mecha_exp info model.safetensors --deep    and whether its numbers are finite
    python -m mecha_exp info methods [NAME]           the merge methods, or one of them
"""


def main(arguments: list[str]) -> int:
    """Describe the model configs, one of them, a model, or merge methods."""
    if arguments[:1] == ["methods"]:
        return _describe_methods(arguments[1:])
    options = _parser().parse_args(arguments)
    from mecha_exp.inspection.model import show_model
    from mecha_exp.inspection.model_config import describe_config, show_config, show_configs, summary_of
    from mecha_exp.plugins import load_model_configs

    load_model_configs()
    data: dict[str, Any]
    if options.what is None:
        data, show = {"configs": [summary_of(config) for config in _known_configs()]}, show_configs
    elif (config := _config_named(options)) is not None:
        data, show = describe_config(config, options.verbose), show_config
    else:
        data, show = _describe_model(options), show_model
    if options.json:
        sys.stdout.write(json.dumps(data, indent=2) + "\n")
    else:
        show(data)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "info", "Say what model configs there are, what is in one, or what a model is.", EXAMPLE
    )
    parser.add_argument(
        "what", nargs="?", help="a model config, a file or a folder; nothing lists the configs"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="with every key")
    parser.add_argument("--json", action="store_true", help="as JSON, for other programs")
    parser.add_argument("--deep", action="store_true", help="read all of a model for NaN and infinity")
    add_models_dir(parser, "where models are looked for")
    return parser


def _known_configs() -> list[ModelConfig]:
    from mecha_exp.architectures import get_all, get_all_adapters

    return [*get_all(), *get_all_adapters()]


def _config_named(options: argparse.Namespace) -> ModelConfig | None:
    """The config that `options.what` names, or None where it names a model; a model takes precedence.

    Raises:
        ConfigError: there is neither a config nor a model of that name.
    """
    from mecha_exp.architectures import resolve
    from mecha_exp.sources.search import find_model

    try:
        find_model(options.what, options.models_dir)
    except CheckpointError:
        known = [config.identifier for config in _known_configs()]
        if options.what in known or options.what in {name.partition("-")[0] for name in known}:
            return resolve(options.what)
        if not Path(options.what).suffix and "/" not in options.what:
            raise ConfigError(_what_else(options.what, known)) from None
    return None


def _what_else(what: str, known: list[str]) -> str:
    """A message for a word that is neither a model config nor a model."""
    program = "python -m mecha_exp"
    if what in ("methods", "method", "recipes", "recipe"):
        return f"{what}: merge methods are listed by {program} info methods, recipes by {program} --help"
    if what in ("evaluators", "evaluator", "metrics"):
        return (
            f"{what}: Evaluators are chosen by evaluator=auto, digits, none, weight_stats, and those of a "
            "plugin by evaluator.name=NAME 'plugins=[FILE]'."
        )
    if what in ("configs", "models", "architectures"):
        return f"{what}: the model configs are listed by {program} info"
    by_name = [method.identifier for method in all_methods()]
    if what in by_name:
        return f"{what!r} is a merge method. Type: {program} info methods {what}"
    if near := nearest(what, [*known, *by_name]):
        return f"{brief(what)} is neither a model config nor a model. Did you mean '{near[0]}'?"
    return f"{brief(what)} is neither a model config nor a model.{did_you_mean(what, known)}"


def _describe_model(options: argparse.Namespace) -> dict[str, Any]:
    from mecha_exp.checkpoint import open_stored
    from mecha_exp.inspection.model import describe_model
    from mecha_exp.sources.search import find_model

    with open_stored(find_model(options.what, options.models_dir)) as model:
        return describe_model(model, options.deep)


def _describe_methods(arguments: list[str]) -> int:
    """Print a table of the methods, or all about one."""
    parser = make_parser(
        "info methods",
        "List the merge methods, or say what one computes, with its parameters and its source.",
        "example: python -m mecha_exp info methods slerp",
    )
    parser.add_argument("name", nargs="?", help="of a method; nothing lists them all")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as JSON, for other programs")
    form.add_argument("--markdown", action="store_true", help="the list as in docs/methods.md")
    form.add_argument("--recipe", action="store_true", help="a recipe file to begin with, for one method")
    add_plugins(parser)
    options = parser.parse_args(arguments)
    from mecha_exp.inspection import methods
    from mecha_exp.plugins import load_plugins

    if options.recipe and not options.name:
        parser.error("--recipe needs the NAME of a method")
    load_plugins(options.plugin)
    requested = [resolve_method(options.name)] if options.name else all_methods()
    if options.recipe:
        sys.stdout.write(recipe_text(requested[0]))
        return 0
    described = [methods.describe(method) for method in requested]
    if options.json:
        sys.stdout.write(json.dumps(described[0] if options.name else described, indent=2) + "\n")
    elif options.markdown:
        sys.stdout.write(methods.markdown(described))
    elif options.name:
        methods.show(described[0])
    else:
        methods.show_all(described)
    return 0
