"""Stored results that no run refers to."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mecha_exp.lab.store import ResultStore
from mecha_exp.runs.query import find_runs
from mecha_exp.runs.record import RUN_FILE

_YOUNG_SECONDS = 3600


@dataclass(frozen=True)
class Unreferenced:
    """A stored result that no run refers to.

    Attributes:
        target: its folder or file in the store.
        nbytes: its size on the disk.
    """

    target: Path
    nbytes: int
    in_use = False

    def remove(self) -> None:
        """Delete it."""
        shutil.rmtree(self.target) if self.target.is_dir() else self.target.unlink(missing_ok=True)


def find_unreferenced(store: Path, folders: Iterable[Path]) -> list[Unreferenced]:
    """The results of a store that no run refers to, and the sweeps whose folders no longer exist.

    Runs are looked for beside the store, below the folders, and in the folder that the result names. Results
    younger than an hour are left out: they may belong to a sweep that is running.
    """
    if not store.is_dir():
        return []
    results = ResultStore(store)
    known = {run.signature for run in find_runs([store.parent, *folders])}
    known |= {stored.signature for stored in results if (Path(stored.folder) / RUN_FILE).is_file()}
    young = time.time() - _YOUNG_SECONDS
    stale = [p for p in results.points() if p.name not in known and p.stat().st_mtime < young]
    return [Unreferenced(path, _size(path)) for path in [*stale, *results.lost_sweeps()]]


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
