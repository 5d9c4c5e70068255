"""Atomic writes of small files: a file appears complete or not at all."""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

PARTIAL_NAME = re.compile(r"\..+\.([0-9a-f]{16}|\d+-\d+)\.partial")
"""The names until then, of which a process that is killed leaves one behind."""

_OF_THE_DISK = {errno.ENOSPC, errno.EFBIG, errno.EIO, getattr(errno, "EDQUOT", errno.ENOSPC)}


@contextmanager
def atomic_write(path: Path, temporary: Path | None = None) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename it to `path` at the end. An error deletes it.

    Args:
        path: the file that appears.
        temporary: the name until then, in the same folder; by default one that no other thread
            uses. Numbers of processes would not do: containers have equal ones.
    """
    if temporary is None:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None and error.errno in _OF_THE_DISK:
            error.filename = str(path)  # of a write, for which the system names no file
        raise


def replace_text(path: Path, text: str, newline: str | None = None) -> None:
    """Write a text in UTF-8 atomically; to a link's file, and to a pipe or a device as to any file.

    Half a character, which UTF-8 has no bytes for, is written as its code.
    """
    target = Path(os.path.realpath(path))
    is_special = target.exists() and not target.is_file()
    with nullcontext(target) if is_special else atomic_write(target) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace", newline=newline)


def atomic_write_text(path: Path, text: str) -> None:
    """Write a text with a newline at its end atomically. Creates the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, text + "\n")
