"""Everything that is known about a run, as text and as data."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.text import Text

from mecha_exp.runs.query import Run, run_id_of
from mecha_exp.runs.record import INPUT_PREFIX
from mecha_exp.runs.values import as_text
from mecha_exp.terminal.console import PathCell, make_table, print_json, print_line, print_table, stdout


def show_run(run: Run, as_json: bool = False) -> None:
    """Print a run: state, hyperparameters, inputs, metrics, environment and recipe."""
    record = run.record
    if as_json:
        more = {"tags": record.tags, "overrides": record.overrides, "recipe": run.recipe}
        print_json({**run_data(run), **more})
        return
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.started / 1000))
    seconds = (record.ended - record.started) / 1000
    print_line(f"{record.name}: {record.status.lower()}, {when}, {seconds:.1f} s")
    print_line(f"signature  {run.signature or 'none: it failed before its inputs were read'}")
    print_line(f"folder     {run.folder}")
    if run_id := run_id_of(record):
        print_line(f"MLflow     {run_id}")
    if run.made_with:
        print_line(f"made with  {', '.join(run.made_with)}: bits may differ from those made here")
    if record.error:
        print_line(f"error      {record.error}")
    own = {k: v for k, v in record.parameters.items() if not k.startswith(INPUT_PREFIX)}
    _values("hyperparameter", own)
    if record.inputs:
        table = make_table("input", "file", "SHA-256")
        for name, path in record.inputs.items():
            content = record.tags.get(f"fingerprint/{name}", "")
            table.add_row(Text(name), PathCell(path), Text(content[:16]))
        print_table(table)
    _values("metric", record.metrics)
    _values("environment", record.environment)
    if run.recipe:
        print_line(run.recipe.rstrip())


def run_data(run: Run) -> dict[str, Any]:
    """A run as plain data."""
    record = run.record
    return {
        "signature": run.signature,
        "folder": str(run.folder),
        "name": record.name,
        "status": record.status,
        "started": record.started,
        "ended": record.ended,
        "metric": record.metric,
        "parameters": record.parameters,
        "metrics": record.metrics,
        "error": record.error,
        "made_with": list(run.made_with),
    }


def _values(heading: str, values: Mapping[str, Any]) -> None:
    if not values:
        return
    table = make_table(heading, "")
    for name, value in values.items():
        table.add_row(Text(name), Text(as_text(value)))
    stdout.print(table)
