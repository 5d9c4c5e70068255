"""One writer per output file: a small lock file beside it that says who is writing.

A plain file rather than a lock of the operating system, so that it works alike on Windows and on network
folders, and can be read. A writer that was killed leaves its lock behind: the next one on the same machine
sees that the process is gone and takes over.
"""

import json
import os
import platform
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from mecha_exp.checkpoint.transaction.paths import LOCK, sibling
from mecha_exp.errors import CheckpointError

# A process id alone is not enough: in a restarted container it may be ours again, or a parent's.
_THIS_PROCESS = uuid.uuid4().hex
_EMPTY_SECONDS = 10  # a lock that is empty for so long is of a process that was killed while it made it


class TargetLock:
    """Held from construction to `release`. CheckpointError where another writer holds it."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._path = sibling(target, LOCK)
        self._text = json.dumps(
            {"pid": os.getpid(), "host": platform.node(), "process": _THIS_PROCESS, "id": uuid.uuid4().hex}
        )
        if not self._create():
            self._remove_if_stale()
            if not self._create():  # another writer was quicker
                raise self._taken(_read(self._path))

    def release(self) -> None:
        """Give the lock back; nothing where it has been taken away."""
        if _read(self._path) == self._text:
            self._path.unlink(missing_ok=True)

    def _create(self) -> bool:
        try:
            file = self._path.open("x", encoding="utf-8")
        except FileExistsError:
            return False
        try:
            with file:
                file.write(self._text)
        except OSError:  # a full disk: an empty lock would be nobody's, and never go
            self._path.unlink(missing_ok=True)
            raise
        return True

    def _remove_if_stale(self) -> None:
        found = _read(self._path)
        if not _is_stale(self._path, found):
            raise self._taken(found)
        if _read(self._path) == found:  # and not replaced in the meantime by whoever saw the same
            self._path.unlink(missing_ok=True)

    def _taken(self, found: str) -> CheckpointError:
        owner = _owner(found)
        who = f"process {owner['pid']} on {owner['host']}" if owner else "another process"
        return CheckpointError(
            f"{self._target} is being written by {who}. Wait for it, choose another output, "
            f"or delete {self._path} if that process is gone."
        )


def is_in_use(target: Path) -> bool:
    """Whether somebody holds the lock of an output, as far as can be told."""
    path = sibling(target, LOCK)
    return path.exists() and not _is_stale(path, _read(path))


def _is_stale(path: Path, text: str) -> bool:
    return _is_gone(_owner(text)) or (not text and _age(path) > _EMPTY_SECONDS)


def _age(path: Path) -> float:
    try:
        status = path.stat()
    except OSError:
        return 0
    return 0 if status.st_size else time.time() - status.st_mtime


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError):
        return ""


def _owner(text: str) -> dict[str, Any]:
    """Who holds a lock, or an empty dict where that cannot be told: then it is not ours to remove."""
    try:
        owner = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    known = isinstance(owner, dict) and type(owner.get("pid")) is int and 0 < owner["pid"] < 2**31
    return owner if known and {"host", "process"} <= owner.keys() else {}


def _is_gone(owner: dict[str, Any]) -> bool:
    if not owner or owner["host"] != platform.node():
        return False
    if owner["pid"] == os.getpid():
        return bool(owner["process"] != _THIS_PROCESS)
    return not _is_running(owner["pid"])


def _is_running(pid: int) -> bool:
    if sys.platform == "win32":  # where os.kill(pid, 0) is not a question but Ctrl-C
        import ctypes

        synchronize, wait_timeout, access_denied = 0x00100000, 0x102, 5
        kernel = ctypes.windll.kernel32
        handle = kernel.OpenProcess(synchronize, False, pid)
        if not handle:
            return bool(kernel.GetLastError() == access_denied)
        running = kernel.WaitForSingleObject(handle, 0) == wait_timeout
        kernel.CloseHandle(handle)
        return bool(running)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True
