"""`python -m mecha_exp table`: print the table of one or several sweeps, by any keys and metrics."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mecha_exp.cli.arguments import make_parser
from mecha_exp.errors import ConfigError, Problems, did_you_mean
from mecha_exp.evaluation.declaration import DIRECTIONS
from mecha_exp.paths import OUTPUTS
from mecha_exp.report import Results, terminal_tables
from mecha_exp.report.conclusion import concluded_results
from mecha_exp.report.export import write_csv
from mecha_exp.report.join import joined
from mecha_exp.report.paper.table import Part, verdict_on
from mecha_exp.report.paper.text import Numbers, latex, markdown
from mecha_exp.report.sweep_results import results_from, results_of
from mecha_exp.report.table import notes_of
from mecha_exp.report.verdict import verdict_data
from mecha_exp.runs.outcomes import outcomes_so_far
from mecha_exp.runs.query import find_sweep, short_folder
from mecha_exp.runs.record import CONFIG_FILE, Record, read_settings
from mecha_exp.runs.sweep import Sweep
from mecha_exp.terminal.console import print_json, print_line, stdout

EXAMPLE = """\
examples:
    python -m mecha_exp table                                     the newest sweep
    python -m mecha_exp table outputs/multiruns/2026-01-31_12-00-00 --by k
    python -m mecha_exp table alpha_by_k --metric loss --direction minimize --json
    python -m mecha_exp table --latex                             a paper's table of the newest sweep
    python -m mecha_exp table ties_sweep tsv_sweep --latex --percent --intervals    of two together
    python -m mecha_exp table 2026-01-31_12-00-00 2026-02-01_09-30-00    two sweeps in one table

With --by, points that agree in these keys are one row: their mean, with its 95 % interval where they differ
in their seed alone, and with the least and the greatest value where they differ in other keys.
"""


def main(arguments: list[str]) -> int:
    """Print a sweep's table."""
    options = _parser().parse_args(arguments)
    sweeps = dict(find_sweep(word, [options.folder]) for word in options.sweep or [None])
    if options.latex or options.markdown:
        sys.stdout.write(_paper_table(sweeps, options))
        return 0
    for given, name in ((options.percent, "--percent"), (options.intervals, "--intervals")):
        if given:
            raise ConfigError(f"{name} is for --latex and --markdown.")
    concludes = len(sweeps) == 1 and not options.by and not options.metric and not options.csv
    read = concluded_results if concludes else results_of
    results = [read(sweep, folder) for folder, sweep in sweeps.items()]
    names = [short_folder(folder) for folder in sweeps]
    selected = _selected(results[0] if len(results) == 1 else joined(results, names), options)
    _show(selected, list(sweeps), options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "table",
        "Show the table of a sweep that has run, or is running; of several, one table for all.",
        EXAMPLE,
    )
    parser.add_argument("sweep", nargs="*", help="its folder or its title (default: the newest); or several")
    parser.add_argument("--in", dest="folder", type=Path, default=OUTPUTS, help="where sweeps are looked for")
    parser.add_argument("--by", action="append", metavar="KEY", help="a swept key; may be repeated")
    parser.add_argument("--metric", action="append", help="what to show, and to sort by the first one")
    parser.add_argument("--direction", choices=DIRECTIONS, help="which way the first --metric is better")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="its rows for other programs")
    form.add_argument("--csv", action="store_true", help="every point and metric as comma-separated values")
    form.add_argument("--latex", action="store_true", help="a paper's table: methods by tasks, in LaTeX")
    form.add_argument("--markdown", action="store_true", help="the same in Markdown")
    parser.add_argument("--percent", action="store_true", help="shares times 100, in a paper's table")
    parser.add_argument("--intervals", action="store_true", help="with 95 %% intervals, in a paper's table")
    return parser


