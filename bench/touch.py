"""Touches so many bytes of memory, as a process of its own: `python touch.py BYTES`."""

import mmap
import sys

size = int(sys.argv[1])
with mmap.mmap(-1, size) as memory:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    for place in range(0, size, mmap.PAGESIZE):
        memory[place] = 1
