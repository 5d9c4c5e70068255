"""A folder that is built beside its target, under a hidden name, and put in its place in one step.

Linux and macOS exchange the names of two folders in one step, so a reader sees the old folder or the new one.
What else lies in the old folder is linked into the new one before. Where that is impossible (another system,
a file system without hard links, a mount point, the current folder) `Inseparable` is raised, and nothing has
changed.
"""

import ctypes
import errno
import os
import shutil
import sys
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from mecha_exp.checkpoint.transaction.paths import PARTIAL, sibling

_AT_CURRENT_FOLDER = -100
_EXCHANGE = 2  # RENAME_EXCHANGE of Linux, RENAME_SWAP of macOS
_OUT_OF_ROOM = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EIO}


class Inseparable(OSError):
    """The target cannot be exchanged as a whole."""


def anchor_of(folder: Path) -> Path:
    """The path whose hidden siblings hold a folder while it is written: the folder itself, or a path in it.

    It is in it where the folder is a disk of its own, or where nothing can be written beside it.
    """
    target = Path(os.path.realpath(folder))
    if not target.is_dir():
        return target
    is_disk = target.stat().st_dev != target.parent.stat().st_dev
    return target / (target.name or "model") if is_disk or not os.access(target.parent, os.W_OK) else target


def staged_folder(folder: Path) -> Path:
    """The hidden folder in which a folder is built."""
    return sibling(anchor_of(folder), PARTIAL)


def publish(staged: Path, target: Path, replaced: Collection[str]) -> None:
    """Put a staged folder in the place of its target, in one step, and delete what was there.

    Args:
        replaced: the files of the target that go, by their path in it. All others stay.

    Raises:
        Inseparable: the target has to be changed file by file.
        OSError: the target is as it was.
    """
    if not target.exists() or not any(target.iterdir()):
        if target.exists():
            shutil.copystat(target, staged)
            if sys.platform == "win32":
                target.rmdir()
        staged.rename(target)
        return
    if Path.cwd().is_relative_to(target) or staged.is_relative_to(target):
        raise Inseparable(errno.EBUSY, "the current folder or the new one is in it")
    try:
        _link_others(target, staged, replaced)
        shutil.copystat(target, staged)
        _exchange(staged, target)
    except OSError as error:
        if error.errno in _OUT_OF_ROOM:
            raise
        raise Inseparable(error.errno, error.strerror) from error
    _bring_late(staged, target, replaced)
    shutil.rmtree(staged, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file or a folder is on the disk, where the system can."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot sync folders
            raise
    finally:
        os.close(descriptor)


def _link_others(target: Path, staged: Path, replaced: Collection[str]) -> None:
    """Give the staged folder all files of the target that are not replaced."""
    for name in _others(target, staged, replaced):
        copy = staged / name
        if not copy.parent.exists():
            copy.parent.mkdir(parents=True)
            shutil.copystat((target / name).parent, copy.parent)
        if (target / name).is_dir() and not (target / name).is_symlink():
            copy.mkdir(exist_ok=True)
        else:
            os.link(target / name, copy, follow_symlinks=False)


def _bring_late(old: Path, new: Path, replaced: Collection[str]) -> None:
    """Move what was made in the old folder while the folders were being exchanged."""
    for name in list(_others(old, new, replaced)):
        if not (old / name).is_dir():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            (old / name).rename(new / name)


def _others(folder: Path, besides: Path, replaced: Collection[str]) -> Iterator[str]:
    """Yield the files and the empty folders that another folder lacks, by their path."""
    for parent, folders, files in os.walk(folder):
        inner = Path(parent).relative_to(folder)
        links = [name for name in folders if Path(parent, name).is_symlink()]
        empty = [inner] if not folders and not files and inner.parts else []
        for path in [*(inner / name for name in [*files, *links]), *empty]:
            if path.as_posix() not in replaced and not os.path.lexists(besides / path):
                yield path.as_posix()


def _exchange(first: Path, second: Path) -> None:
    function, folder = _exchanger()
    names = (os.fsencode(first), os.fsencode(second))
    arguments = (folder, names[0], folder, names[1]) if folder is not None else names
    if function(*arguments, _EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(second))


@cache
def _exchanger() -> tuple[Any, int | None]:
    """The function of the C library that exchanges two names, and the number of the current folder there."""
    name = {"linux": "renameat2", "darwin": "renamex_np"}.get(sys.platform)
    try:
        library = ctypes.CDLL(None, use_errno=True) if name else None
        function = getattr(library, name or "")
    except (AttributeError, OSError):
        raise OSError(errno.ENOSYS, "the system cannot exchange two folders") from None
    return function, _AT_CURRENT_FOLDER if name == "renameat2" else None
