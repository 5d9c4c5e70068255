"""A cache of results, bounded by bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch


class ByteCache:
    """An LRU cache of results, bounded by bytes. Concurrent requests for one key compute it once.

    A computation must not request its own key.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._bytes = 0
        self._results: OrderedDict[Any, Any] = OrderedDict()
        self._running: WeakValueDictionary[Any, _Turn] = WeakValueDictionary()
        self._lock = threading.Lock()

    def get(self, name: Any, make: Callable[[], Any]) -> Any:
        """The result of a name, computed by `make` if it is not cached."""
        with self._lock:
            turn = self._running.setdefault(name, _Turn())
        with turn.lock:
            with self._lock:
                if name in self._results:
                    self._results.move_to_end(name)
                    return self._results[name]
            result = make()  # without the lock, since it may request other results
            self._put(name, result)
        return result

    def _put(self, name: Any, result: Any) -> None:
        with self._lock:
            if _bytes_of(result) <= self._budget:
                self._results[name] = result
                self._bytes += _bytes_of(result)
            while self._bytes > self._budget:
                _, oldest = self._results.popitem(last=False)
                self._bytes -= _bytes_of(oldest)


class _Turn:
    """The lock under which a result is computed. It disappears with its last user."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def _bytes_of(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(map(_bytes_of, value.values()))
    return value.nbytes if isinstance(value, torch.Tensor) else 64
