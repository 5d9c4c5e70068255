"""The command line: a verb, or else the Hydra application."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable

from mecha_exp.system.imports import import_without_gc, skip_gc_at_exit

VERBS = (
    "clean",
    "compose",
    "convert",
    "diff",
    "info",
    "ls",
    "merge",
    "plan",
    "reproduce",
    "show",
    "table",
    "track",
    "ui",
    "why",
)
"""The verbs: each is a module of this package with `main(arguments) -> exit status`, imported on demand."""

_HYDRA_ANSWERS = (
    "--help",
    "-h",
    "--hydra-help",
    "--cfg",
    "-c",
    "--info",
    "-i",
    "--shell-completion",
    "-sc",
)
"""Flags that Hydra answers by itself, before anything runs."""


INTERRUPTED = 130
"""The exit status after Ctrl-C; the same as in shells."""

NO_READER = 141
"""The exit status when the reader of our output has closed it, as in `... | head`; the same as in shells."""


def main() -> int:
    """Run the command line; returns the exit status."""
    skip_gc_at_exit()
    try:
        status = _run()
        sys.stdout.flush()
    except BrokenPipeError:
        # The rest of the buffer has no reader either: without this, Python reports an error when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER
    if status == INTERRUPTED:
        _leave_workers(status)
    return status


def _leave_workers(status: int) -> None:
    """Exit at once if a worker thread is computing; an ordinary exit would wait for it."""
    engine = sys.modules.get("mecha_exp.engine.runtime.scheduler")
    if engine and any(thread.name == engine.WORKER_NAME for thread in threading.enumerate()):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run() -> int:
    from mecha_exp.errors import MechaError

    arguments = sys.argv[1:]
    run: Callable[[list[str]], int] = _hydra
    if arguments == ["--version"]:
        run = _version
    elif arguments and arguments[0] in VERBS:
        run = import_without_gc(f"{__name__}.{arguments[0]}").main
        arguments = arguments[1:]
    try:
        return run(arguments)
    except MechaError as error:
        from mecha_exp.terminal import show_error

        show_error(str(error))
        return 1
    except KeyboardInterrupt:
        from mecha_exp.terminal import show_error

        show_error("interrupted. The same command starts again.")
        return INTERRUPTED


def _version(arguments: list[str]) -> int:
    from mecha_exp._version import __version__

    sys.stdout.write(f"mecha_exp {__version__}\n")
    return 0


def _hydra(arguments: list[str]) -> int:
    from mecha_exp.app.hydra import compose
    from mecha_exp.app.words.foreign import require_settings
    from mecha_exp.app.words.reading import read, reorder
    from mecha_exp.errors import ConfigError

    ordered = reorder(arguments)
    require_settings(arguments, VERBS)
    if any(word.partition("=")[0] in _HYDRA_ANSWERS for word in ordered):
        try:
            compose.answer(read(ordered))
        except ValueError as error:  # flags that exclude each other, such as -m and --cfg
            raise ConfigError(f"{error}.") from None
        return 0
    return int(import_without_gc("mecha_exp.app.main").main(ordered))
