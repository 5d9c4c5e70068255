"""Checks before the work that a file can be written, allocates its space, and explains write errors."""

import errno
import os
import shutil
import tempfile
from pathlib import Path

from mecha_exp.checkpoint.positional import PositionalFile
from mecha_exp.checkpoint.transaction.paths import PARTIAL, disk_bytes, sibling
from mecha_exp.checkpoint.transaction.staging import anchor_of
from mecha_exp.errors import CheckpointError
from mecha_exp.system.write_errors import cause_of, existing_folder

_NO_PREALLOCATION = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}

_MOUNTS = Path("/proc/self/mountinfo")
_IN_MEMORY = {"tmpfs", "ramfs"}


def check_writable(path: str | os.PathLike[str], nbytes: int) -> None:
    """Raise CheckpointError unless a file of `nbytes` can be written to `path`. Leaves nothing behind.

    Folders may be missing: the writer creates them.
    """
    target = Path(path).absolute()
    if "\0" in str(target):
        raise CheckpointError(f"{str(target)!r} is not a file name.")
    try:
        if target.is_dir():
            raise CheckpointError(f"{target} is a folder: name the file to write in it.")
        if target.exists() and not target.is_file():  # the rename would put a file in place of /dev/null
            raise CheckpointError(f"{target} is a pipe, a socket or a device: choose another output.")
        _check_room(target, nbytes)
    except OSError as error:
        raise cannot_write(target, nbytes, error) from error


def check_folder_writable(path: str | os.PathLike[str], nbytes: int) -> None:
    """Raise CheckpointError unless a folder of `nbytes` can be written. Leaves nothing behind."""
    target = Path(path).absolute()
    if "\0" in str(target):
        raise CheckpointError(f"{str(target)!r} is not a file name.")
    try:
        if os.path.lexists(target):
            target.stat()  # a link that leads to nothing, or back to itself
        _check_room(anchor_of(target), nbytes)
    except OSError as error:
        raise cannot_write(target, nbytes, error) from error


def _check_room(target: Path, nbytes: int) -> None:
    """Raise OSError unless there are `nbytes` for a file or folder, which can be made in its parent."""
    folder = existing_folder(target)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    with tempfile.TemporaryFile(dir=folder):
        pass  # os.access says little as root, on Windows and on network drives
    room = shutil.disk_usage(folder).free + disk_bytes(sibling(target, PARTIAL))  # which it takes over
    if room < nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def preallocate(file: PositionalFile, nbytes: int) -> None:
    """Set the size of a file, and allocate its space where the platform can.

    On a disk the allocation only reserves blocks. On a memory disk it touches every page, which takes longer
    than many merges: there the writing threads allocate pages as they go.
    """
    if hasattr(os, "posix_fallocate") and not lies_in_memory(file.descriptor):
        try:
            os.posix_fallocate(file.descriptor, 0, nbytes)
            return
        except OSError as error:
            if error.errno not in _NO_PREALLOCATION:
                raise
    os.ftruncate(file.descriptor, nbytes)


def allocated_blocks(file: PositionalFile, nbytes: int) -> int:
    """The blocks of 512 bytes that a file must have when all its bytes are written; 0 where nothing is known.

    A file that is cut short by another process, and then written on, has fewer. File systems that compress
    count otherwise, so only what `preallocate` has allocated is counted.
    """
    if lies_in_memory(file.descriptor):
        return nbytes // 512
    blocks: int = getattr(file.stat(), "st_blocks", 0)
    return blocks if blocks * 512 >= nbytes else 0


def lies_in_memory(descriptor: int) -> bool:
    """Whether a file is on a memory disk; False where the system does not say."""
    device = os.fstat(descriptor).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    for mount in mounts:  # "24 1 0:22 / /dev/shm rw,nosuid shared:4 - tmpfs tmpfs rw"
        position, _, kind = mount.partition(" - ")
        if position.split(" ")[2:3] == [number]:
            return kind.split(" ")[0] in _IN_MEMORY
    return False


def cannot_write(target: Path, nbytes: int, error: OSError) -> CheckpointError:
    """The error for a file that cannot be written, with the cause and the cure."""
    cause = cause_of(error, existing_folder(target), nbytes) or f"{error.strerror or error}"
    return CheckpointError(f"{target} cannot be written: {cause}.")
