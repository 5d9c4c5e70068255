"""Measures the peak memory of this process, where the platform reports it."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import TracebackType

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


class PeakMemory:
    """Measures the largest resident size of this process inside a `with` block, in bytes.

    Linux can reset the count. Elsewhere the peak is that since the process began, or 0 where the platform
    reports none.
    """

    peak: int = 0

    def __enter__(self) -> PeakMemory:
        with contextlib.suppress(OSError):
            _CLEAR.write_text("5")  # resets the high-water mark
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.peak = peak_memory()


def peak_memory() -> int:
    """The largest resident size of this process so far, in bytes; 0 where the platform reports none."""
    try:
        lines = _STATUS.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        pass
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
