"""Finds the folder of a sweep: that of the last start with the same command, to continue it."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mecha_exp.app.workbench import Workbench
from mecha_exp.checkpoint.transaction.lock import TargetLock
from mecha_exp.errors import CheckpointError, StoreError
from mecha_exp.runs.sweep import LOCKED, SWEEP_FILE

if TYPE_CHECKING:
    from mecha_exp.app.command_line import CommandLine

log = logging.getLogger(__name__)

_NOT_ABOUT_THE_POINTS = ("rerun=", "store=", "tracking=", "tracking.", "hydra/launcher=", "hydra.launcher.")


@contextmanager
def claimed_folder(line: CommandLine, bench: Workbench) -> Iterator[Path]:
    """The folder of a sweep, for this process alone while it runs.

    A sweep goes on in the folder where the same command has begun it, unless another one was asked for
    (`hydra.sweep.dir=...`), everything is to be done again, or another process is at work there.
    """
    fresh = Path(line.config.hydra.sweep.dir)
    if any(word.startswith("hydra.sweep.dir=") for word in line.arguments):
        yield fresh
        return
    key = _key(line)
    before = bench.store.sweep_folder(key) if bench.store and not bench.redoes_everything else None
    folder, lock = _claim(itertools.chain(filter(None, [before]), _fresh(fresh)))
    try:
        if bench.store:
            _keep(bench, key, folder)
        yield folder
    finally:
        lock.release()


def _claim(folders: Iterator[Path]) -> tuple[Path, TargetLock]:
    """Lock and return the first folder that no other process uses."""
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            return folder, TargetLock(folder / LOCKED)
        except CheckpointError:
            log.info("another process is at work in %s", folder)
    raise AssertionError("there is always another folder")


def _fresh(folder: Path) -> Iterator[Path]:
    """The folder, or a new one beside it: two sweeps may start in the same second."""
    numbered = (folder.with_name(f"{folder.name}_{number}") for number in itertools.count(2))
    return (path for path in itertools.chain([folder], numbered) if not (path / SWEEP_FILE).exists())


def _keep(bench: Workbench, key: str, folder: Path) -> None:
    assert bench.store is not None
    try:
        bench.store.put_sweep(key, folder)
    except StoreError as error:
        log.warning("%s", error)


def _key(line: CommandLine) -> str:
    """A key that is equal for two starts of one sweep: a hash of its words and its points."""
    words = sorted(word for word in line.arguments if not word.startswith(_NOT_ABOUT_THE_POINTS))
    # the points change with the files, and the folder counts: paths may be relative and stores shared
    content = [words, line.jobs, str(Path.cwd())]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
