"""`python -m mecha_exp reproduce`: merge a recorded result again and compare the bytes."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mecha_exp.cli.arguments import add_models_dir, add_plugins, make_parser
from mecha_exp.errors import ConfigError, counted
from mecha_exp.paths import OUTPUTS, tracking_uri
from mecha_exp.terminal.console import agrees, print_json, print_line

if TYPE_CHECKING:
    from mecha_exp.app.reproduction.comparison import Outcome
    from mecha_exp.app.reproduction.original import Original

EXAMPLE = """\
examples:
    python -m mecha_exp reproduce 3f2a91                        a run by its signature, folder or MLflow id
    python -m mecha_exp reproduce outputs/multiruns/2026-01-31_12-00-00/2
    python -m mecha_exp reproduce merged.safetensors --models-dir ~/models
    python -m mecha_exp reproduce supplement.zip --models-dir ~/models --point 3    of `bundle`; or all points

A model that was made by mecha_exp says in its header what it was made of; nothing else is needed. Inputs that
lie elsewhere are found below --models-dir by name, or by content under any name. The exit status is 0 where
every byte is the same.
"""


def main(arguments: list[str]) -> int:
    """Merge a result again; returns 0 if the bytes are the same."""
    options = _parser().parse_args(arguments)
    from mecha_exp.app.reproduction.original import read_original
    from mecha_exp.app.reproduction.remake import remake
    from mecha_exp.checkpoint import check_writable
    from mecha_exp.plugins import load_plugins
    from mecha_exp.runs.bundle import is_bundle

    load_plugins(options.plugin)
    check_writable("new", 0)  # of the size of the model: /tmp may be a memory disk
    if is_bundle(Path(options.what)):
        return _bundle(options)
    with tempfile.TemporaryDirectory(prefix=".reproduce-", dir=Path()) as scratch:
        original = read_original(options.what, [options.folder], options.uri, Path(scratch))
        _require_trust([original], options)
        outcome = remake(
            original, options.models_dir, options.output, Path(scratch), options.anyway, options.plugin
        )
    print_json(_data(original, outcome)) if options.json else _show(original, outcome, options.output)
    return 0 if outcome.identical else 1


def _bundle(options: argparse.Namespace) -> int:
    """Make the points of a bundle again; returns 0 if all are the same.

    Raises:
        ConfigError: the archive cannot be trusted, or names programs, which were not allowed to run.
    """
    from mecha_exp.app.reproduction.original import read_original
    from mecha_exp.runs.bundle import points_of, unpack

    if options.output is not None:
        raise ConfigError("--output keeps one model: unpack the bundle, and reproduce that point.")
    with tempfile.TemporaryDirectory(prefix=".reproduce-", dir=Path()) as scratch:
        folder = unpack(Path(options.what), Path(scratch) / "bundle")
        points = points_of(folder, options.point)
        originals = [read_original(str(path), [], "", Path(scratch)) for path, _ in points]
        _require_trust(originals, options)
        made = [_point(original, Path(scratch), options) for original in originals]
    same = sum(outcome.identical for _, outcome in made)
    if options.json:
        print_json({"what": options.what, "points": [_data(*pair) for pair in made], "identical": same})
    else:
        for original, outcome in made:
            _show(original, outcome)
        print_line(f"{same} of {counted(len(made), 'point')} identical")
    return 0 if same == len(made) else 1


def _require_trust(originals: Sequence[Original], options: argparse.Namespace) -> None:
    """Ask at a terminal whether the programs that results name may run; one that --plugin names may.

    Raises:
        ConfigError: they may not.
    """
    from mecha_exp.app.reproduction.sources import SOURCES_FILE, programs_in

    named = {Path(plugin).name for plugin in options.plugin}
    programs = dict.fromkeys(
        program
        for original in originals
        for program in programs_in(original.config)
        if Path(program).name not in named
    )
    if not programs or options.trust:
        return
    what = f"{options.what} names what is run as code: {', '.join(programs)}."
    if sys.stdin.isatty() and agrees(f"{what} Run it? (y/N) "):
        return
    raise ConfigError(
        f"{what} Read it first; the files that were kept are in {SOURCES_FILE} beside each recipe. Then add "
        "--trust."
    )


def _point(original: Original, scratch: Path, options: argparse.Namespace) -> tuple[Original, Outcome]:
    """Make one point of a bundle again. All points share the folder: a plugin is loaded once."""
    from mecha_exp.app.reproduction.remake import remake

    assert original.folder is not None
    original = replace(original, source=f"{options.what}, point {original.folder.name}")
    return original, remake(original, options.models_dir, None, scratch, options.anyway, options.plugin)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "reproduce",
        "Make a run's model again, on this or another machine, and compare the bytes; where that "
        "cannot be done, or they differ, say what is different.",
        EXAMPLE,
    )
    parser.add_argument(
        "what", help="a run (folder, signature, name, MLflow id), a merged model, or the bundle of a sweep"
    )
    add_models_dir(parser, "where inputs lie now")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="keep the model that is made (default: do not)"
    )
    parser.add_argument("--point", metavar="POINT", help="of a bundle: the number or the name of one point")
    parser.add_argument(
        "--trust", action="store_true", help="run the plugins and other code that the result names"
    )
    parser.add_argument("--anyway", action="store_true", help="also where an input is another one now")
    parser.add_argument("--in", dest="folder", type=Path, default=OUTPUTS, help="where runs are looked for")
    parser.add_argument("--uri", default=tracking_uri(), help="the MLflow store (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="the outcome for other programs")
    add_plugins(parser)
    return parser


def _data(original: Original, outcome: Outcome) -> dict[str, Any]:
    return {
        "what": original.name,
        "from": original.source,
        "identical": outcome.identical,
        "made": outcome.made,
        "compared": outcome.compared,
        "inputs": outcome.inputs,
        "environment": outcome.environment,
        "differences": outcome.differences,
    }


def _show(original: Original, outcome: Outcome, output: Path | None = None) -> None:
    print_line(f"{original.name}, from {original.source}")
    _list("inputs", outcome.inputs)
    if outcome.identical:
        print_line(f"identical: {outcome.compared}")
        if output is not None:
            print_line(f"the model: {output}")
        if outcome.environment:
            _list("and that although there is another", outcome.environment)
        return
    print_line("different:" if outcome.made else "it cannot be made again here:")
    for difference in outcome.differences:
        print_line(f"  {difference}")
    _list("what may be the cause: another", outcome.environment)
    if not outcome.made:
        print_line(
            "Name a folder with the inputs by --models-dir, or go on with --anyway where they have changed."
        )


def _list(heading: str, lines: Sequence[str]) -> None:
    if lines:
        print_line(heading)
    for line in lines:
        print_line(f"  {line}")
