"""Deleting what nothing refers to: what interrupted merges have left, and results whose runs are gone."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape

from mecha_exp.checkpoint import PartialOutput, find_partial_outputs
from mecha_exp.errors import CheckpointError, ConfigError
from mecha_exp.lab.store import ResultStore
from mecha_exp.paths import OUTPUTS, STORE
from mecha_exp.runs.query import find_runs
from mecha_exp.runs.record import RUN_FILE
from mecha_exp.system.progress import human_bytes
from mecha_exp.terminal import print_json, show_error, stdout

DEFAULT_FOLDERS = (OUTPUTS, Path())
_YOUNG_SECONDS = 3600


def main(arguments: list[str]) -> int:
    """`python -m mecha_exp clean [FOLDER ...] [--yes]`"""
    parser = argparse.ArgumentParser(
        prog="python -m mecha_exp clean",
        description="List what nothing refers to, and delete it after asking: the hidden files that "
        "interrupted merges would go on from, and stored results of runs whose folders are gone. Nothing "
        "that a running merge needs is touched.",
        epilog="example: python -m mecha_exp clean outputs --yes",
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
    options = parser.parse_args(arguments)
    for folder in options.folder:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder.")
    folders = options.folder or DEFAULT_FOLDERS
    found: list[Thing] = [*find_partial_outputs(folders), *find_unreferenced(options.store, folders)]
    if options.json:
        print_json([{"path": str(one.target), "bytes": one.nbytes, "in_use": one.in_use} for one in found])
        return 0
    idle = [one for one in found if not one.in_use]
    for one in found:
        use = ", in use: left alone" if one.in_use else ""
        stdout.print(f"{human_bytes(one.nbytes):>10}  {escape(str(one.target))}{use}", soft_wrap=True)
    if not idle:
        stdout.print("There is nothing to delete.")
        return 0
    if not (options.yes or _agrees(idle)):
        return 0
    return _delete(idle)


@dataclass(frozen=True)
class Unreferenced:
    """What a store keeps of a result that no run has any more.

    Attributes:
        target: its folder or file in the store.
        nbytes: what it takes on the disk.
    """

    target: Path
    nbytes: int
    in_use = False

    def remove(self) -> None:
        """Delete it."""
        shutil.rmtree(self.target) if self.target.is_dir() else self.target.unlink(missing_ok=True)


Thing = PartialOutput | Unreferenced


def find_unreferenced(store: Path, folders: Iterable[Path]) -> list[Unreferenced]:
    """The results of a store that no run has any more, and the sweeps whose folders are gone.

    Runs are looked for beside the store, below the folders, and where the result says that it was made. A
    result that is younger than an hour may belong to a sweep that is running.
    """
    if not store.is_dir():
        return []
    results = ResultStore(store)
    known = {run.signature for run in find_runs([store.parent, *folders])}
    known |= {kept.signature for kept in results if (Path(kept.folder) / RUN_FILE).is_file()}
    young = time.time() - _YOUNG_SECONDS
    stale = [p for p in results.places() if p.name not in known and p.stat().st_mtime < young]
    return [Unreferenced(place, _size(place)) for place in [*stale, *results.lost_sweeps()]]


def _size(place: Path) -> int:
    files = place.rglob("*") if place.is_dir() else [place]
    return sum(file.stat().st_size for file in files if file.is_file())


def _agrees(idle: Sequence[Thing]) -> bool:
    if not sys.stdin.isatty():
        stdout.print("Nothing was deleted. Add --yes to do it.")
        return False
    total = human_bytes(sum(leftover.nbytes for leftover in idle))
    answer = stdout.input(f"Delete {_things(idle)}, {total}? (y/N) ")
    return answer.strip().lower() in ("y", "yes")


def _delete(idle: Sequence[Thing]) -> int:
    deleted = []
    for leftover in idle:
        try:
            leftover.remove()
            deleted.append(leftover)
        except (CheckpointError, OSError) as error:
            show_error(str(error))
    total = human_bytes(sum(leftover.nbytes for leftover in deleted))
    stdout.print(f"Deleted {_things(deleted)}, {total}.")
    return 0 if len(deleted) == len(idle) else 1


def _things(things: Sequence[Thing]) -> str:
    """What they are, as in `what is left of 2 merges and 1 stored result`."""
    merges = sum(isinstance(thing, PartialOutput) for thing in things)
    results = len(things) - merges
    said = [f"what is left of {merges} merge{'s' * (merges != 1)}"] if merges or not results else []
    said += [f"{results} stored result{'s' * (results != 1)}"] if results else []
    return " and ".join(said)
