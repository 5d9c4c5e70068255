"""The process of `isolation`: `python -m mecha_exp.evaluation.isolation.worker PLUGIN...` measures models."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from mecha_exp.errors import EvaluationError, MechaError
from mecha_exp.evaluation.context import Context
from mecha_exp.evaluation.isolation.shared_model import SharedModel
from mecha_exp.evaluation.measurement import Measurement, measured_by
from mecha_exp.evaluation.model import load_state_dict
from mecha_exp.evaluation.registry import all_evaluators
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
            _answer(answers, ("result", _measure(name, parameters, context, model)))
        except MechaError as error:
            _answer(answers, ("error", str(error)))


def _measure(
    name: str, parameters: dict[str, Any], context: Context | None, model: Path | SharedModel
) -> Measurement:
    evaluators = all_evaluators()
    if name not in evaluators:
        raise EvaluationError(
            f"the evaluator '{name}' is defined in no plugin, so that a process of its own cannot find it. "
            "Name its file among the `plugins`, or leave evaluator.timeout and evaluator.workers out."
        )
    state_dict = load_state_dict(model.open() if isinstance(model, SharedModel) else model)
    return measured_by(evaluators[name], parameters, state_dict, context)


def _answer(pipe: IO[bytes], answer: tuple[str, object]) -> None:
    pickle.dump(answer, pipe)
    pipe.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
