"""The user's cache folder: what is dear to make, kept for the next process.

Nothing in it is needed. Processes may share it, since files are written under another name and renamed; one
that is broken, or of another name, counts as not there.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from pathlib import Path

from mecha_exp.system.atomic_write import atomic_write

CACHE_VARIABLE = "MECHA_EXP_CACHE"
"""Names the folder; `off` keeps nothing."""

_SEAL_BYTES = 32
_log = logging.getLogger(__name__)


def cache_folder() -> Path | None:
    """The folder: $MECHA_EXP_CACHE, or one in the user's folder for caches; None where nothing is kept."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return None if chosen == "off" else Path(chosen)
    try:
        return _user_caches() / "mecha_exp"
    except RuntimeError:  # no home
        return None


def write_cached(path: Path, content: bytes) -> bool:
    """Have a file in the cache; whether it could be written."""
    try:
        if path.is_file() and path.read_bytes() == content:
            return True
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write_bytes(content)
            os.utime(file, (0, 0))  # numba compares times, and every process is to write the same one
    except OSError as error:
        _log.debug("nothing is kept in %s: %s", path.parent, error)
        return False
    return True


def write_checksummed(path: Path, content: bytes) -> bool:
    """The same, of a file that tells whether it is whole and of that name."""
    return write_cached(path, _seal(path, content) + content)


def read_checksummed(path: Path) -> bytes | None:
    """What `write_checksummed` wrote; None where there is nothing that can be trusted."""
    try:
        whole = path.read_bytes()
    except OSError:
        return None
    seal, content = whole[:_SEAL_BYTES], whole[_SEAL_BYTES:]
    return content if seal == _seal(path, content) else None


def _seal(path: Path, content: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + content).digest()


def _user_caches() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
