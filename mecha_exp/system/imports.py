"""How a command starts and ends: imports and exits with less garbage collection, and Ctrl-C at any moment.

Python's collector walks through all objects again and again as their number grows. Importing torch or MLflow
makes some hundred thousand objects, and none of them is garbage.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import os
import shlex
import signal
import sys
from pathlib import Path
from types import FrameType, ModuleType

INTERRUPTED = 130
"""The exit status after Ctrl-C; the same as in shells."""
INTERRUPTED_TEXT = "interrupted. The same command starts again."
_SHOW_CURSOR = b"\x1b[?25h"


def leave(number: int, frame: FrameType | None) -> None:
    """End the process at once and with one line; it does no more harm than one that is killed."""
    if os.isatty(2):  # a bar may have hidden it
        os.write(2, _SHOW_CURSOR)
    os.write(2, f"error: {INTERRUPTED_TEXT}\n".encode())
    os._exit(INTERRUPTED)


def leave_on_interrupt() -> None:
    """Let Ctrl-C end the process by `leave`, unless the program that runs this has a handler of its own."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)


def require_packages(one: str) -> None:
    """End the process with the line that mends it, if this Python lacks what the application needs.

    Args:
        one: a package that no other program brings along.
    """
    if importlib.util.find_spec(one) is not None:
        return
    checkout = Path(__file__).parents[2]
    activate = checkout / ".venv" / ("Scripts" if os.name == "nt" else "bin") / "activate"
    folder, python, script = (shlex.quote(str(path)) for path in (checkout, sys.executable, activate))
    install = f"cd {folder} && {python} -m pip install -c constraints.txt -e ."
    cure = f"source {script}" if activate.is_file() else install
    sys.exit(f"error: {sys.executable} has none of the packages that mecha_exp needs. Type: {cure}")


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
