"""`python -m mecha_exp diff A B`: the differences between two runs, or two models."""

from __future__ import annotations

import argparse
from pathlib import Path

from mecha_exp.app.words.slips import MODELS
from mecha_exp.cli.arguments import make_parser
from mecha_exp.errors import ConfigError
from mecha_exp.inspection.run_diff import differences, show_differences
from mecha_exp.paths import OUTPUTS
from mecha_exp.runs.query import Run, find_run
from mecha_exp.runs.record import RUN_FILE
from mecha_exp.terminal.console import print_json

EXAMPLE = """\
examples:
    python -m mecha_exp diff 3f2a 91bc                        two runs by their signatures
    python -m mecha_exp diff outputs/runs/A outputs/runs/B --json
    python -m mecha_exp diff a.safetensors b.safetensors --figure difference.png    two models, by blocks
"""


def main(arguments: list[str]) -> int:
    """Print the differences between two runs, or two models."""
    options = _parser().parse_args(arguments)
    if _is_model(options.a) and _is_model(options.b):
        return _diff_models(options)
    if options.figure is not None:
        raise ConfigError("--figure draws the difference of two models; these are not two models' paths.")
    a, b = (find_run(word, [options.folder]) for word in (options.a, options.b))
    differing = differences(a, b)
    if options.json:
        print_json({"a": _identity(a), "b": _identity(b), **differing})
    else:
        show_differences(a, b, differing)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "diff",
        "Show what two runs differ in: recipe, hyperparameters, inputs, environment, metrics; or "
        "per block, how far two models are from each other.",
        EXAMPLE,
    )
    parser.add_argument("a", help="a run: its folder, signature, name, or MLflow id; or a model")
    parser.add_argument("b", help="another one")
    parser.add_argument("--in", dest="folder", type=Path, default=OUTPUTS, help="where runs are looked for")
    parser.add_argument("--json", action="store_true", help="the differences for other programs")
    parser.add_argument("--figure", type=Path, metavar="PNG", help="of two models: draw it, too")
    return parser


def _is_model(word: str) -> bool:
    """Whether a word names a model rather than a run: a file, or a folder without a run's record."""
    path = Path(word)
    is_folder = path.is_dir() and not (path / RUN_FILE).is_file()
    return path.is_file() or path.suffix in MODELS or is_folder


def _diff_models(options: argparse.Namespace) -> int:
    from mecha_exp.inspection.model_diff import compare_by_block, draw_models, show_models
    from mecha_exp.plugins import load_model_configs

    load_model_configs()
    comparison = compare_by_block(options.a, options.b)
    if options.json:
        print_json(comparison)
    else:
        show_models(comparison)
    if options.figure is not None:
        draw_models(comparison, options.figure)
    return 0


def _identity(run: Run) -> dict[str, str]:
    return {"name": run.record.name, "signature": run.signature, "folder": str(run.folder)}
