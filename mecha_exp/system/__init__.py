"""What the operating system offers: atomic writes, caches, limits, memory, progress."""
