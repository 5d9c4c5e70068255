"""The command line: a verb, or else the Hydra application."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

VERBS = {
    "clean": "mecha_exp.app.clean",
    "track": "mecha_exp.app.track",
    "ui": "mecha_exp.app.ui",
}
"""Each in a module of its own with a `main(arguments) -> exit status`, imported when it is asked for."""

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


def main() -> int:
    """Run the command line; returns the exit status."""
    from mecha_exp.errors import MechaError

    arguments = sys.argv[1:]
    run: Callable[[list[str]], int] = _hydra
    if arguments == ["--version"]:
        run = _version
    elif arguments and arguments[0] in VERBS:
        run = importlib.import_module(VERBS[arguments[0]]).main
        arguments = arguments[1:]
    try:
        return run(arguments)
    except MechaError as error:
        from mecha_exp.app.display import show_error

        show_error(str(error))
        return 1
    except KeyboardInterrupt:
        from mecha_exp.app.display import show_error

        show_error("interrupted. The same command starts again.")
        return 130


def _version(arguments: list[str]) -> int:
    import mecha_exp

    sys.stdout.write(f"mecha_exp {mecha_exp.__version__}\n")
    return 0


def _hydra(arguments: list[str]) -> int:
    from mecha_exp.app import overrides

    ordered = overrides.reorder(arguments)
    if any(word.partition("=")[0] in _HYDRA_ANSWERS for word in ordered):
        overrides.start_hydra(ordered, lambda config: None)
        return 0
    from mecha_exp.app import runner

    return runner.main(ordered)
