"""Locks beside a study that several processes share: one asks for trials at a time, and the dead are known.

The operating system, or the database, frees a lock when its holder dies. So nothing waits for a timeout, and
a process that is slow is never taken for dead.
"""

from __future__ import annotations

import logging
import platform
import time
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mecha_exp.checkpoint.transaction.lock import TargetLock, is_in_use
from mecha_exp.errors import CheckpointError

if TYPE_CHECKING:
    import sqlalchemy

log = logging.getLogger(__name__)

_PAUSE_SECONDS, _NOTICE_SECONDS = 0.05, 60.0
_POSTGRES_CLASS = "mecha_exp"


class Locks(Protocol):
    """The locks of a study."""

    def exclusive(self) -> AbstractContextManager[None]:
        """Wait until no other process is in here."""

    def enter(self, worker: str) -> None:
        """Announce that this process works under a name, until it leaves or dies."""

    def leave(self) -> None:
        """Take back what was announced. Idempotent."""

    def is_alive(self, worker: str) -> bool:
        """Whether the process that works under a name still does."""


class FileLocks:
    """Locks as files beside the file of a study, for processes that see the same folder.

    A lock of another machine counts as held until that machine frees it, since not every network folder
    shares locks.
    """

    def __init__(self, file: Path) -> None:
        self._file = file.absolute()
        self._held: TargetLock | None = None

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Wait until no other process is in here."""
        noticed = time.monotonic() + _NOTICE_SECONDS
        while True:
            try:
                lock = TargetLock(self._file)
                break
            except CheckpointError as error:
                if time.monotonic() > noticed:
                    log.warning("waiting: %s", error)
                    noticed = time.monotonic() + _NOTICE_SECONDS
                time.sleep(_PAUSE_SECONDS)
        try:
            yield
        finally:
            lock.release()

    def enter(self, worker: str) -> None:
        """Announce that this process works under a name, until it leaves or dies."""
        self._held = TargetLock(self._of(worker))

    def leave(self) -> None:
        """Take back what was announced. Idempotent."""
        if self._held is not None:
            self._held.release()
            self._held = None

    def is_alive(self, worker: str) -> bool:
        """Whether the process that works under a name still does."""
        return is_in_use(self._of(worker))

    def _of(self, worker: str) -> Path:
        return self._file.with_name(f"{self._file.name}.{worker}")


class PostgresLocks:
    """Advisory locks of a session of PostgreSQL, which frees them when the connection ends.

    Source: PostgreSQL's documentation, "Explicit Locking", 13.3.5.
    """

    def __init__(self, engine: sqlalchemy.Engine, study: str) -> None:
        self._engine, self._study = engine, study
        self._session: sqlalchemy.Connection | None = None

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Wait until no other process is in here."""
        self._ask("pg_advisory_lock", "")
        try:
            yield
        finally:
            self._ask("pg_advisory_unlock", "")

    def enter(self, worker: str) -> None:
        """Announce that this process works under a name, until it leaves or dies."""
        self._ask("pg_advisory_lock", worker)

    def leave(self) -> None:
        """Take back what was announced. Idempotent."""
        if self._session is not None:
            self._session.close()
            self._session = None
            self._engine.dispose()  # the session itself, and its locks, live as long as the pool keeps it

    def is_alive(self, worker: str) -> bool:
        """Whether the process that works under a name still does."""
        is_free = self._ask("pg_try_advisory_lock", worker)
        if is_free:
            self._ask("pg_advisory_unlock", worker)
        return not is_free

    def _ask(self, function: str, name: str) -> bool:
        """Call a function of PostgreSQL with the two numbers that stand for a lock of this study."""
        from sqlalchemy import text

        if self._session is None:
            self._session = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        keys = [_signed(zlib.crc32(part.encode())) for part in (f"{_POSTGRES_CLASS} {self._study}", name)]
        return bool(self._session.execute(text(f"SELECT {function}({keys[0]}, {keys[1]})")).scalar())


def _signed(number: int) -> int:
    """A number of 32 bits as PostgreSQL's signed integer."""
    return number - 2**32 if number >= 2**31 else number


def new_worker() -> str:
    """A name for this process that no other one has."""
    import uuid

    return f"{platform.node()}-{uuid.uuid4().hex[:12]}"
