"""The differences between two runs, as data and as tables."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from rich.text import Text

from mecha_exp.report.table import shortened
from mecha_exp.runs.query import SHORT, Run
from mecha_exp.runs.values import as_text
from mecha_exp.terminal.console import make_table, print_line, stdout

_INPUT = "fingerprint/"
_NOISE = ("time/", "io/", "memory/")


def differences(a: Run, b: Run) -> dict[str, Any]:
    """The differing values of each part by name, as (a, b); of the recipe the differing lines."""
    metrics = [
        {name: value for name, value in run.record.metrics.items() if not name.startswith(_NOISE)}
        for run in (a, b)
    ]
    inputs = [
        {name: value for name, value in run.record.tags.items() if name.startswith(_INPUT)} for run in (a, b)
    ]
    return {
        "recipe": _recipe(a, b),
        "parameters": _changed(a.record.parameters, b.record.parameters),
        "inputs": _changed(*inputs),
        "environment": _changed(a.record.environment, b.record.environment),
        "metrics": _changed(*metrics),
    }


def _recipe(a: Run, b: Run) -> list[str]:
    """The lines of the recipes that differ, marked by - and + as in a diff."""
    lines = difflib.unified_diff(a.recipe.splitlines(), b.recipe.splitlines(), lineterm="", n=0)
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


def _changed(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, list[Any]]:
    names = dict.fromkeys([*a, *b])
    # As text: NaN equals NaN here, and a record that was read back holds text for some values.
    return {name: [a.get(name), b.get(name)] for name in names if str(a.get(name)) != str(b.get(name))}


def show_differences(a: Run, b: Run, differing: Mapping[str, Any]) -> None:
    """Print what `differences` returns."""
    for mark, run in (("a", a), ("b", b)):
        print_line(f"{mark}  {run.record.name}  {run.signature[:SHORT]}  {run.folder}")
    if not any(differing.values()):
        stdout.print("They do not differ.")
        return
    if differing["recipe"]:
        stdout.print("\nrecipe")
        for line in differing["recipe"]:
            print_line(f"  {line}")
    for part in ("parameters", "inputs", "environment", "metrics"):
        if not differing[part]:
            continue
        table = make_table(part, "a", "b", *(["b - a"] if part == "metrics" else []))
        for name, (value_a, value_b) in differing[part].items():
            cells = [
                name.removeprefix(_INPUT),
                *(shortened(as_text(value), 40) for value in (value_a, value_b)),
            ]
            table.add_row(
                *map(Text, [*cells, *([_difference(value_a, value_b)] if part == "metrics" else [])])
            )
        stdout.print(table)


def _difference(a: Any, b: Any) -> str:
    return f"{b - a:+.4g}" if isinstance(a, float) and isinstance(b, float) else ""
