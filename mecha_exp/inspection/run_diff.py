"""The differences between two runs, as data and as tables."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.text import Text

from mecha_exp.report.table import shortened
from mecha_exp.runs.query import SHORT, Run
from mecha_exp.runs.values import as_text
from mecha_exp.terminal import make_table, stdout

_INPUT, _ENVIRONMENT = "fingerprint/", ("git/", "version/", "machine/")
_NOISE = ("time/", "io/", "memory/")


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


def show_differences(a: Run, b: Run, found: Mapping[str, Any]) -> None:
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
