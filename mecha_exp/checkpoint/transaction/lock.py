"""One writer per output file: a lock file beside it, locked by the operating system, that names the holder.

The system frees the lock when its holder dies, so a lock file that is left behind is simply taken over. The
file is deleted only by its holder; a process that had opened it before finds it without a name, and opens the
next one. A lock file that names another machine is respected, since not every network folder shares locks.
"""

import contextlib
import errno
import json
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mecha_exp.checkpoint.positional import PositionalFile
from mecha_exp.checkpoint.transaction.paths import LOCK, sibling
from mecha_exp.documents import DocumentError, parse_json
from mecha_exp.errors import CheckpointError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

log = logging.getLogger(__name__)

_EMPTY_SECONDS = 0.2  # a lock file that stays empty for longer belongs to a process that was killed then
_WAIT_SECONDS, _PAUSE_SECONDS = 0.1, 0.01  # another process may hold the lock only to see whether it is free
_RETRY_SECONDS, _NOTICE_SECONDS = 0.05, 60.0
STUCK_SECONDS = 1800.0
"""After so long without progress of the holder, who waits for a lock gives up."""
_LOCKED_BYTE = 1 << 30  # where Windows locks: the text before it can be read meanwhile

_HELD = {errno.EACCES, errno.EAGAIN, errno.EDEADLK}
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}


class TargetLock:
    """The lock of an output, held from construction to `release`.

    Raises:
        CheckpointError: another writer holds it.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._path = sibling(target, LOCK)
        self._file: PositionalFile | None = self._acquire()
        text = json.dumps({"pid": os.getpid(), "host": platform.node()}).encode()
        try:
            os.ftruncate(self._file.descriptor, 0)
            self._file.write(0, memoryview(text))
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Delete the lock file and free the lock. Idempotent."""
        file, self._file = self._file, None
        if file is None:
            return
        with file:
            is_named = _is_at(file, self._path)  # unless a user has deleted it
            if is_named and sys.platform != "win32":
                self._path.unlink(missing_ok=True)
        if is_named and sys.platform == "win32":  # which does not delete an open file: of the next holder
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _acquire(self) -> PositionalFile:
        deadline = time.monotonic() + _WAIT_SECONDS
        _await_text(self._path)
        while not is_foreign(self._target):
            try:
                file = PositionalFile(self._path, os.O_RDWR | os.O_CREAT)
            except PermissionError:
                if self._path.exists():  # another user's
                    break
                raise
            if _try_lock(file) and _is_at(file, self._path):
                return file
            file.close()
            if time.monotonic() > deadline:
                break
            time.sleep(_PAUSE_SECONDS)
        raise self._held_error()

    def _held_error(self) -> CheckpointError:
        holder = holder_of(self._target)
        return CheckpointError(
            f"{self._target} is being written by {holder}. Wait for it, choose another output, "
            f"or delete {self._path} if that process is gone."
        )


@contextlib.contextmanager
def exclusive(target: Path, sign_of_life: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Hold the lock of an output; wait while others have it. A minute of waiting is logged.

    Args:
        sign_of_life: what changes while the holder works.

    Raises:
        CheckpointError: for `STUCK_SECONDS` the holder was the same, without a sign of life.
    """
    noticed, last, since = time.monotonic() + _NOTICE_SECONDS, None, time.monotonic()
    while True:
        try:
            lock = TargetLock(target)
            break
        except CheckpointError as error:
            now, sign = time.monotonic(), (_made_at(sibling(target, LOCK)), sign_of_life())
            last, since = (last, since) if sign == last else (sign, now)
            if now - since > STUCK_SECONDS:
                raise CheckpointError(f"no progress in {now - since:,.0f} seconds: {error}") from None
            if now > noticed:
                log.warning("waiting: %s", error)
                noticed = now + _NOTICE_SECONDS
            time.sleep(_RETRY_SECONDS)
    try:
        yield
    finally:
        lock.release()


def _made_at(path: Path) -> tuple[int, int] | None:
    """What tells one lock file from the next one at its path."""
    with contextlib.suppress(OSError):
        status = path.stat()
        return status.st_ino, status.st_mtime_ns
    return None


def is_in_use(target: Path) -> bool:
    """Whether a process holds the lock of an output. A lock of another machine counts as held."""
    path = sibling(target, LOCK)
    _await_text(path)
    if is_foreign(target):
        return True
    try:
        with PositionalFile(path, os.O_RDWR) as file:
            return not _try_lock(file)
    except OSError:
        return path.exists()


def is_foreign(target: Path) -> bool:
    """Whether the lock file of an output belongs to another machine."""
    owner = _owner(text) if (text := _read(sibling(target, LOCK))) else None
    return owner is not None and (not owner or owner["host"] != platform.node())


def holder_of(target: Path) -> str:
    """Who holds the lock of an output, in words."""
    owner = _owner(_read(sibling(target, LOCK)))
    return f"process {owner['pid']} on {owner['host']}" if owner else "another process"


def free_lock(target: Path) -> None:
    """Delete the lock file of a writer that is known to be gone, with its machine perhaps."""
    sibling(target, LOCK).unlink(missing_ok=True)


def _try_lock(file: PositionalFile) -> bool:
    """Lock an open file until it is closed. Returns whether that succeeded.

    Where the file system has no locks, a file with text counts as locked.
    """
    try:
        if sys.platform == "win32":
            os.lseek(file.descriptor, _LOCKED_BYTE, os.SEEK_SET)
            msvcrt.locking(file.descriptor, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(file.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return file.stat().st_size == 0
        if error.errno in _HELD:
            return False
        raise
    return True


def _is_at(file: PositionalFile, path: Path) -> bool:
    """Whether a path names this open file."""
    try:
        return os.path.samestat(file.stat(), path.stat())
    except FileNotFoundError:
        return False


def _await_text(path: Path) -> None:
    """Wait until a new lock file has its text, or is known never to get it: its process was killed."""
    deadline = time.monotonic() + _EMPTY_SECONDS
    while _is_new_and_empty(path) and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)


def _is_new_and_empty(path: Path) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    return not status.st_size and time.time() - status.st_mtime < _EMPTY_SECONDS


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _owner(text: str) -> dict[str, Any]:
    """The `pid` and `host` in the text of a lock file; an empty dict for any other text."""
    try:
        owner = parse_json(text)
    except DocumentError:
        return {}
    is_owner = isinstance(owner, dict) and type(owner.get("pid")) is int and 0 < owner["pid"] < 2**31
    return owner if is_owner and "host" in owner else {}
