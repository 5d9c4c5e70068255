"""How far a merge is and what it took, in words, for a bar or for a log."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LOG_SECONDS = 5.0
"""How often a merge says in the log how far it is."""

SHOWN = 40
"""Letters of a key beside a bar: its end, which tells more."""

log = logging.getLogger(__name__)


def human_bytes(count: float) -> str:
    """A size for people: 2.1 GB, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def merge_summary(seconds: float, bytes_read: float, bytes_written: float, peak_memory: float) -> str:
    """What a merge took: "1.20 s: 4.3 GB read, 2.1 GB written, 5.3 GB/s, peak memory 321.0 MB"."""
    rate = (bytes_read + bytes_written) / max(seconds, 1e-9)
    return (
        f"{seconds:.2f} s: {human_bytes(bytes_read)} read, {human_bytes(bytes_written)} written, "
        f"{human_bytes(rate)}/s, peak memory {human_bytes(peak_memory)}"
    )


class LoggedProgress:
    """Progress as a line in the log every few seconds; it is told the key and the bytes of each tile."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._began = self._said = time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, key: str, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            now = time.monotonic()
            if now - self._said < LOG_SECONDS or not self._done:
                return
            self._said = now
            rate = max(self._done, 1) / (now - self._began)
        done, total = human_bytes(self._done), human_bytes(self._total)
        left = (self._total - self._done) / rate
        log.info("%s of %s, %s/s, %.0f s left, at %s", done, total, human_bytes(rate), left, key)


@contextmanager
def tqdm_progress(tqdm: Callable[..., Any], total: int) -> Iterator[Callable[[str, int], None]]:
    """Progress on a bar as tqdm makes one, with the current key behind it where the bar can show that."""
    lock = threading.Lock()
    with tqdm(total=total, desc="Merging", unit="B", unit_scale=True) as bar:
        show_key = getattr(bar, "set_postfix_str", None)

        def advance(key: str, nbytes: int) -> None:
            with lock:
                if show_key:
                    show_key(key[-SHOWN:], refresh=False)
                bar.update(nbytes)

        yield advance