def _show(results: Results, folders: Sequence[Path], options: argparse.Namespace) -> None:
    notes = notes_of(results)
    if options.json:
        where = {"folder": str(folders[0])} if len(folders) == 1 else {"folders": [str(f) for f in folders]}
        data = verdict_data(results)
        verdict = {"verdict": data} if data else {}
        shown = {"rows": _rows(results), "notes": notes, **verdict}
        print_json({"title": results.title, **where, **shown})
    elif options.csv:
        write_csv(results, sys.stdout)
    else:
        stdout.print(*terminal_tables(results, stdout.width, is_whole=True), sep="\n")
        for note in notes:
            print_line(note)
        for folder in folders:
            print_line(f"the sweep     {folder}")


def _paper_table(sweeps: Mapping[Path, Sweep], options: argparse.Namespace) -> str:
    """A paper's table of methods by tasks, of all sweeps together.

    Raises:
        ConfigError: rows by other keys, several metrics, sweeps that cannot be compared, or no verdict.
    """
    if options.by or len(options.metric or ()) > 1:
        raise ConfigError(
            "--latex and --markdown show the best setting of each method, by one metric. Leave out --by and "
            "all of --metric but one."
        )
    titles = [sweep.title for sweep in sweeps.values()]
    names = titles if len(set(titles)) == len(titles) else [short_folder(folder) for folder in sweeps]
    parts = []
    for name, (folder, sweep) in zip(names, sweeps.items(), strict=True):
        records = sweep.all_records(folder)
        results = _selected(results_from(sweep, records), options)
        parts.append(Part(name, results, outcomes_so_far(sweep, folder, records), _titles(records)))
    numbers = Numbers(options.percent, options.intervals)
    return (latex if options.latex else markdown)(verdict_on(parts), numbers)


def _titles(records: Mapping[Path, Record]) -> dict[str, str]:
    """The names that recipes have in papers, by their own, from the configuration of one point of each."""
    from mecha_exp.recipe.yaml_reader import TITLE

    titles: dict[str, str] = {}
    for folder, record in records.items():
        recipe = str(record.parameters.get("recipe", ""))
        if recipe in titles or not (folder / CONFIG_FILE).is_file():
            continue
        section = read_settings(folder).get("recipe")
        titles[recipe] = str(section.get(TITLE) or "") if isinstance(section, dict) else ""
    return titles


def _selected(results: Results, options: argparse.Namespace) -> Results:
    """The results grouped by the keys, and showing the metrics, that the options name.

    Raises:
        ConfigError: the sweep lacks a key or a metric.
    """
    problems = Problems()
    for key in options.by or ():
        if key not in results.swept:
            problems.add(f"--by {key}: the sweep did not vary it.{did_you_mean(key, results.swept)}")
    for metric in options.metric or ():
        if metric not in results.metrics:
            problems.add(f"--metric {metric}: nothing measured it.{did_you_mean(metric, results.metrics)}")
    problems.raise_as(ConfigError)
    shown = tuple(options.metric or ())
    if shown and not options.direction and not any(r.metric == shown[0] for r in results.finished):
        raise ConfigError(
            f"--metric {shown[0]}: whether more of it is better is not known. Add --direction maximize or "
            "--direction minimize."
        )
    return replace(
        results,
        by=tuple(options.by or ()),
        shown=shown,
        chosen=shown[0] if shown else None,
        better=options.direction,
    )


def _rows(results: Results) -> list[dict[str, Any]]:
    """The settings, the best first, and the inputs, with every metric."""
    listed: list[dict[str, Any]] = []
    for setting in results.ranked:
        estimates = {metric: setting.estimate(metric) for metric in results.metrics}
        listed.append(
            {
                "kind": "point",
                "settings": dict(setting.values),
                "best": setting is results.best_setting,
                "made_with": setting.made_with,
                "points": len(setting.records),
                "failed": len(setting.records) - len(setting.finished),
                "metrics": {
                    name: {"mean": e.mean, "half_width": e.half_width, "span": e.span, "n": e.count}
                    for name, e in estimates.items()
                    if e.count
                },
            }
        )
    return listed + [
        {"kind": "reference", "name": name, "metrics": values} for name, values in results.references.items()
    ]
