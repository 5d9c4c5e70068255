"""The process of `isolation`: `python -m mecha_exp.evaluation.isolation.worker PLUGIN...` measures models."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from dataclasses import replace
from typing import IO

from mecha_exp.errors import MechaError
from mecha_exp.evaluation.isolation.request import measure
from mecha_exp.plugins import load_plugins


def main(plugins: list[str]) -> int:
    """Answer requests until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    if hasattr(os, "register_at_fork"):  # a child of an evaluator would keep the pipe open
        os.register_at_fork(after_in_child=answers.close)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of an evaluator does not mix with answers
    load_plugins(plugins)
    _answer(answers, ("ready", None))
    while True:
        try:
            name, parameters, context, model = pickle.load(sys.stdin.buffer)
        except EOFError:
            return 0
        try:
            if context is not None:
                context = replace(context, report=lambda *done: _answer(answers, ("progress", done)))
            _answer(answers, ("result", measure(name, parameters, context, model)))
        except MechaError as error:
            _answer(answers, ("error", str(error)))


def _answer(pipe: IO[bytes], answer: tuple[str, object]) -> None:
    pickle.dump(answer, pipe)
    pipe.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
