"""The progress of a merge, on a bar or in the log, and a summary of what it took."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

LOG_SECONDS = 5.0
"""The time between two lines of progress in the log."""

SHOWN = 40
"""The number of characters of a key beside a bar, counted from its end."""

log = logging.getLogger(__name__)


def within(seconds: float, call: Callable[[], T]) -> T:
    """The result of a call that waits for something outside of this process.

    Raises:
        TimeoutError: it has not come back in time. Its thread is left alone, and ends with the process.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="mecha_exp wait").start()
    if not wait([future], seconds).done:
        raise TimeoutError(f"no answer in {seconds:,.0f} seconds")
    return future.result()


def human_bytes(count: float) -> str:
    """Format a size for people, in powers of 1000: `2.1 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def merge_summary(seconds: float, bytes_read: float, bytes_written: float, peak_memory: float) -> str:
    """Summarise what a merge took: "1.20 s: 4.3 GB read, 2.1 GB written, 5.3 GB/s, peak memory 321.0 MB"."""
    rate = (bytes_read + bytes_written) / max(seconds, 1e-9)
    return (
        f"{seconds:.2f} s: {human_bytes(bytes_read)} read, {human_bytes(bytes_written)} written, "
        f"{human_bytes(rate)}/s, peak memory {human_bytes(peak_memory)}"
    )


class LoggedProgress:
    """Logs a line of progress every few seconds. Called with the key and the bytes of each tile."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._began = self._logged = time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, key: str, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            now = time.monotonic()
            if now - self._logged < LOG_SECONDS or not self._done:
                return
            self._logged = now
            rate = max(self._done, 1) / (now - self._began)
        done, total = human_bytes(self._done), human_bytes(self._total)
        remaining = (self._total - self._done) / rate
        log.info("%s of %s, %s/s, %.0f s left, at %s", done, total, human_bytes(rate), remaining, key)


@contextmanager
def tqdm_progress(tqdm: Callable[..., Any], total: int) -> Iterator[Callable[[str, int], None]]:
    """Show progress on a tqdm bar, with the current key behind it where the bar can show it."""
    lock = threading.Lock()
    with tqdm(total=total, desc="Merging", unit="B", unit_scale=True) as bar:
        show_key = getattr(bar, "set_postfix_str", None)

        def advance(key: str, nbytes: int) -> None:
            with lock:
                if show_key:
                    show_key(key[-SHOWN:], refresh=False)
                bar.update(nbytes)

        yield advance
