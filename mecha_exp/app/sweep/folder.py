"""Finds the folder of a sweep: that of the last start with the same command, to continue it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mecha_exp.app.workbench import Workbench
from mecha_exp.checkpoint.transaction.lock import TargetLock
from mecha_exp.checkpoint.transaction.paths import LOCK, sibling
from mecha_exp.errors import CheckpointError, ConfigError, StoreError
from mecha_exp.runs.sweep import LOCKED, SWEEP_FILE
from mecha_exp.system.folders import numbered
from mecha_exp.system.texts import json_hash

if TYPE_CHECKING:
    from mecha_exp.app.command_line import CommandLine

log = logging.getLogger(__name__)

_NOT_ABOUT_THE_POINTS = ("rerun=", "store=", "tracking=", "tracking.", "hydra/launcher=", "hydra.launcher.")
_HOW_FAR = "sweep.trials="
"""The word that a search may be started again with to go further."""


@contextmanager
def claimed_folder(line: CommandLine, bench: Workbench) -> Iterator[Path]:
    """The folder of a sweep, for this process alone while it runs.

    A sweep goes on in the folder where the same command has begun it, unless another one was asked for
    (`hydra.sweep.dir=...`), everything is to be done again, or another process is at work there.

    Raises:
        ConfigError: another process is at work in the folder that was asked for.
    """
    folder = Path(line.config.hydra.sweep.dir)
    if any(word.startswith("hydra.sweep.dir=") for word in line.overrides):
        lock = _lock(folder)
    else:
        key = _key(line)
        before = bench.store.sweep_folder(key) if bench.store and not bench.redoes_everything else None
        candidates = itertools.chain(filter(None, [before]), _fresh(folder))
        folder, lock = _claim(candidates, partial(_keep, bench, key))
    try:
        yield folder
    finally:
        lock.release()


def _lock(folder: Path) -> TargetLock:
    """Keep other processes out of a folder that was asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return TargetLock(folder / LOCKED)
    except CheckpointError:
        raise ConfigError(
            f"another process runs a sweep in {folder}. Wait for it, or choose another folder with "
            f"hydra.sweep.dir=... If that process is gone, delete {sibling(folder / LOCKED, LOCK)}."
        ) from None


def _claim(folders: Iterator[Path], keep: Callable[[Path], None]) -> tuple[Path, TargetLock]:
    """Lock, keep and return the first folder that no other process uses.

    A new folder is kept before it is there, so that no start that is killed leaves one that nothing names.
    """
    for folder in folders:
        is_new = not folder.exists()
        if is_new:
            keep(folder)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = TargetLock(folder / LOCKED)
        except CheckpointError:
            log.info("another process is at work in %s", folder)
            continue
        if not is_new:
            keep(folder)
        return folder, lock
    raise AssertionError("there is always another folder")


def _fresh(folder: Path) -> Iterator[Path]:
    """The folder, or a new one beside it: two sweeps may start in the same second."""
    return (path for path in numbered(folder) if not (path / SWEEP_FILE).exists())


def _keep(bench: Workbench, key: str, folder: Path) -> None:
    """Store that the sweep with a key is in a folder."""
    if bench.store is None:
        return
    try:
        bench.store.put_sweep(key, folder)
    except StoreError as error:
        log.warning("%s", error)


def _key(line: CommandLine) -> str:
    """A key that is equal for two starts of one sweep: a hash of its words and its points."""
    words = sorted(word for word in line.arguments if not word.startswith((*_NOT_ABOUT_THE_POINTS, _HOW_FAR)))
    jobs = [[word for word in job if not word.startswith(_HOW_FAR)] for job in line.jobs]
    # the points change with the files, and the folder counts: paths may be relative and stores shared
    content = [words, jobs, str(Path.cwd())]
    return json_hash(content)[:32]
