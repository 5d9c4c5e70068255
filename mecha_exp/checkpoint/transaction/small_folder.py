"""A few files that mean something together alone, put into a folder in one step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from mecha_exp.checkpoint.transaction.lock import TargetLock
from mecha_exp.checkpoint.transaction.paths import disk_bytes, target_of
from mecha_exp.checkpoint.transaction.recovery import remove_beside
from mecha_exp.checkpoint.transaction.space import cannot_write
from mecha_exp.checkpoint.transaction.staging import Inseparable, anchor_of, publish, staged_folder, sync
from mecha_exp.system.atomic_write import PARTIAL_NAME
from mecha_exp.system.folders import files_below


@contextlib.contextmanager
def replaced_together(folder: Path, deciding: str) -> Iterator[Path]:
    """Yield a hidden folder, whose files take their places in `folder` at the end, all or none.

    Other files of the folder stay. Where no system call exchanges two folders, the file without which the
    others mean nothing is deleted first and put in place last: a kill between leaves no mixture.

    Args:
        folder: made where it is missing, with its parents.
        deciding: the name of that file.

    Raises:
        CheckpointError: another process writes the folder, or it cannot be written; it is as it was then.
    """
    anchor, staged = anchor_of(folder), staged_folder(folder)
    try:
        anchor.parent.mkdir(parents=True, exist_ok=True)
        lock = TargetLock(anchor)
    except OSError as error:
        raise cannot_write(folder.absolute(), 0, error) from error
    try:
        remove_beside(anchor)
        staged.mkdir()
        yield staged
        _put(staged, Path(os.path.realpath(folder)), deciding)
    except OSError as error:
        raise cannot_write(folder.absolute(), disk_bytes(staged), error) from error
    finally:
        try:
            remove_beside(anchor)
        finally:
            lock.release()


def is_begun(folder: Path) -> bool:
    """Whether a writer that was killed has left its hidden folder: what else is missing was there before."""
    return staged_folder(folder).is_dir()


def is_leftover(path: Path) -> bool:
    """Whether a file is one that a killed process of ours leaves behind, and no content of a user."""
    return target_of(path) is not None or PARTIAL_NAME.fullmatch(path.name) is not None


def _put(staged: Path, target: Path, deciding: str) -> None:
    names = files_below(staged)
    for path in (*names.values(), staged):
        sync(path)
    try:
        publish(staged, target, names)
    except Inseparable:
        (target / deciding).unlink(missing_ok=True)
        for name in sorted(names, key=lambda name: name == deciding):
            (staged / name).replace(target / name)
    sync(target.parent)
