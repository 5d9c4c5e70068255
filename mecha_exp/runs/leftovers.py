"""Hidden files and folders that killed processes left behind, besides those of merges."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mecha_exp.checkpoint.transaction.paths import disk_bytes
from mecha_exp.cluster.processes import TASKS
from mecha_exp.system.atomic_write import PARTIAL_NAME
from mecha_exp.system.folders import hidden_below

_LIVES_SECONDS = {
    PARTIAL_NAME: 60,  # a small file that is written atomically
    re.compile(r"\..+\.db\.[a-z0-9_]{8}"): 600,  # MLflow's new database
    re.compile(r"\.reproduce-[a-z0-9_]{8}"): 3600,  # a model that is made again
    re.compile(r"\..+\.calibration"): 3600,  # the sums of a calibration, which can go on
    re.compile(r"\.shares"): 24 * 3600,  # the points of a sweep that are handed out, and jobs' logs
    re.compile(r"\..+\.mecha-jobs"): 24 * 3600,  # calls and logs of the jobs of a merge by many
    re.compile(r"\.evaluation-[0-9a-f]{16}\.partial.*"): 3600,  # the parts of a measurement, which can go on
}
"""The names of temporary files and folders, and how long they may stay unchanged while they are in use."""


_DAY_SECONDS, _CONTAINER_SECONDS = 24 * 3600, 3600
"""How long folders of calls may stay unchanged: another container that shares them has other processes."""


@dataclass(frozen=True)
class Leftover:
    """A file or folder that may be deleted, such as a temporary one.

    Attributes:
        target: its path.
        nbytes: its size on the disk.
        in_use: whether a process may need it: it was changed recently.
    """

    target: Path
    nbytes: int
    in_use: bool

    def remove(self) -> None:
        """Delete the leftover."""
        if self.target.is_dir() and not self.target.is_symlink():
            shutil.rmtree(self.target)
        else:
            self.target.unlink(missing_ok=True)


def find_leftovers(folders: Iterable[Path]) -> list[Leftover]:
    """Find all temporary files and folders below folders, by path. Skips other hidden folders."""
    paths = {path.resolve(): seconds for folder in folders for path, seconds in _below(folder)}
    return [
        Leftover(path, disk_bytes(path), time.time() - _changed(path) < seconds)
        for path, seconds in sorted(paths.items())
    ]


def find_task_folders() -> list[Leftover]:
    """The folders of calls, among the temporary files of this user, whose process has ended."""
    paths = sorted(Path(tempfile.gettempdir()).glob(f"{TASKS}*"))
    return [Leftover(path, disk_bytes(path), False) for path in paths if _is_of_the_dead(path)]


def _is_of_the_dead(path: Path) -> bool:
    """Whether no process of this machine has a folder of calls; one without a number is left for a day."""
    with contextlib.suppress(OSError):
        if hasattr(os, "getuid") and path.lstat().st_uid != os.getuid():
            return False
        number = path.name.removeprefix(TASKS).partition("-")[0]
        if not number.isdigit() or sys.platform == "win32":
            return time.time() - _changed(path) > _DAY_SECONDS
        try:
            os.kill(int(number), 0)
        except ProcessLookupError:
            return time.time() - _changed(path) > _CONTAINER_SECONDS
    return False


def _below(folder: Path) -> Iterator[tuple[Path, int]]:
    for path in hidden_below(folder):
        seconds = next((s for pattern, s in _LIVES_SECONDS.items() if pattern.fullmatch(path.name)), None)
        if seconds is not None:
            yield path, seconds


def _changed(path: Path) -> float:
    """When a file, or anything in a folder, was changed last, in seconds since 1970."""
    inner = path.rglob("*") if path.is_dir() and not path.is_symlink() else ()
    return max((file.lstat().st_mtime for file in (path, *inner) if os.path.lexists(file)), default=0)
