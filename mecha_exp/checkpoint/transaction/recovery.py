"""Finds what interrupted writers left behind, and deletes what no running process needs."""

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mecha_exp.checkpoint.transaction.lock import TargetLock, holder_of, is_in_use
from mecha_exp.checkpoint.transaction.paths import JOURNAL, LOCK, NEW, PARTIAL, disk_bytes, sibling, target_of
from mecha_exp.checkpoint.transaction.staging import anchor_of
from mecha_exp.errors import CheckpointError, some
from mecha_exp.system.folders import hidden_below


@dataclass(frozen=True)
class PartialOutput:
    """The hidden files beside one output.

    Attributes:
        target: the output that was not finished.
        nbytes: their size on the disk.
        in_use: whether a process writes the output, or may do so on another machine.
    """

    target: Path
    nbytes: int
    in_use: bool

    def remove(self) -> None:
        """Delete the files.

        Raises:
            CheckpointError: a process is writing the output.
            OSError: a file cannot be deleted.
        """
        lock = TargetLock(self.target)
        try:
            remove_beside(self.target)
        finally:
            lock.release()


def remove_beside(target: Path) -> None:
    """Delete the partial file and its journal, or the partial folder. The caller holds the lock."""
    for kind in (JOURNAL + NEW, JOURNAL, PARTIAL):  # in this order: a journal without its file means nothing
        path = sibling(target, kind)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def can_resume(path: str | os.PathLike[str]) -> bool:
    """Whether an interrupted writer left something to resume at `path`, a file or a folder."""
    target = Path(path).absolute()
    places = [target, sibling(target, PARTIAL), sibling(anchor_of(target), PARTIAL)]
    targets = [target, *(inner for place in places if place.is_dir() for inner in _targets_below(place))]
    return any(sibling(inner, JOURNAL).is_file() for inner in targets)


def find_partial_outputs(folders: Iterable[Path]) -> list[PartialOutput]:
    """Find all partial outputs below folders, by path. Skips hidden folders and virtual environments."""
    targets = {target.resolve() for folder in folders for target in _targets_below(folder)}
    return [_partial_output(target) for target in sorted(targets)]


def used_targets(folder: Path) -> list[Path]:
    """The files below a folder that processes write, as tasks do that make shards of one model."""
    return [target for target in sorted(set(_targets_below(folder))) if is_in_use(target)]


def require_unused(folder: Path, staged: Path) -> None:
    """Raise CheckpointError if tasks make shards of a folder (see `ShardWriters`) in its staged one."""
    if writers := used_targets(staged):
        holders = some(sorted({holder_of(writer) for writer in writers}))
        locks = some(sorted({str(sibling(writer.with_name("*"), LOCK)) for writer in writers}))
        raise CheckpointError(
            f"{folder} is being made by others: {len(writers)} of its files are locked by {holders}. Wait "
            f"for them, or choose another output. If they are gone, delete {locks}."
        )


def _partial_output(target: Path) -> PartialOutput:
    files = [sibling(target, kind) for kind in (PARTIAL, JOURNAL, JOURNAL + NEW, LOCK)]
    is_used = is_in_use(target) or bool(used_targets(sibling(target, PARTIAL)))
    return PartialOutput(target, sum(map(disk_bytes, files)), is_used)


def _targets_below(folder: Path) -> Iterator[Path]:
    return filter(None, map(target_of, hidden_below(folder)))
