"""What is dear to make and may be asked for again, kept within a number of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch


class ByteCache:
    """Results that may be asked for again, the latest ones, up to a number of bytes.

    Who asks for one that is being made waits for it; what it is made of never asks for it.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._bytes = 0
        self._results: OrderedDict[Any, Any] = OrderedDict()
        self._making: WeakValueDictionary[Any, _Turn] = WeakValueDictionary()
        self._lock = threading.Lock()

    def get(self, name: Any, make: Callable[[], Any]) -> Any:
        """The result of that name, made now if it is not kept."""
        with self._lock:
            turn = self._making.setdefault(name, _Turn())
        with turn.lock:
            with self._lock:
                if name in self._results:
                    self._results.move_to_end(name)
                    return self._results[name]
            made = make()  # without the lock: it may ask for others
            self._keep(name, made)
        return made

    def _keep(self, name: Any, made: Any) -> None:
        with self._lock:
            if _bytes_of(made) <= self._budget:
                self._results[name] = made
                self._bytes += _bytes_of(made)
            while self._bytes > self._budget:
                _, oldest = self._results.popitem(last=False)
                self._bytes -= _bytes_of(oldest)


class _Turn:
    """The lock that a result is made under, which is gone when nobody holds it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def _bytes_of(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(map(_bytes_of, value.values()))
    return value.nbytes if isinstance(value, torch.Tensor) else 64
