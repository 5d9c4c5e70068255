"""Importing large packages in less time: without looking for garbage among what stays until the end.

Python's collector walks through all objects again and again while they become more. torch and MLflow make
some hundred thousand of them when they are imported, and none is garbage.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import sys
from types import ModuleType


def import_without_gc(name: str) -> ModuleType:
    """A module, with whatever it imports; the collector leaves their objects alone from then on.

    Args:
        name: of the module, with its package.

    Returns:
        the module.
    """
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


def skip_gc_at_exit() -> None:
    """Let the collector rest when Python ends: it would walk through every object a last time."""
    atexit.unregister(gc.freeze)  # twice does no harm
    atexit.register(gc.freeze)
