"""`python -m mecha_exp diff A B`: what two runs, or two models, differ in."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.text import Text

from mecha_exp.checkpoint.formats import SAFETENSORS
from mecha_exp.errors import ConfigError
from mecha_exp.paths import OUTPUTS
from mecha_exp.plugins import load_model_configs
from mecha_exp.report.table import shortened
from mecha_exp.runs.query import SHORT, Run, find_run
from mecha_exp.runs.record import RUN_FILE
from mecha_exp.runs.values import as_text
from mecha_exp.terminal import make_table, print_json, stdout

EXAMPLE = """\
examples:
    python -m mecha_exp diff 3f2a 91bc                        two runs by their signatures
    python -m mecha_exp diff outputs/runs/A outputs/runs/B --json
    python -m mecha_exp diff a.safetensors b.safetensors --figure difference.png    two models, by blocks
"""
_INPUT, _ENVIRONMENT = "fingerprint/", ("git/", "version/", "machine/")
_NOISE = ("time/", "io/", "memory/")


def main(arguments: list[str]) -> int:
    """Show what sets two runs, or two models, apart."""
    parser = argparse.ArgumentParser(
        prog="python -m mecha_exp diff",
        description="Show what two runs differ in: recipe, hyperparameters, inputs, environment, metrics; or "
        "per block, how far two models are from each other.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("a", help="a run: its folder, signature, name, or MLflow id; or a model")
    parser.add_argument("b", help="another one")
    parser.add_argument("--in", dest="folder", type=Path, default=OUTPUTS, help="where runs are looked for")
    parser.add_argument("--json", action="store_true", help="the differences for other programs")
    parser.add_argument("--figure", type=Path, metavar="PNG", help="of two models: draw it, too")
    options = parser.parse_args(arguments)
    load_model_configs()
    if _is_model(options.a) and _is_model(options.b):
        return _diff_models(options)
    if options.figure is not None:
        raise ConfigError("--figure draws the difference of two models; these are not two models' paths.")
    a, b = (find_run(word, [options.folder]) for word in (options.a, options.b))
    found = differences(a, b)
    if options.json:
        print_json({"a": _identity(a), "b": _identity(b), **found})
    else:
        _show(a, b, found)
    return 0


def _is_model(word: str) -> bool:
    """Whether a word names a model rather than a run: a file, or a folder that no run has left."""
    path = Path(word)
    is_folder = path.is_dir() and not (path / RUN_FILE).is_file()
    return path.is_file() or SAFETENSORS.has_suffix(path) or is_folder


def _diff_models(options: argparse.Namespace) -> int:
    from mecha_exp.inspection.model_diff import compare_by_block, draw_models, show_models

    found = compare_by_block(options.a, options.b)
    if options.json:
        print_json(found)
    else:
        show_models(found)
    if options.figure is not None:
        draw_models(found, options.figure)
    return 0


def differences(a: Run, b: Run) -> dict[str, Any]:
    """What differs: for each part the names with both values; the recipe as a list of lines."""
    metrics = [
        {name: value for name, value in run.record.metrics.items() if not name.startswith(_NOISE)}
        for run in (a, b)
    ]
    tags = (a.record.tags, b.record.tags)
    return {
        "recipe": _recipe(a, b),
        "parameters": _changed(a.record.parameters, b.record.parameters),
        "inputs": _changed(*(_with_prefix(t, (_INPUT,)) for t in tags)),
        "environment": _changed(*(_with_prefix(t, _ENVIRONMENT) for t in tags)),
        "metrics": _changed(*metrics),
    }


def _recipe(a: Run, b: Run) -> list[str]:
    """The lines of the recipes that differ, with - and + as diffs have them."""
    left, right = (_text(run.folder / "recipe.mecha").splitlines() for run in (a, b))
    lines = difflib.unified_diff(left, right, lineterm="", n=0)
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _changed(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, list[Any]]:
    names = dict.fromkeys([*a, *b])
    # As text: a NaN equals another one here, and a record that was read back holds text for some values.
    return {name: [a.get(name), b.get(name)] for name in names if str(a.get(name)) != str(b.get(name))}


def _with_prefix(tags: Mapping[str, str], prefixes: tuple[str, ...]) -> dict[str, str]:
    return {name: value for name, value in tags.items() if name.startswith(prefixes)}


def _identity(run: Run) -> dict[str, str]:
    return {"name": run.record.name, "signature": run.signature, "folder": str(run.folder)}


def _show(a: Run, b: Run, found: Mapping[str, Any]) -> None:
    for mark, run in (("a", a), ("b", b)):
        line = f"{mark}  {run.record.name}  {run.signature[:SHORT]}  {run.folder}"
        stdout.print(line, markup=False, soft_wrap=True)
    if not any(found.values()):
        stdout.print("They do not differ.")
        return
    if found["recipe"]:
        stdout.print("\nrecipe")
        for line in found["recipe"]:
            stdout.print(f"  {line}", markup=False, soft_wrap=True)
    for part in ("parameters", "inputs", "environment", "metrics"):
        if not found[part]:
            continue
        table = make_table(part, "a", "b", *(["b - a"] if part == "metrics" else []))
        for name, (left, right) in found[part].items():
            cells = [name.removeprefix(_INPUT), *(shortened(as_text(value), 40) for value in (left, right))]
            table.add_row(*map(Text, [*cells, *([_difference(left, right)] if part == "metrics" else [])]))
        stdout.print(table)


def _difference(a: Any, b: Any) -> str:
    return f"{b - a:+.4g}" if isinstance(a, float) and isinstance(b, float) else ""
