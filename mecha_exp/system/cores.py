"""How many cores this process may use."""

from __future__ import annotations

import os

CORES = "MECHA_EXP_CORES"
"""The variable that limits them, for a worker of a cluster that shares its machine with others."""


def available_cores() -> int:
    """The cores that this process may use: those that the system lets it use, within the limit of `CORES`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = os.environ.get(CORES, "")
    return min(cores, max(1, int(limit))) if limit.isdecimal() else cores
