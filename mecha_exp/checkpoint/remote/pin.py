"""Pins remote files to the state in which they were looked up; interruptions of transfers."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from mecha_exp.errors import CheckpointError, first_line

BY_VERSION = "version-"
"""How the name of a content begins of which only its version is known, and not its hash."""


@dataclass(frozen=True)
class Pin:
    """A remote file, pinned to the state in which it was looked up.

    Attributes:
        address: of the file, in full.
        size: its bytes.
        version: what the store says of its state, such as an ETag; empty where the address holds it.
        sha256: the hash of its bytes where the store gives one.
        source: where its bytes are read, where that is not the address.
    """

    address: str
    size: int
    version: str = ""
    sha256: str | None = None
    source: str = ""

    @property
    def content(self) -> str:
        """A name for its bytes: their SHA-256, or `version-` with a hash of address, version and size."""
        if self.sha256:
            return self.sha256
        text = json.dumps([self.source or self.address, self.version, self.size])
        return f"{BY_VERSION}{hashlib.sha256(text.encode()).hexdigest()}"

    def entry(self) -> dict[str, Any]:
        """The pin as JSON values."""
        return asdict(self)


class Store(Protocol):
    """A place where files lie."""

    def files(self, address: str) -> dict[str, Pin]:
        """The files of a folder or an index by their path in it, or the one file under the name ''.

        Raises:
            CheckpointError: there is nothing there, or it cannot be read.
        """

    def read_into(self, pin: Pin, start: int, view: memoryview) -> int:
        """Fill `view` with the bytes from `start` on, or its first bytes; returns how many.

        Raises:
            Interruption: worth another try.
            CheckpointError: not worth one.
        """

    def version(self, pin: Pin) -> str:
        """The state that the file has now."""


class Interruption(Exception):
    """A transfer that may go on if it is tried again.

    Attributes:
        received: the bytes that came before it.
        cause: what happened, in words.
        wait: the seconds that the store asks to wait; None if it does not say.
    """

    def __init__(self, cause: str, received: int = 0, wait: float | None = None) -> None:
        super().__init__(cause)
        self.cause, self.received, self.wait = cause, received, wait


def changed(pin: Pin, how: str) -> CheckpointError:
    """The error for a file that is no longer what it was."""
    return CheckpointError(
        f"{pin.address} changed after it was looked up: {how}. What was read of it is thrown away. Run again "
        "once it is at rest."
    )


def cause_of(error: BaseException) -> str:
    """What an error says, in one line of at most 300 characters."""
    return first_line(error)[:300]
