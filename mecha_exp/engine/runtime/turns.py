"""Turns of the workers of a GPU: one at a time asks for work, while others read, write and wait.

What a GPU is asked for takes a few microseconds of Python each, after which a thread gives the interpreter away
and wants it back. With several threads at that, each operation waits for the others: a merge of small keys and
large ones took three times as long. So a worker keeps its turn through many operations, and gives it away where
it has to wait: for a file, for the device, for a method of whole tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from mecha_exp.engine.devices import CPU

_NOTHING = nullcontext()


class Turns:
    """The turns of the workers of one merge; on a CPU, which waits for nothing, there are none.

    Args:
        device: where the merge is computed.
    """

    def __init__(self, device: str) -> None:
        self._lock = None if device == CPU else threading.Lock()

    def taken(self) -> AbstractContextManager[object]:
        """Wait for a turn, and keep it within the block."""
        return self._lock or _NOTHING

    def paused(self) -> AbstractContextManager[object]:
        """Give the turn away within the block; to be called with a turn."""
        return self._away(self._lock) if self._lock else _NOTHING

    @contextmanager
    def _away(self, lock: threading.Lock) -> Iterator[None]:
        lock.release()
        try:
            yield
        finally:
            lock.acquire()
