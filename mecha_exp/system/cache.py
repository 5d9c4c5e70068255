"""The user's cache folder.

The folder may be emptied at any time. Processes share it, since files are written atomically. A damaged or
renamed file counts as missing.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from pathlib import Path

from mecha_exp.system.atomic_write import atomic_write

CACHE_VARIABLE = "MECHA_EXP_CACHE"
"""The environment variable that names the folder; `off` disables the cache."""

_CHECKSUM_BYTES = 32
_log = logging.getLogger(__name__)


def cache_folder() -> Path | None:
    """The folder of $MECHA_EXP_CACHE, or one in the user's folder for caches; None if the cache is off."""
    setting = os.environ.get(CACHE_VARIABLE)
    if setting:
        return None if setting == "off" else Path(setting)
    try:
        return _user_caches() / "mecha_exp"
    except RuntimeError:  # no home
        return None


def write_cached(path: Path, content: bytes) -> bool:
    """Write a file to the cache. Returns whether that succeeded."""
    try:
        if path.is_file() and path.read_bytes() == content:
            return True
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write_bytes(content)
            os.utime(file, (0, 0))  # numba compares times, so every process writes the same one
    except OSError as error:
        _log.debug("nothing is kept in %s: %s", path.parent, error)
        return False
    return True


def write_checksummed(path: Path, content: bytes) -> bool:
    """Write a file with a checksum of its name and content to the cache. Returns whether that succeeded."""
    return write_cached(path, _checksum(path, content) + content)


def read_checksummed(path: Path) -> bytes | None:
    """Read what `write_checksummed` wrote; None if the file is missing or its checksum is wrong."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    checksum, content = data[:_CHECKSUM_BYTES], data[_CHECKSUM_BYTES:]
    return content if checksum == _checksum(path, content) else None


def _checksum(path: Path, content: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + content).digest()


def _user_caches() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
