"""Threads that share the keys of a merge, and the tiles of keys once no key is left.

A worker either moves a key on to its next stage or computes one tile of the stage that it is in.
"""

from __future__ import annotations

import atexit
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import torch

from mecha_exp.engine.devices import explained, own_stream
from mecha_exp.engine.options import EngineOptions
from mecha_exp.engine.planner.keys.key_plan import KeyPlan
from mecha_exp.engine.runtime.buffers import Scratch

TileTask: TypeAlias = Callable[[Scratch], None]
"""One tile of work, which a worker runs with its own buffers."""

INTERRUPT_SECONDS = 0.5
"""How long an interrupted merge waits for its workers."""

WORKER_NAME = "mecha_exp worker"
"""The name of the threads."""


class KeyTask(ABC):
    """One key on its way through its stages, or several small ones together.

    Attributes:
        keys: what it makes.
        whole_bytes: what its whole tensors take.
    """

    keys: Sequence[KeyPlan]
    whole_bytes = 0

    @abstractmethod
    def advance(self) -> Sequence[TileTask] | None:
        """The tiles of the next stage; None after the last one."""


class Scheduler:
    """Threads that take a large key each, and tiles of each other's keys once no large key is left.

    So one thread reads while another writes. If all computed tiles of one key, they would wait for each
    other, since one thread at a time writes a file. One worker computes small keys until none is left. Small
    keys need the interpreter all the time, and two workers that wait for it in turns are slower than one. If
    small keys came last, as they do in many files, the other workers would have nothing to do then.

    Args:
        large, small: the keys, the small ones apart. Of the large ones the first that fits is taken: one that
            waits for memory holds up none behind it.
        options: the number of threads, the device, and the bytes of whole tensors that are there at once.
        finished: called with the keys of each task that is done.
    """

    def __init__(
        self,
        large: Iterator[KeyTask],
        small: Iterator[KeyTask],
        options: EngineOptions,
        finished: Callable[[Sequence[KeyPlan]], None],
    ) -> None:
        self._large, self._small = large, small
        self._finished = finished
        self._threads = options.threads
        self._budget = options.memory_budget
        self._device = options.device
        self._queues: dict[int, deque[TileTask]] = {}  # the tiles of each worker's current key
        self._waiting: list[KeyTask] = []  # large keys that did not fit when they were looked at
        self._has_large = True  # whether some have not been looked at
        self._next_small = next(small, None)
        self._current_small: KeyTask | None = None  # which one worker computes
        self._active = 0  # keys that have begun and not ended
        self._whole_bytes = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._ended = threading.Semaphore(0)

    def run(self) -> None:
        """Work until all keys are done; raises what the first failing tile raised."""
        intra_op = torch.get_num_threads()
        torch.set_num_threads(1)  # a tile is too small to share, and sums must not depend on it
        threads = [
            threading.Thread(target=self._work, name=WORKER_NAME, daemon=True) for _ in range(self._threads)
        ]
        try:
            for thread in threads:
                thread.start()
            for _ in threads:  # an interrupted join() takes its thread for ended, and without a limit
                while not self._ended.acquire(timeout=INTERRUPT_SECONDS):  # Windows does not hear Ctrl-C
                    pass
        except BaseException as error:  # Ctrl-C: the workers stop after the tile that they are at
            self._fail(error)
            limit = time.monotonic() + INTERRUPT_SECONDS  # and what takes longer is left to itself
            for thread in filter(threading.Thread.is_alive, threads):
                thread.join(max(0.0, limit - time.monotonic()))
                if thread.is_alive():
                    atexit.register(thread.join)  # the interpreter cannot end while torch computes
        finally:
            torch.set_num_threads(intra_op)
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            self._work_on()
        finally:
            self._ended.release()

    def _work_on(self) -> None:
        torch.set_num_threads(1)
        with torch.inference_mode(), own_stream(self._device) as wait:
            scratch = Scratch(self._device, wait)
            while True:
                try:
                    task = self._take()  # it prepares the next key, which can fail as well
                    if task is None:
                        return
                    task(scratch)
                except BaseException as error:
                    self._fail(explained(error, self._device))

    def _take(self) -> TileTask | None:
        with self._changed:
            mine = self._queues.setdefault(threading.get_ident(), deque())
            while self._error is None:
                if self._next_small is not None and self._current_small is None:
                    task, self._next_small = self._next_small, next(self._small, None)
                    self._current_small = task
                    return self._begin(task)
                if mine:
                    return mine.popleft()
                if large := self._next_large():
                    return self._begin(large)
                longest = max(self._queues.values(), key=len)
                if longest:
                    return longest.popleft()
                if self._is_done:
                    return None
                self._changed.wait()
            return None

    def _begin(self, task: KeyTask) -> TileTask:
        self._active += 1
        self._whole_bytes += task.whole_bytes
        return partial(self._advance, task)

    @property
    def _is_done(self) -> bool:
        is_left = self._has_large or self._waiting or self._next_small is not None
        return not (is_left or self._active)

    def _next_large(self) -> KeyTask | None:
        """The first large key for which there is memory."""
        for place, task in enumerate(self._waiting):
            if self._fits_budget(task):
                return self._waiting.pop(place)
        for task in self._large:
            if self._fits_budget(task):
                return task
            self._waiting.append(task)
        self._has_large = False
        return None

    def _fits_budget(self, task: KeyTask) -> bool:
        return (
            not task.whole_bytes
            or not self._whole_bytes
            or (self._whole_bytes + task.whole_bytes <= self._budget)
        )

    def _advance(self, task: KeyTask, scratch: Scratch) -> None:
        tiles = task.advance()
        while tiles is not None and len(tiles) == 1 and self._error is None:
            tiles[0](scratch)  # it cannot be shared: no other worker is woken for small keys
            scratch.settle()
            tiles = task.advance()
        scratch.settle()
        if tiles is None:
            self._finished(task.keys)
        with self._changed:
            if tiles is None:
                self._active -= 1
                self._whole_bytes -= task.whole_bytes
                self._current_small = None if task is self._current_small else self._current_small
            else:
                remaining = [len(tiles)]
                mine = self._queues[threading.get_ident()]
                mine.extend(partial(self._run_tile, task, tile, remaining) for tile in tiles)
            if tiles or task.whole_bytes or self._is_done:  # for what others may be waiting
                self._changed.notify_all()

    def _run_tile(self, task: KeyTask, tile: TileTask, remaining: list[int], scratch: Scratch) -> None:
        tile(scratch)
        scratch.settle()
        with self._changed:
            remaining[0] -= 1
            last = remaining[0] == 0
        if last:
            self._advance(task, scratch)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            for queue in self._queues.values():
                queue.clear()
            self._changed.notify_all()
