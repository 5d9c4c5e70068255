"""`python -m mecha_exp ls`: list sweeps and points, or those that meet conditions."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from mecha_exp.cli.arguments import make_parser
from mecha_exp.errors import ConfigError, Problems, did_you_mean
from mecha_exp.inspection.run import run_data
from mecha_exp.paths import OUTPUTS
from mecha_exp.report.sweep_results import results_of
from mecha_exp.report.verdict import ELSEWHERE, elsewhere_text
from mecha_exp.runs.query import SHORT, Filter, Run, find_runs, find_sweeps, short_folder
from mecha_exp.runs.record import FAILED
from mecha_exp.runs.sweep import Sweep
from mecha_exp.terminal.console import make_table, print_json, print_table, stdout

EXAMPLE = """\
examples:
    python -m mecha_exp ls
    python -m mecha_exp ls method=ties 'alpha>0.3' 'accuracy>=0.85'
    python -m mecha_exp ls status=FAILED --json
    python -m mecha_exp ls --sweeps

A condition compares a hyperparameter, a metric, a tag, `status` or `name` with = != < <= > >=.
"""


def main(arguments: list[str]) -> int:
    """List sweeps, and the points that meet every condition."""
    options = _parser().parse_args(arguments)
    if not options.folder.is_dir():
        raise ConfigError(f"{options.folder} is not a folder: nothing has been run here yet.")
    filters = [Filter.parse(text) for text in options.condition]
    sweeps = find_sweeps([options.folder]) if options.sweeps or not filters else []
    listed = [] if filters else [_sweep_data(*pair) for pair in sweeps]  # before all points are in memory
    runs = find_runs([options.folder]) if filters or not options.sweeps else []
    _check_names(filters, runs)
    runs = [run for run in runs if all(condition.holds(run) for condition in filters)]
    if options.sweeps and filters:
        held = {folder for run in runs for folder in run.folder.parents}
        listed = [_sweep_data(*pair) for pair in sweeps if pair[0] in held]
    runs = [] if options.sweeps else runs
    if options.json:
        print_json({"sweeps": listed, "points": [run_data(run) for run in runs]})
        return 0
    _show(listed, runs, options.limit)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "ls",
        "List what was run here: sweeps and points, the newest first.",
        EXAMPLE,
    )
    parser.add_argument("condition", nargs="*", help="which points")
    parser.add_argument(
        "--in", dest="folder", type=Path, default=OUTPUTS, help="where to look (default: %(default)s)"
    )
    parser.add_argument("--sweeps", action="store_true", help="sweeps alone: those with such points")
    parser.add_argument(
        "--limit", type=int, default=30, help="how many points (default: %(default)s; 0: all)"
    )
    parser.add_argument("--json", action="store_true", help="everything that is known, for other programs")
    return parser


def _check_names(filters: Sequence[Filter], runs: Sequence[Run]) -> None:
    known = set().union(*(run.names for run in runs))
    problems = Problems()
    for condition in filters:
        if runs and condition.name not in known:
            problems.add(f"{condition.name}: no run here has it.{did_you_mean(condition.name, known)}")
    problems.raise_as(ConfigError)


def _sweep_data(folder: Path, sweep: Sweep) -> dict[str, Any]:
    results = results_of(sweep, folder)
    best = results.best
    return {
        "title": sweep.title,
        "folder": str(folder),
        "command": sweep.command,
        "swept": sweep.swept,
        "points": len(results.records),
        "finished": len(results.finished),
        "failed": sum(record.status == FAILED for record in results.records),
        "metric": results.metric,
        "best": {"name": best.name, "value": best.metrics[str(results.metric)]} if best else None,
    }


def _show(sweeps: Sequence[Mapping[str, Any]], runs: Sequence[Run], limit: int) -> None:
    if sweeps:
        table = _list("sweep", "points", "best", "folder", wrapped=("sweep", "best"))
        for data in sweeps:
            points = f"{data['points']}{f', {n} failed' if (n := data['failed']) else ''}"
            best = data["best"]
            value = f"{best['name']}: {best['value']:.4g}" if best else ""
            table.add_row(*map(Text, (data["title"], points, value, short_folder(Path(data["folder"])))))
        print_table(table)
    if runs:
        table = _list("point", "signature", "result", "folder", wrapped=("point",))
        for run in runs[: limit or None]:
            table.add_row(*map(Text, _cells(run)), style="red" if run.record.status == FAILED else None)
        print_table(table)
        if limit and len(runs) > limit:
            stdout.print(f"... and {len(runs) - limit} more: --limit 0 shows all")
        if made_with := dict.fromkeys(words for run in runs[: limit or None] for words in run.made_with):
            stdout.print(f"{ELSEWHERE} {elsewhere_text([*made_with])}", markup=False)
    if not sweeps and not runs:
        stdout.print("There is none.")


def _list(*headings: str, wrapped: Sequence[str]) -> Table:
    """A table whose `wrapped` columns shrink first where the terminal is narrow."""
    table = make_table()
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading not in wrapped, min_width=12)
    return table


def _cells(run: Run) -> list[str]:
    record = run.record
    failed = record.status == FAILED or run.measured is None
    result = record.status.lower() if failed else f"{record.metric} {run.measured:.4g}"
    result += f" {ELSEWHERE}" if run.made_with else ""
    return [record.name, run.signature[:SHORT], result, short_folder(run.folder)]
