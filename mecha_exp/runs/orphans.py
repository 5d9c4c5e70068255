"""Stored results that no run refers to."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from mecha_exp.checkpoint.transaction.lock import is_in_use
from mecha_exp.errors import ConfigError
from mecha_exp.lab.store import STORE_FILE, ResultStore
from mecha_exp.runs.leftovers import Leftover
from mecha_exp.runs.query import find_runs, find_sweeps
from mecha_exp.runs.record import RUN_FILE
from mecha_exp.runs.sweep import LOCKED

_YOUNG_SECONDS = 3600


class Unreferenced(Leftover):
    """A stored result that no run refers to; it is in use while a sweep is running, which may need it."""


def find_unreferenced(store: Path, folders: Iterable[Path]) -> list[Unreferenced]:
    """The results of a store that no run refers to, and the sweeps whose folders no longer exist.

    Runs are looked for beside the store, below the folders, and in the folder that the result names. Results
    younger than an hour are left out, and the others are in use while a sweep below these folders is running:
    it may have found them without a record of it yet.

    Raises:
        ConfigError: the folder is not marked as a store.
    """
    if not store.is_dir():
        return []
    if not (store / STORE_FILE).is_file():
        raise ConfigError(f"{store} is not a store of results: there is no {STORE_FILE} in it.")
    results, folders = ResultStore(store), list(folders)
    known = {run.signature for run in find_runs([store.parent, *folders])}
    known |= {stored.signature for stored in results if (Path(stored.folder) / RUN_FILE).is_file()}
    young = time.time() - _YOUNG_SECONDS
    stale = [p for p in results.points() if p.name not in known and p.stat().st_mtime < young]
    sweeps = [folder for folder, _ in find_sweeps([store.parent, *folders])]
    in_use = any(is_in_use(folder / LOCKED) for folder in sweeps)
    return [Unreferenced(path, _size(path), in_use) for path in [*stale, *results.lost_sweeps()]]


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
