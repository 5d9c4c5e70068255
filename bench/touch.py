"""Touches so many bytes of memory and ends: `python touch.py BYTES`."""

import mmap
import sys

size = max(int(sys.argv[1]), mmap.PAGESIZE)
with mmap.mmap(-1, size) as memory:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    for place in range(0, size, mmap.PAGESIZE):
        memory[place] = 1
