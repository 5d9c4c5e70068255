"""The user's cache folder.

The folder may be emptied at any time. Processes share it, since files are written atomically. A damaged or
renamed file counts as missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mecha_exp.documents import parse_json
from mecha_exp.system.atomic_write import atomic_write
from mecha_exp.system.texts import json_hash

CACHE_VARIABLE = "MECHA_EXP_CACHE"
"""The environment variable that names the folder; `off` disables the cache."""
MODELS_VARIABLE = "MECHA_MODELS_CACHE"
"""The one that names the folder for what is read of remote models; without it, nothing is kept."""
MODELS_SIZE_VARIABLE = "MECHA_MODELS_CACHE_SIZE"
"""The one that bounds that folder, in bytes."""

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


def private_folder(name: str) -> Path | None:
    """The sub-folder of the cache for what is run as code; None if there is no safe one.

    It belongs to the user, and no other user can write in it. Where the cache is shared and another user has
    made the sub-folder, it is that of the user's own cache.
    """
    cache = cache_folder()
    if cache is None:
        return None
    candidates = [cache]
    with contextlib.suppress(RuntimeError):  # no home
        candidates.append(_user_caches() / "mecha_exp")
    for folder in dict.fromkeys(candidate / name for candidate in candidates):
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if is_private(folder.lstat()):
                return folder
        _log.debug("%s is not used: it is not the user's own", folder)
    return None


def is_private(status: os.stat_result) -> bool:
    """Whether a file or a folder, and no link, belongs to the user and no other user can write to it."""
    if not hasattr(os, "geteuid"):
        return True
    kind = stat.S_IFMT(status.st_mode)
    return (
        kind in (stat.S_IFREG, stat.S_IFDIR) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
    )


def write_cached(path: Path, content: bytes) -> bool:
    """Write a file to the cache. Returns whether that succeeded."""
    try:
        if path.is_file() and is_private(path.lstat()) and path.read_bytes() == content:
            return True
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write_bytes(content)
            file.chmod(0o600)
            os.utime(file, (0, 0))  # numba compares times, so every process writes the same one
    except OSError as error:
        _log.debug("nothing is kept in %s: %s", path.parent, error)
        return False
    return True


def write_checksummed(path: Path, content: bytes) -> bool:
    """Write a file with a checksum of its name and content to the cache. Returns whether that succeeded."""
    return write_cached(path, _checksum(path, content) + content)


def read_checksummed(path: Path) -> bytes | None:
    """Read what `write_checksummed` wrote.

    None if the file is missing, its checksum is wrong, or anybody but the user can have written it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0))
        with os.fdopen(descriptor, "rb") as file:
            if not is_private(os.fstat(descriptor)):
                return None
            data = file.read()
    except OSError:
        return None
    checksum, content = data[:_CHECKSUM_BYTES], data[_CHECKSUM_BYTES:]
    return content if checksum == _checksum(path, content) else None


def made_of(files: Iterable[Path], name: str, make: Callable[[], Any], *facts: str) -> Any:
    """What is made of files and facts alone, as JSON has it: from the cache if that has it of the same ones.

    Args:
        files: all whose texts decide it.
        name: of the file in the cache, with a number that is raised when `make` changes.
        make: makes it.
        facts: what else decides it.
    """
    folder = cache_folder()
    texts = ((path.name, path.read_text(encoding="utf-8")) for path in sorted(files))
    digest = json_hash([name, *facts, *texts])
    path = folder / f"{name}-{digest[:32]}.json" if folder else None
    cached = read_checksummed(path) if path else None
    content = cached if cached is not None else json.dumps(make()).encode()
    if path and cached is None:
        write_checksummed(path, content)
    return parse_json(content)


def _checksum(path: Path, content: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + content).digest()


def _user_caches() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
