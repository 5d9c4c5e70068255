"""How many cores this process may use, and does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

CORES = "MECHA_EXP_CORES"
"""The variable that limits them, for a worker of a cluster that shares its machine with others."""


def available_cores() -> int:
    """The cores that this process may use: those that the system lets it use, within the limit of `CORES`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = os.environ.get(CORES, "")
    return min(cores, max(1, int(limit))) if limit.isdecimal() else cores


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread: sums do not depend on the number of cores, and small layers take less time."""
    import torch  # which most of what counts cores does without

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
