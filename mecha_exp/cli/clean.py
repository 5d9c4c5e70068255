"""`python -m mecha_exp clean`: delete the files of interrupted merges and results that no run refers to."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mecha_exp.checkpoint import PartialOutput, find_partial_outputs
from mecha_exp.cli.arguments import make_parser
from mecha_exp.errors import CheckpointError, ConfigError
from mecha_exp.paths import OUTPUTS, STORE
from mecha_exp.runs.leftovers import Leftover, find_leftovers, find_task_folders
from mecha_exp.system.progress import human_bytes
from mecha_exp.terminal.console import agrees, print_json, print_line, show_error, stdout

DEFAULT_FOLDERS = (OUTPUTS, Path())
Removable = PartialOutput | Leftover


def main(arguments: list[str]) -> int:
    """List the leftovers, and delete them after confirmation."""
    options = _parser().parse_args(arguments)
    from mecha_exp.runs.orphans import find_unreferenced

    for folder in options.folder:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder.")
    folders = options.folder or DEFAULT_FOLDERS
    leftovers: list[Removable] = [
        *find_partial_outputs(folders),
        *find_leftovers(folders),
        *find_task_folders(),
        *find_unreferenced(options.store, folders),
    ]
    if options.json:
        print_json([{"path": str(it.target), "bytes": it.nbytes, "in_use": it.in_use} for it in leftovers])
        return 0
    idle = [leftover for leftover in leftovers if not leftover.in_use]
    for leftover in leftovers:
        use = ", in use: left alone" if leftover.in_use else ""
        size = human_bytes(leftover.nbytes)
        print_line(f"{size:>10}  {leftover.target}{use}")
    if not idle:
        stdout.print("There is nothing to delete.")
        return 0
    if not (options.yes or _agrees(idle)):
        return 0
    return _delete(idle)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "clean",
        "List what nothing refers to, and delete it after asking: the hidden files that "
        "interrupted merges would go on from, temporary files of "
        "processes that were killed, and stored results of runs whose folders are gone. Nothing "
        "that a running merge needs is touched.",
        "example: python -m mecha_exp clean outputs --yes",
    )
    parser.add_argument(
        "folder",
        nargs="*",
        type=Path,
        help="where to look, with all that is below (default: outputs and the current folder)",
    )
    parser.add_argument("--yes", action="store_true", help="delete without asking")
    parser.add_argument("--json", action="store_true", help="list it for other programs, and delete nothing")
    parser.add_argument(
        "--store", type=Path, default=STORE, help="the store of results (default: %(default)s)"
    )
    return parser


def _agrees(idle: Sequence[Removable]) -> bool:
    if not sys.stdin.isatty():
        stdout.print("Nothing was deleted. Add --yes to do it.")
        return False
    total = human_bytes(sum(leftover.nbytes for leftover in idle))
    return agrees(f"Delete {_counted(idle)}, {total}? (y/N) ")


def _delete(idle: Sequence[Removable]) -> int:
    deleted = []
    for leftover in idle:
        try:
            leftover.remove()
            deleted.append(leftover)
        except (CheckpointError, OSError) as error:
            show_error(str(error))
    total = human_bytes(sum(leftover.nbytes for leftover in deleted))
    stdout.print(f"Deleted {_counted(deleted)}, {total}.")
    return 0 if len(deleted) == len(idle) else 1


def _counted(leftovers: Sequence[Removable]) -> str:
    """The counts by kind, as in `what is left of 2 merges and 1 stored result`."""
    from mecha_exp.runs.orphans import Unreferenced

    merges = sum(isinstance(leftover, PartialOutput) for leftover in leftovers)
    results = sum(isinstance(leftover, Unreferenced) for leftover in leftovers)
    temporary = len(leftovers) - merges - results
    counts = [f"what is left of {merges} merge{'s' * (merges != 1)}"] if merges or not leftovers else []
    counts += [f"{temporary} temporary file{'s' * (temporary != 1)}"] if temporary else []
    counts += [f"{results} stored result{'s' * (results != 1)}"] if results else []
    return " and ".join(counts)
