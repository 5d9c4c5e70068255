"""Notes which process logs a run, to recognise the runs that a kill has left half logged."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

LOGGING_SECONDS = 3600
"""How long a process that this one cannot see is taken to be logging."""


def this_machine() -> str:
    """The name of this machine, as it stands in a search."""
    return "".join(c if c.isalnum() or c in "-." else "-" for c in platform.node())


def this_process() -> str:
    """The machine, the number of this process, in which numbering it counts, and the time in seconds."""
    return f"{this_machine()}:{os.getpid()}:{numbering()}:{int(time.time())}"


def numbering() -> str:
    """An identifier of this container's processes; empty where the system has none."""
    try:
        return "".join(filter(str.isdecimal, str(Path("/proc/self/ns/pid").readlink())))
    except OSError:
        return ""


def is_abandoned(logged_by: str) -> bool:
    """Whether the process of a tag is gone, or is another container's and began to log long ago.

    A process of another machine is not judged.
    """
    machine, process, *place = logged_by.split(":")
    its_numbering, seconds = place if len(place) == 2 else (numbering(), "0")
    if machine != this_machine() or not (process.isdecimal() and seconds.isdecimal()):
        return False
    if its_numbering != numbering():
        return time.time() - int(seconds) > LOGGING_SECONDS
    return not _is_running(int(process))


def _is_running(process: int) -> bool:
    """Whether a process of this machine exists, as far as the system says."""
    if os.name == "nt":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
