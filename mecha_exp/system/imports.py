"""Imports large packages, and runs commands, with less garbage collection.

Python's collector walks through all objects again and again as their number grows. Importing torch or MLflow
makes some hundred thousand objects, and none of them is garbage.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import sys
from types import ModuleType


def import_without_gc(name: str) -> ModuleType:
    """Import a module by its full name. The collector then ignores all objects made so far."""
    if name in sys.modules:
        return sys.modules[name]
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def collect_seldom() -> None:
    """Let the collector run after 10,000 new objects, not 700: a sweep keeps most of what it makes."""
    gc.set_threshold(10_000)


def skip_gc_at_exit() -> None:
    """Keep the collector from walking through every object a last time when Python ends."""
    atexit.unregister(gc.freeze)  # twice does no harm
    atexit.register(gc.freeze)
