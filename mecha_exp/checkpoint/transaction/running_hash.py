"""The SHA-256 of a file while it is written, by a thread that reads it as far as it is complete.

What was just written is still in the system's cache, and what waits for the disk leaves the processor to the
hash: it is there soon after the last byte, where reading the file again takes a second for each 1.5 GB.
"""

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import TypeAlias

from mecha_exp.checkpoint.positional import PositionalFile
from mecha_exp.errors import CheckpointError
from mecha_exp.system.cores import available_cores

Hashed: TypeAlias = Callable[[Path, str, tuple[int, int, int]], object]
"""Receives the path of a finished file, its SHA-256 and its identity (see `identity_of`)."""

THREAD_NAME = "mecha_exp hash"
"""The name of the threads."""

_CHUNK = 1 << 20
_TURN = 1 << 26
"""Bytes after which a thread lets that of another file go on."""
_SECONDS = 0.5

_turns = threading.Semaphore(available_cores())


class RunningHash:
    """The hash of one file in the making.

    Args:
        file: the file, which stays open until `result` or `stop` has returned.
        ends: by key the first byte after it. All bytes that belong to no key are there.
        nbytes: the size of the file.
    """

    def __init__(self, file: PositionalFile, ends: Mapping[str, int], nbytes: int) -> None:
        self._file = file
        self._nbytes = nbytes
        self._missing = deque(sorted(ends.items(), key=itemgetter(1)))
        self._complete: set[str] = set()
        self._limit = 0  # how many bytes are complete, from the first one on
        self._is_stopped = False
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self._sha256: str | None = None
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def add(self, keys: Iterable[str]) -> None:
        """Let keys be read: all of their bytes are in the file."""
        with self._changed:
            self._complete.update(keys)
            while self._missing and self._missing[0][0] in self._complete:
                key, self._limit = self._missing.popleft()
                self._complete.remove(key)
            if not self._missing:
                self._limit = self._nbytes
            self._changed.notify()

    def result(self) -> str | None:
        """Wait until all keys are read; returns the SHA-256 in hex, or None if the file could not be read."""
        while not self._ended.wait(_SECONDS):  # without a limit, Windows does not hear Ctrl-C
            pass
        return self._sha256

    def stop(self) -> None:
        """End the thread, whatever it has read. Idempotent."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._sha256 = self._read()
        except CheckpointError:  # who reads the file for its hash then meets it again
            pass
        finally:
            self._ended.set()

    def _read(self) -> str | None:
        """Hash what is complete until that is all; None if it was stopped before."""
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(_CHUNK))
        done = 0
        while done < self._nbytes:
            limit = min(self._wait_beyond(done), done + _TURN)
            with _turns:
                while done < limit:
                    if self._is_stopped:
                        return None
                    part = buffer[: limit - done]
                    self._file.read_into(done, part)
                    digest.update(part)
                    done += len(part)
        return digest.hexdigest()

    def _wait_beyond(self, done: int) -> int:
        """Wait for more complete bytes; returns how many there are, or all once it is stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or self._limit > done)
            return self._nbytes if self._is_stopped else self._limit
