"""The command line: a verb, or else the Hydra application."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from mecha_exp.system.imports import (
    INTERRUPTED,
    INTERRUPTED_TEXT,
    collect_seldom,
    import_without_gc,
    leave,
    skip_gc_at_exit,
)

VERBS = (
    "bundle",
    "cite",
    "clean",
    "compose",
    "convert",
    "demo",
    "diff",
    "figures",
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
"""The verbs of this package: each is a module with `main(arguments) -> exit status`, imported on demand."""
GROUP = "mecha_exp.verbs"
"""The entry points by which packages announce other verbs: the name of each, and such a function."""

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


NO_READER = 141
"""The exit status when the reader of our output has closed it, as in `... | head`; the same as in shells."""


def main() -> int:
    """Run the command line; returns the exit status."""
    skip_gc_at_exit()
    logging.raiseExceptions = False  # a log that cannot be written is not worth a traceback
    _write_out_what_has_no_code()
    with _interrupted_imports_end():
        try:
            status = _run()
            sys.stdout.flush()
        except BrokenPipeError:
            # The rest of the buffer has no reader either: without this, Python reports an error at the end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return NO_READER
    if status == INTERRUPTED:
        _leave_workers(status)
    return status


def _write_out_what_has_no_code() -> None:
    r"""Write characters that the encoding of a terminal or a file lacks as `\u2026`, in place of an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def _interrupted_imports_end() -> Iterator[None]:
    """Let Ctrl-C end the process at once where it meets an import, and the second one anywhere.

    An exception would leave half a module behind, on which others then fail, or be lost in foreign code.
    """
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or before not in (signal.default_int_handler, leave):
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        importing = frame
        while importing is not None and not importing.f_code.co_filename.startswith("<frozen importlib"):
            importing = importing.f_back
        if importing is not None:
            leave(number, frame)
        signal.signal(signal.SIGINT, leave)
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


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
    try:
        verb = _verb_of(arguments)
        return application(arguments) if verb is None else verb(arguments[1:])
    except MechaError as error:
        from mecha_exp.terminal.console import show_error

        show_error(str(error))
        return 1
    except OSError as error:
        from mecha_exp.system.write_errors import write_sentence
        from mecha_exp.terminal.console import show_error

        if (sentence := write_sentence(error)) is None:
            raise
        show_error(f"{sentence} What is done is kept, and the same command goes on.")
        return 1
    except KeyboardInterrupt:
        from mecha_exp.terminal.console import show_error

        show_error(INTERRUPTED_TEXT)
        return INTERRUPTED


def verbs() -> Sequence[str]:
    """The verbs of this package and of others."""
    from mecha_exp.entry_points import announced

    return sorted({*VERBS, *announced(GROUP)})


def _verb_of(arguments: list[str]) -> Callable[[list[str]], int] | None:
    """What the first word stands for; None where it begins the settings of the application."""
    word = arguments[0] if arguments else ""
    if arguments == ["--version"]:
        return _version
    verb: Callable[[list[str]], int] | None = None
    if word in VERBS:
        verb = import_without_gc(f"{__name__}.{word}").main
    elif word.isidentifier():  # a setting is not, so that most commands need not look for packages
        from mecha_exp.entry_points import announced, load

        entry = announced(GROUP).get(word)
        verb = load(entry) if entry else None
    return verb


def _version(arguments: list[str]) -> int:
    from mecha_exp._version import __version__

    sys.stdout.write(f"mecha_exp {__version__}\n")
    return 0


def _require_text(words: list[str]) -> None:
    """Check that the current folder and the words of a command line can be written into records.

    Raises:
        ConfigError: one has bytes that are not UTF-8, as the name of a file may.
    """
    from mecha_exp.errors import ConfigError

    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"{word!r} has a name that is not UTF-8, the text of recipes and records: rename it."
            ) from None


def application(arguments: list[str]) -> int:
    """Run a command line of the Hydra application; returns the exit status.

    Raises:
        MechaError: what is wrong before any work.
    """
    from mecha_exp.app.config import compose
    from mecha_exp.app.words.reader import read, reorder
    from mecha_exp.app.words.slips import require_settings
    from mecha_exp.errors import ConfigError

    _require_text([str(Path.cwd()), *arguments])
    ordered = reorder(arguments)
    require_settings(arguments, verbs)
    if any(word.partition("=")[0] in _HYDRA_ANSWERS for word in ordered):
        try:
            compose.answer(read(ordered))
        except ValueError as error:  # flags that exclude each other, such as -m and --cfg
            raise ConfigError(f"{error}.") from None
        return 0
    main = import_without_gc("mecha_exp.app.main").main
    collect_seldom()
    return int(main(ordered))
