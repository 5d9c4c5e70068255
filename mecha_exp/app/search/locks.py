"""Locks beside a study that several processes share: one asks for trials at a time, and the dead are known.

The operating system, or the database, frees a lock when its holder dies, so no process waits for a dead one.
One that holds a lock for half an hour is stopped or hangs: those that wait give up, and name it.
"""

from __future__ import annotations

import hashlib
import logging
import platform
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from mecha_exp.checkpoint.transaction.lock import STUCK_SECONDS, TargetLock, exclusive, is_in_use

if TYPE_CHECKING:
    import sqlalchemy

log = logging.getLogger(__name__)

_PAUSE_SECONDS, _NOTICE_SECONDS = 0.05, 60.0
_NAMESPACE = "mecha_exp"
_LONGEST_IDLE_SECONDS = 2_147_483
"""The largest `wait_timeout` that MySQL takes on every system, 24 days."""


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

    def exclusive(self) -> AbstractContextManager[None]:
        """Wait until no other process is in here."""
        return exclusive(self._file)

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


class DatabaseLocks(ABC):
    """Locks of a session of a database, which frees them when the connection ends.

    Args:
        engine: of SQLAlchemy, without a pool: a connection that is kept would keep its locks.
        study: the name of the study.
    """

    _preparation = ""
    """The first statement of a new session."""

    def __init__(self, engine: sqlalchemy.Engine, study: str) -> None:
        self._engine, self._study = engine, study
        self._session: sqlalchemy.Connection | None = None

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Wait until no other process is in here."""
        self._lock("")
        try:
            yield
        finally:
            self._unlock("")

    def enter(self, worker: str) -> None:
        """Announce that this process works under a name, until it leaves or dies."""
        self._lock(worker)

    def leave(self) -> None:
        """Take back what was announced. Idempotent."""
        if self._session is not None:
            self._session.close()
            self._session = None
            self._engine.dispose()  # the session itself, and its locks, live as long as the pool keeps it

    def is_alive(self, worker: str) -> bool:
        """Whether the process that works under a name still does."""
        return self._is_held(worker)

    def _lock(self, name: str) -> None:
        """Wait for a lock of this study, as long as its holders change.

        Raises:
            TimeoutError: one of them has had it for `STUCK_SECONDS`.
        """
        holder, waited = None, 0.0
        while not self._waits_for(name):
            log.warning("waiting: another process asks for trials of the study '%s'", self._study)
            now = self._holder(name)
            waited = waited + _NOTICE_SECONDS if now == holder else 0.0
            holder = now
            if waited >= STUCK_SECONDS:
                raise TimeoutError(
                    f"session {holder} of the database has had the lock of the study '{self._study}' for "
                    f"{waited:,.0f} seconds; end it"
                )

    @abstractmethod
    def _waits_for(self, name: str) -> bool:
        """Wait `_NOTICE_SECONDS` for a lock; returns whether this session has it."""

    @abstractmethod
    def _holder(self, name: str) -> int | None:
        """The session of the database that has a lock."""

    @abstractmethod
    def _unlock(self, name: str) -> None:
        """Free a lock that this session has."""

    @abstractmethod
    def _is_held(self, name: str) -> bool:
        """Whether another session has a lock."""

    def _ask(self, statement: str) -> Any:
        """The value that the session answers."""
        from sqlalchemy import text

        if self._session is None:
            self._session = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            if self._preparation:
                self._session.execute(text(self._preparation))
        return self._session.execute(text(statement)).scalar()


class PostgresLocks(DatabaseLocks):
    """Advisory locks of PostgreSQL.

    Source: PostgreSQL's documentation, "Explicit Locking", 13.3.5.
    """

    _preparation = f"SET lock_timeout = {1000 * _NOTICE_SECONDS:.0f}"

    def _waits_for(self, name: str) -> bool:
        from sqlalchemy.exc import OperationalError

        try:
            self._ask(f"SELECT pg_advisory_lock({self._keys(name)})")
        except OperationalError as error:
            if "lock timeout" not in str(error):
                raise
            return False
        return True

    def _holder(self, name: str) -> int | None:
        first, second = self._keys(name).split(", ")
        where = f"classid = ({first})::bit(32)::bigint AND objid = ({second})::bit(32)::bigint"
        return cast(
            "int | None",
            self._ask(f"SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND {where}"),
        )

    def _unlock(self, name: str) -> None:
        self._ask(f"SELECT pg_advisory_unlock({self._keys(name)})")

    def _is_held(self, name: str) -> bool:
        is_free = self._ask(f"SELECT pg_try_advisory_lock({self._keys(name)})")
        if is_free:
            self._unlock(name)
        return not is_free

    def _keys(self, name: str) -> str:
        """The two numbers that stand for a lock of this study."""
        texts = f"{_NAMESPACE} {self._study}", name
        return ", ".join(str(_signed(zlib.crc32(text.encode()))) for text in texts)


class MySQLLocks(DatabaseLocks):
    """User locks of MySQL (5.7 or newer) and MariaDB, which belong to one server and not to a cluster.

    Source: MySQL's documentation, "Locking Functions", 12.15, and `wait_timeout` among its system variables.
    """

    # the server ends sessions that are idle for as long as a batch may take: after eight hours by default
    _preparation = f"SET SESSION wait_timeout = {_LONGEST_IDLE_SECONDS}"

    def _waits_for(self, name: str) -> bool:
        return bool(self._ask(f"SELECT GET_LOCK({self._named(name)}, {_NOTICE_SECONDS:.0f})") == 1)

    def _holder(self, name: str) -> int | None:
        return cast("int | None", self._ask(f"SELECT IS_USED_LOCK({self._named(name)})"))

    def _unlock(self, name: str) -> None:
        self._ask(f"SELECT RELEASE_LOCK({self._named(name)})")

    def _is_held(self, name: str) -> bool:
        return bool(self._ask(f"SELECT IS_FREE_LOCK({self._named(name)})") != 1)

    def _named(self, name: str) -> str:
        """The name of a lock on the server, of 64 characters at most, which all of its databases share."""
        of_study = hashlib.sha256(f"{self._engine.url.database} {self._study} {name}".encode()).hexdigest()
        return f"'{_NAMESPACE} {of_study[:40]}'"


def _signed(number: int) -> int:
    """A number of 32 bits as PostgreSQL's signed integer."""
    return number - 2**32 if number >= 2**31 else number


def new_worker() -> str:
    """A name for this process that no other one has."""
    import uuid

    return f"{platform.node()}-{uuid.uuid4().hex[:12]}"
