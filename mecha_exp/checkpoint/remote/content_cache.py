"""A folder that keeps what was read of remote files, by content, within a number of bytes.

Each range is a file with a checksum, `CONTENT/START-STOP`, written atomically. Processes share the folder:
one that finds a range there need not fetch it, and one that writes much deletes what was used longest ago.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from mecha_exp.checkpoint.remote.pin import Pin
from mecha_exp.errors import ConfigError
from mecha_exp.system.cache import (
    MODELS_SIZE_VARIABLE,
    MODELS_VARIABLE,
    read_checksummed,
    write_checksummed,
)

if sys.platform != "win32":
    import fcntl

DEFAULT_SIZE = 50_000_000_000

_CHECKSUM = 32
"""Bytes of the checksum of a range."""
_SWEPT_EACH = 1 << 26
"""Bytes of the most that is written before the folder is looked through again."""


class Keeper:
    """Ranges of files in a folder, at most `limit` bytes of them."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self._lock = threading.Lock()
        self._written: int | None = None  # since the folder was looked through

    def read_into(self, pin: Pin, start: int, view: memoryview) -> bool:
        """Fill `view` with the bytes from `start` on. Returns False where they are not kept."""
        folder, stop = self.folder / pin.content, start + len(view)
        for name in _names(folder):
            first, _, last = name.partition("-")
            if not (first.isdigit() and last.isdigit() and int(first) <= start and stop <= int(last)):
                continue
            path = folder / name
            content = read_checksummed(path)
            if content is not None and len(content) == int(last) - int(first):
                view[:] = content[start - int(first) : stop - int(first)]
                with contextlib.suppress(OSError):
                    os.utime(path)
                return True
        return False

    @contextlib.contextmanager
    def fetching(self, pin: Pin, start: int, stop: int) -> Iterator[None]:
        """Wait while another process of this machine fetches the same range, which is kept afterwards.

        The lock is the process's, so it ends with it. Without locks, both fetch.
        """
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                folder = self.folder / pin.content
                folder.mkdir(parents=True, exist_ok=True)
                path = folder / f"{start}-{stop}.lock"
                file = stack.enter_context(path.open("wb"))
                stack.callback(path.unlink, missing_ok=True)
                if sys.platform != "win32":
                    fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def write(self, pin: Pin, start: int, content: memoryview) -> None:
        """Keep a range, unless it is larger than all that may be kept."""
        if len(content) > self.limit // 2:
            return
        step = min(_SWEPT_EACH, self.limit // 8)
        with self._lock:
            if self._written is None or self._written + len(content) > step:
                self._sweep(len(content) + step)
                self._written = 0
            self._written += len(content) + _CHECKSUM
            path = self.folder / pin.content / f"{start}-{start + len(content)}"
            if write_checksummed(path, bytes(content)):
                with contextlib.suppress(OSError):
                    os.utime(path)

    def _sweep(self, room: int) -> None:
        """Delete what was used longest ago until there is room."""
        files = []
        for folder in (self.folder / name for name in _names(self.folder)):
            for name in _names(folder):
                with contextlib.suppress(OSError):
                    status = (folder / name).stat()
                    files.append((status.st_mtime_ns, status.st_size, folder / name))
        excess = sum(size for _, size, _ in files) + room - self.limit
        for _, size, path in sorted(files):
            if excess <= 0:
                return
            with contextlib.suppress(OSError):
                path.unlink()
            excess -= size


def keep_in(folder: str | None, size: int | None = None) -> None:
    """Keep what this process and those that it starts read of remote files; None leaves what was set."""
    if folder is not None:
        os.environ[MODELS_VARIABLE] = str(Path(folder).expanduser().absolute())
    if size is not None:
        os.environ[MODELS_SIZE_VARIABLE] = str(size)


def keeper() -> Keeper | None:
    """The keeper that the environment asks for.

    Raises:
        ConfigError: its size is not a number of bytes.
    """
    folder = os.environ.get(MODELS_VARIABLE)
    if not folder:
        return None
    size = os.environ.get(MODELS_SIZE_VARIABLE) or str(DEFAULT_SIZE)
    if not size.isdigit() or not int(size):
        raise ConfigError(f"{MODELS_SIZE_VARIABLE}: expected a number of bytes, got {size!r}")
    return Keeper(Path(folder), int(size))


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except OSError:
        return []
