"""Why a file cannot be written, and how to mend it: a sentence for what the system says."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path

from mecha_exp.system.progress import human_bytes


def cause_of(error: OSError, folder: Path | None, nbytes: int | None = None) -> str | None:
    """The cause of a failed write and its cure; None for errors that say nothing of a disk or a right.

    Args:
        error: that writing raised.
        folder: in which the file was to be written; it exists. None where it is not known.
        nbytes: the size of the file, where it is known.
    """
    sizes = [] if nbytes is None else [f"{human_bytes(nbytes)} needed"]
    with contextlib.suppress(OSError):
        sizes += [] if folder is None else [f"{human_bytes(shutil.disk_usage(folder).free)} free"]
    room = f" ({', '.join(sizes)})" if sizes else ""
    folder = folder or Path()
    causes = {
        errno.ENOSPC: f"the disk is full{room}. Make room or choose another folder",
        getattr(errno, "EDQUOT", -1): f"your disk quota is used up{room}",
        errno.EFBIG: f"the file is larger than its file system or 'ulimit -f' allows{room}",
        errno.EACCES: f"no permission to write in {folder}",
        errno.EPERM: f"no permission to write in {folder}",
        errno.EROFS: f"{folder} is read-only",
        errno.ENOTDIR: f"{folder} is not a folder",
        errno.EEXIST: f"{folder} is not a folder",
        errno.ELOOP: "it is a symbolic link that leads back to itself",
        errno.EMFILE: "too many files are open. Raise the limit with 'ulimit -n 4096'",
    }
    return causes.get(error.errno or 0)


def write_sentence(error: OSError) -> str | None:
    """The message for a write that failed somewhere in the program; None if a bug is more likely.

    >>> write_sentence(OSError(30, "Read-only file system", "/mnt/new.json"))
    '/mnt/new.json cannot be written: /mnt is read-only.'
    """
    file = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else None
    if error.errno == errno.ENOENT and file and not os.path.lexists(file.absolute().parent):
        return f"{file} cannot be written: its folder is gone, moved or deleted while it was used."
    if error.errno not in (
        errno.ENOSPC,
        errno.EROFS,
        errno.EFBIG,
        getattr(errno, "EDQUOT", -1),
        errno.EMFILE,
    ):
        return None
    cause = cause_of(error, existing_folder(file.absolute()) if file else None)
    what = "opened" if error.errno == errno.EMFILE else "written"  # it may have been read
    return f"{file or 'a file'} cannot be {what}: {cause}."


def existing_folder(target: Path) -> Path:
    """The nearest parent that there is."""
    return next(parent for parent in target.parents if os.path.lexists(parent))
