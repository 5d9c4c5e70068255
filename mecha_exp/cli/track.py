"""`python -m mecha_exp track`: log runs and sweeps to MLflow, later or elsewhere."""

from __future__ import annotations

from pathlib import Path

from mecha_exp.cli.arguments import make_parser
from mecha_exp.errors import counted
from mecha_exp.paths import tracking_experiment, tracking_uri
from mecha_exp.runs.record import Record
from mecha_exp.runs.sweep import SWEEP_FILE
from mecha_exp.terminal.console import stdout
from mecha_exp.tracking import Store


def main(arguments: list[str]) -> int:
    """Log the folders' runs and sweeps."""
    parser = make_parser(
        "track",
        "Log finished runs or sweeps to MLflow, for instance after the server was away.",
        "example: python -m mecha_exp track outputs/multiruns/2026-01-31_12-00-00",
    )
    parser.add_argument("folder", nargs="+", type=Path, help="of a run or of a sweep")
    parser.add_argument("--uri", default=tracking_uri(), help="the store (default: %(default)s)")
    parser.add_argument(
        "--experiment", default=tracking_experiment(), help="the experiment (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    from mecha_exp.app.tracking import log_run, log_sweep

    loaded = [
        (folder, is_sweep(folder), None if is_sweep(folder) else Record.load(folder))
        for folder in options.folder
    ]
    store = Store(options.uri, options.experiment)
    for folder, sweep, record in loaded:
        if sweep:
            stdout.print(f"{folder}: logged {counted(log_sweep(folder, store), 'point')}")
        elif record is not None:
            is_new = log_run(folder, record, store)
            stdout.print(f"{folder}: {'logged' if is_new else 'the store has'} '{record.name}'")
    return 0


def is_sweep(folder: Path) -> bool:
    """Whether a folder is the folder of a sweep."""
    return (folder / SWEEP_FILE).is_file()
