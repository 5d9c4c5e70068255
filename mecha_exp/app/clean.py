"""Deleting what interrupted merges have left behind."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape

from mecha_exp.app.display import human_bytes, out, show_error
from mecha_exp.checkpoint import Leftover, find_leftovers
from mecha_exp.errors import CheckpointError, ConfigError

DEFAULT_FOLDERS = (Path("outputs"), Path())


def main(arguments: list[str]) -> int:
    """`python -m mecha_exp clean [FOLDER ...] [--yes]`"""
    parser = argparse.ArgumentParser(
        prog="python -m mecha_exp clean",
        description="List what interrupted merges have left behind, and delete it after asking: the hidden "
        "files that a merge would go on from. Nothing that a running merge needs is touched.",
        epilog="example: python -m mecha_exp clean outputs --yes",
    )
    parser.add_argument(
        "folder",
        nargs="*",
        type=Path,
        help="where to look, with all that is below (default: outputs and the current folder)",
    )
    parser.add_argument("--yes", action="store_true", help="delete without asking")
    options = parser.parse_args(arguments)
    for folder in options.folder:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder.")
    found = find_leftovers(options.folder or DEFAULT_FOLDERS)
    idle = [leftover for leftover in found if not leftover.in_use]
    for leftover in found:
        use = ", in use: left alone" if leftover.in_use else ""
        out.print(f"{human_bytes(leftover.nbytes):>10}  {escape(str(leftover.target))}{use}", soft_wrap=True)
    if not idle:
        out.print("There is nothing to delete.")
        return 0
    if not (options.yes or _agrees(idle)):
        return 0
    return _delete(idle)


def _agrees(idle: Sequence[Leftover]) -> bool:
    if not sys.stdin.isatty():
        out.print("Nothing was deleted. Add --yes to do it.")
        return False
    total = human_bytes(sum(leftover.nbytes for leftover in idle))
    answer = out.input(f"Delete what is left of {_merges(len(idle))}, {total}? (y/N) ")
    return answer.strip().lower() in ("y", "yes")


def _delete(idle: Sequence[Leftover]) -> int:
    deleted = []
    for leftover in idle:
        try:
            leftover.remove()
            deleted.append(leftover)
        except (CheckpointError, OSError) as error:
            show_error(str(error))
    total = human_bytes(sum(leftover.nbytes for leftover in deleted))
    out.print(f"Deleted what was left of {_merges(len(deleted))}, {total}.")
    return 0 if len(deleted) == len(idle) else 1


def _merges(count: int) -> str:
    return f"{count} merge{'' if count == 1 else 's'}"
