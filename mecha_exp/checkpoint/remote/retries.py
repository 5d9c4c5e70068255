"""Tries again after interruptions, with pauses that double or that the store asks for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from mecha_exp.checkpoint.remote.pin import Interruption, Pin, Store
from mecha_exp.errors import CheckpointError

T = TypeVar("T")

LEAST_RATE, RATE_SECONDS = 1000, 60.0
"""The bytes a second that a transfer must have, seen over so many seconds."""
UPLOAD_RATE, ANSWER_SECONDS = 4000, 300.0
"""The bytes a second that each upload must have, and how long a store may take to put its parts together."""

TRIES = 6
FIRST_PAUSE = 0.25
"""Seconds; each next pause is twice as long."""
LONGEST_WAIT = 120.0
"""Seconds that a store may ask to wait; one that asks for more is not waited for."""
_PROGRESS = 1 << 16
"""Bytes after which the count of tries begins anew."""


def again(call: Callable[[], T], address: str) -> T:
    """The result of a call, tried up to six times.

    Raises:
        CheckpointError: it was interrupted each time; the message has the last cause.
    """
    tries = _Tries(address)
    while True:
        try:
            return call()
        except Interruption as interruption:
            tries.pause(interruption)


def read_all(store: Store, pin: Pin, start: int, view: memoryview) -> None:
    """Fill `view` with the bytes of a file from `start` on; goes on after an interruption where it was.

    Raises:
        CheckpointError: the file changed, is gone, or cannot be read.
    """
    tries, done = _Tries(pin.address), 0
    while done < len(view):
        try:
            count = store.read_into(pin, start + done, view[done:])
            if not count:
                raise Interruption("the answer is empty")
            received = count
        except Interruption as interruption:
            received = interruption.received
            tries.pause(interruption)
        done += received
        if received >= _PROGRESS:
            tries = _Tries(pin.address)


async def at_a_rate(transfer: Coroutine[Any, Any, T], moved: Callable[[], int]) -> T:
    """The result of a transfer that goes on: a server that is slower than `LEAST_RATE` counts as gone.

    Args:
        moved: the bytes that have come so far.

    Raises:
        Interruption: fewer bytes came in a span of `RATE_SECONDS`, whether they were none or some.
    """
    task, before = asyncio.ensure_future(transfer), 0
    try:
        while not (await asyncio.wait({task}, timeout=RATE_SECONDS))[0]:
            now = moved()
            if now - before < LEAST_RATE * RATE_SECONDS:
                raise Interruption(f"{now - before:,} bytes came in {RATE_SECONDS:g} seconds", now)
            before = now
        return task.result()
    finally:
        task.cancel()


def seconds_for(nbytes: int) -> float:
    """How long a transfer may take of which nothing is seen until it ends."""
    return RATE_SECONDS + nbytes / LEAST_RATE


def seconds_to_send(nbytes: int) -> float:
    """How long a store may take for an upload, and to say what became of it."""
    return ANSWER_SECONDS + nbytes / UPLOAD_RATE


def at_once(call: Callable[[str], T], names: Iterable[str]) -> list[tuple[str, T]]:
    """What a call gives for each name, several at a time."""
    listed = list(names)
    with ThreadPoolExecutor(16) as pool:
        return list(zip(listed, pool.map(call, listed), strict=True))


class _Tries:
    """How often something was tried."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._count = 0

    def pause(self, interruption: Interruption) -> None:
        """Wait before the next try. Raises CheckpointError where there is none."""
        self._count += 1
        wait = interruption.wait if interruption.wait is not None else FIRST_PAUSE * 2 ** (self._count - 1)
        if wait > LONGEST_WAIT:
            request = f"and asks to wait {wait:,.0f} seconds"
            raise CheckpointError(f"{self._address} cannot be read now: {interruption.cause}, {request}.")
        if self._count >= TRIES:
            raise CheckpointError(
                f"{self._address} cannot be read, tried {TRIES} times: {interruption.cause.rstrip('.')}."
            )
        time.sleep(wait)
