"""The SHA-256 of files, computed once and cached until a file changes.

The cache is an SQLite table in the user's cache folder, with one row per path. Several processes may use it
at once. A cache that is locked, read-only or damaged costs time and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mecha_exp.checkpoint import INDEX, open_stored
from mecha_exp.checkpoint.positional import file_changed, identity_of
from mecha_exp.checkpoint.remote import BY_VERSION, RemoteFile, is_stand_in
from mecha_exp.errors import CheckpointError
from mecha_exp.system.cache import cache_folder
from mecha_exp.system.cores import available_cores
from mecha_exp.system.texts import json_hash

_CHUNK = 1 << 22
_FILE = "contents.sqlite"
_TABLE = "hashes (path BLOB PRIMARY KEY, status TEXT, sha256 TEXT, day INTEGER)"
_DAYS_KEPT = 180
_Identity = tuple[str, str]

_hashes: dict[_Identity, str] = {}
"""The hashes that this process has used."""

Advance = Callable[[int], None]
"""Receives the number of bytes that were read since the last call."""


def content_of(path: Path, advance: Advance = lambda nbytes: None) -> str:
    """The SHA-256 of a file, in hex; for a model in several files, of their names and contents.

    A file counts as unchanged while its path, size, time of change (of the data and of the entry) and inode
    stay the same. A remote file has the hash that its store gives and is never read for one: where none is
    given, `version-` and a hash of its address, version and size stand for its content (see `is_hash`).

    Raises:
        CheckpointError: it cannot be read, or it changes while it is read.
    """
    files = files_of(path)
    if files != (path,):
        contents = contents_of(files, advance)
        parts = [(os.path.relpath(file, path), contents[file]) for file in files]
        mark = "" if all(is_hash(content) for _, content in parts) else BY_VERSION
        return mark + json_hash(parts)
    try:
        identity = _identity(path)
        if is_stand_in(path):
            return _hashes.setdefault(identity, RemoteFile(path).content)
        digest = _cached(identity)
        if digest is None:
            digest = _hash(path, advance)
            if _identity(path) != identity:
                raise file_changed(path)
            _cache(identity, digest)
        return digest
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error


def files_of(path: Path) -> tuple[Path, ...]:
    """The files of a model: the path itself, or the files of a folder or of a shard index.

    Raises:
        CheckpointError: a folder without a model in it.
    """
    if not path.is_dir() and not path.name.endswith(INDEX):
        return (path,)
    with open_stored(path) as model:
        return model.files


def is_hash(content: str) -> bool:
    """Whether a `content_of` a file is the hash of its bytes, and not only a name of their version."""
    return not content.startswith(BY_VERSION)


def size_of(path: Path) -> int:
    """The size of a model's files in bytes."""
    return sum(file.stat().st_size for file in files_of(path))


def content_is(path: Path, sha256: str | None) -> bool:
    """Whether a file exists and has that content."""
    try:
        return path.exists() and content_of(path) == sha256
    except (OSError, CheckpointError):
        return False


def contents_of(paths: Iterable[Path], advance: Advance = lambda nbytes: None) -> dict[Path, str]:
    """The `content_of` many files, several at a time.

    Raises:
        CheckpointError: the first one that cannot be read.
    """
    unique = list(dict.fromkeys(paths))
    known = {path: digest for path in unique if (digest := _known(path))}
    if len(known) == len(unique):  # by each point of a sweep but the first: threads would take longer
        return known
    pool = ThreadPoolExecutor(max(1, min(available_cores(), len(unique))))
    try:
        return dict(zip(unique, pool.map(lambda path: content_of(path, advance), unique), strict=True))
    finally:
        pool.shutdown(cancel_futures=True)


def keep_hash(path: Path, sha256: str, identity: tuple[int, int, int]) -> None:
    """Have `content_of` find the hash of a file that was computed while it was written.

    Args:
        identity: of the file that was written (see `identity_of`); nothing is kept of another one.
    """
    with contextlib.suppress(OSError):
        status = path.stat()
        if identity_of(status) == identity:
            _cache(_identity_in(path, status), sha256)


def _known(path: Path) -> str | None:
    """The hash of a file that is unchanged since this process has used it."""
    try:
        return _hashes.get(_identity(path))
    except OSError:  # which `content_of` reports
        return None


def unread_bytes(paths: Iterable[Path]) -> int:
    """How many bytes `contents_of` would read: none where hashes are cached, and none of remote files."""
    total = 0
    for path in dict.fromkeys(paths):
        for file in files_of(path):
            if not is_stand_in(file) and _cached(_identity(file)) is None:
                total += file.stat().st_size
    return total


def _identity(path: Path) -> _Identity:
    """The path of a file, and what changes with its content."""
    return _identity_in(path, path.stat())


def _identity_in(path: Path, status: os.stat_result) -> _Identity:
    """The `_identity` of a file whose status is known."""
    numbers = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
    return str(path.resolve()), " ".join(map(str, numbers))


def _hash(path: Path, advance: Advance) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(_CHUNK))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            advance(count)
    return digest.hexdigest()


def _cached(identity: _Identity) -> str | None:
    if identity not in _hashes:
        path, status = identity
        for (sha256,) in _query("SELECT sha256 FROM hashes WHERE path = ? AND status = ?", path, status):
            _hashes[identity] = str(sha256)
    return _hashes.get(identity)


def _cache(identity: _Identity, sha256: str) -> None:
    _hashes[identity] = sha256
    today = int(time.time()) // 86400
    _query("REPLACE INTO hashes VALUES (?, ?, ?, ?)", *identity, sha256, today)
    _query("DELETE FROM hashes WHERE day < ?", None, today - _DAYS_KEPT)


def _query(statement: str, path: str | None, *values: Any) -> list[Any]:
    """Run a statement on the cached hashes; returns no rows if there is no cache or it cannot be used."""
    import sqlite3  # here, because most commands hash nothing

    folder = cache_folder()
    if folder is None:
        return []
    file = folder / _FILE
    parameters = values if path is None else (os.fsencode(path), *values)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.closing(sqlite3.connect(file)) as database, database:
            database.execute("PRAGMA synchronous = OFF")  # a cache need not survive a power failure
            database.execute(f"CREATE TABLE IF NOT EXISTS {_TABLE}")
            return database.execute(statement, parameters).fetchall()
    except (OSError, sqlite3.OperationalError):  # locked, read-only, or a full disk
        return []
    except sqlite3.DatabaseError:  # damaged: start afresh
        with contextlib.suppress(OSError):
            file.unlink()
        return []
