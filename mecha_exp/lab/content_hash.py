"""What is in a file: its SHA-256, computed once and remembered until the file changes.

The memory is a text file in the user's cache folder with a line of JSON for each hash. Processes append to it
at the same time; a line that a kill has cut is skipped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from mecha_exp.checkpoint import INDEX, open_stored
from mecha_exp.errors import CheckpointError
from mecha_exp.system.cache import cache_folder
from mecha_exp.system.machine import available_cores

_CHUNK = 1 << 22
_FILE = "contents.jsonl"
_Identity = tuple[str, int, int, int, int]

_known: dict[Path | None, dict[_Identity, str]] = {}
_lock = Lock()

Advance = Callable[[int], None]
"""Told how many more bytes have been read."""


def content_of(path: Path, advance: Advance = lambda nbytes: None) -> str:
    """The SHA-256 of a file, in hex; of a model in several, that of their names and contents.

    A file counts as unchanged while its path, size, time of change (of the data and of the entry) and inode
    stay the same.

    Raises:
        CheckpointError: it cannot be read, or changes meanwhile.
    """
    files = files_of(path)
    if files != (path,):
        parts = [(os.path.relpath(file, path), content_of(file, advance)) for file in files]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    try:
        identity = _identity(path)
        known = _remembered()
        if identity not in known:
            digest = _hash(path, advance)
            if _identity(path) != identity:
                raise CheckpointError(
                    f"{path} changed while it was being read. Run again once it is at rest."
                )
            _remember(identity, digest)
        return known[identity]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error


def files_of(path: Path) -> tuple[Path, ...]:
    """The files that hold a model: itself, or those of a folder or an index of shards.

    Raises:
        CheckpointError: a folder without a model in it.
    """
    if not path.is_dir() and not path.name.endswith(INDEX):
        return (path,)
    with open_stored(path) as model:
        return model.files


def size_of(path: Path) -> int:
    """The bytes of the files that hold a model."""
    return sum(file.stat().st_size for file in files_of(path))


def content_is(path: Path, sha256: str | None) -> bool:
    """Whether a file is there and has that content."""
    try:
        return path.exists() and content_of(path) == sha256
    except (OSError, CheckpointError):
        return False


def contents_of(paths: Iterable[Path], advance: Advance = lambda nbytes: None) -> dict[Path, str]:
    """`content_of` many files, several at a time.

    Raises:
        CheckpointError: the first one that cannot be read.
    """
    wanted = list(dict.fromkeys(paths))
    pool = ThreadPoolExecutor(max(1, min(available_cores(), len(wanted))))
    try:
        return dict(zip(wanted, pool.map(lambda path: content_of(path, advance), wanted), strict=True))
    finally:
        pool.shutdown(cancel_futures=True)


def unread_bytes(paths: Iterable[Path]) -> int:
    """How many bytes `contents_of` would read, which is nothing for files that are remembered."""
    total = 0
    for path in dict.fromkeys(paths):
        for file in files_of(path):
            if _identity(file) not in _remembered():
                total += file.stat().st_size
    return total


def _identity(path: Path) -> _Identity:
    status = path.stat()
    return str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _hash(path: Path, advance: Advance) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(_CHUNK))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            advance(count)
    return digest.hexdigest()


def _memory() -> Path | None:
    folder = cache_folder()
    return folder / _FILE if folder else None


def _remembered() -> dict[_Identity, str]:
    """Every hash that is remembered; the file is read once in a process."""
    path = _memory()
    with _lock:
        if path not in _known:
            _known[path] = _load(path) if path else {}
        return _known[path]


def _load(path: Path) -> dict[_Identity, str]:
    known: dict[_Identity, str] = {}
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return known
    for line in lines:
        try:
            name, size, changed, entered, inode, digest = json.loads(line)
            known[str(name), int(size), int(changed), int(entered), int(inode)] = str(digest)
        except (ValueError, TypeError):
            continue
    return known


def _remember(identity: _Identity, digest: str) -> None:
    path = _memory()
    _remembered()[identity] = digest
    if path is None:
        return
    with contextlib.suppress(OSError):  # nothing is lost but time: the next process reads the file again
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:  # one write of one line, which appending keeps whole
            file.write(json.dumps([*identity, digest]) + "\n")
