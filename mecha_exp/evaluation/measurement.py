"""Calls evaluators, and checks what they return and that they leave the process as it was."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mecha_exp.errors import ConfigError, EvaluationError, brief, some
from mecha_exp.evaluation.context import Context
from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.evaluation.registry import CONTEXT, Evaluator, metric_problem

log = logging.getLogger(__name__)

NORMALISED = "normalised"
"""The last part of the metric of normalised scores, which no task may be called like."""


@dataclass(frozen=True, eq=False)
class Measurement:
    """What an evaluator measured of a model.

    Attributes:
        metrics: its numbers by name, with those that follow from the outcomes.
        outcomes: its outcomes by example, if it returned them.
    """

    metrics: Mapping[str, float]
    outcomes: Outcomes | None = None


def measured_by(
    evaluator: Evaluator,
    parameters: Mapping[str, Any],
    state_dict: Mapping[str, Tensor],
    context: Context | None = None,
) -> Measurement:
    """Call an evaluator; returns what it measured, checked.

    Raises:
        ConfigError: the evaluator says that it cannot measure such a model.
        EvaluationError: it raised or called `sys.exit`, changed a tensor, or did not return numbers by name
            or outcomes.
    """
    more = {CONTEXT: context or Context()} if CONTEXT in evaluator.accepted else {}
    name = evaluator.name
    try:
        with _same_folder(name), _unchanged(state_dict):
            returned = evaluator.score(dict(state_dict), **parameters, **more)
    except ConfigError:
        raise
    except EvaluationError as error:  # of `Outcomes`, or of tensors that were changed
        raise EvaluationError(f"the evaluator '{name}': {error}") from error
    except SystemExit as error:
        raise EvaluationError(f"the evaluator '{name}' failed: it called sys.exit({error.code}).") from error
    except Exception as error:
        trace = traceback.format_exc().rstrip()
        line = f"{type(error).__name__}: {error}"
        raise EvaluationError(f"the evaluator '{name}' failed: {line}\n{trace}") from error
    return _checked(evaluator, returned)


@contextmanager
def _same_folder(name: str) -> Iterator[None]:
    """Return to the current folder if an evaluator leaves it: outputs have relative paths."""
    before = Path.cwd()
    try:
        yield
    finally:
        after = None
        with suppress(OSError):  # it removed the folder that it went to
            after = Path.cwd()
        if after != before:
            os.chdir(before)
            log.warning("the evaluator '%s' changed the current folder: it is %s again", name, before)


@contextmanager
def _unchanged(state_dict: Mapping[str, Tensor]) -> Iterator[None]:
    """Check that an evaluator changes no tensor in place: the next one measures the same model."""
    versions = {key: _version(tensor) for key, tensor in state_dict.items()}
    yield
    changed = [key for key, tensor in state_dict.items() if _version(tensor) != versions[key]]
    if changed:
        raise EvaluationError(
            f"it changed tensors of the model in place: {some(changed, limit=3)}. Others measure the same "
            "tensors, so let it work on copies (tensor.clone())."
        )


def _version(tensor: Tensor) -> int:
    """How often a tensor was changed in place; 0 for a tensor of inference mode, which does not count."""
    return 0 if tensor.is_inference() else tensor._version


def _checked(evaluator: Evaluator, returned: Any) -> Measurement:
    """Check that an evaluator returned outcomes, or numbers by name with its main metric."""
    who = f"the evaluator '{evaluator.name}'"
    outcomes = returned if isinstance(returned, Outcomes) else None
    if outcomes is not None:
        _check_outcomes(evaluator, outcomes)
        returned = outcomes.means(evaluator.metric)
    if not isinstance(returned, Mapping):
        raise EvaluationError(
            f"{who} must return a dictionary of numbers, or Outcomes, not {type(returned).__name__}."
        )
    numbers: dict[str, float] = {}
    for name, value in returned.items():
        if problem := metric_problem(str(name)):
            raise EvaluationError(f"{who} returned a number named {str(name)!r}, which {problem}.")
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            shown = brief(value)
            raise EvaluationError(f"{who} returned {shown} for '{name}', which is not a number.") from None
    if evaluator.metric not in numbers:
        raise EvaluationError(
            f"{who} did not return its main metric '{evaluator.metric}', only {some(numbers) or 'nothing'}."
        )
    return Measurement(numbers, outcomes)


def _check_outcomes(evaluator: Evaluator, outcomes: Outcomes) -> None:
    """Check that the names of tasks and of further metrics are not those of the numbers that follow."""
    who = f"the evaluator '{evaluator.name}'"
    if NORMALISED in outcomes.values:
        raise EvaluationError(f"{who}: call the task '{NORMALISED}' something else: it is a metric's name.")
    following = {evaluator.metric, *(f"{evaluator.metric}/{task}" for task in outcomes.values)}
    if twice := following & outcomes.metrics.keys():
        raise EvaluationError(f"{who} returned '{min(twice)}' as a metric and as outcomes.")
