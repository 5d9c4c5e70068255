"""Calls evaluators, and checks what they return and that they leave the process as it was."""

from __future__ import annotations

import logging
import math
import os
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from mecha_exp.errors import ConfigError, EvaluationError, brief, some
from mecha_exp.evaluation.context import Context
from mecha_exp.evaluation.declaration import CONTEXT, Evaluator, metric_problem
from mecha_exp.evaluation.outcomes import Outcomes

log = logging.getLogger(__name__)

NORMALISED = "normalised"
"""The last part of the metric of normalised scores, which no task may be called like."""


_BYTES = (bytes, bytearray, memoryview)
_FILE_NAME = re.compile(r"\w[\w .,=+()@-]{0,119}")


@dataclass(frozen=True, eq=False)
class Measurement:
    """What an evaluator measured of a model; it may return one itself, to give more than numbers or outcomes.

    The files are stored by signature like the numbers, copied into the run's folder (`files/NAME`), shown
    or linked in the report and logged to MLflow.

    Attributes:
        metrics: its numbers by name; beside outcomes those that do not follow from them.
        outcomes: its outcomes by example, if it has them.
        files: contents, or paths of files, by plain file names such as `confusion.png`.
        further: the outcomes of further metrics by name: the mean over tasks is the number of that name, such
            as `kl`, or `score/cola` of a task whose others have no value for each example.

    >>> Measurement({"accuracy": 0.75}, files={"confusion.csv": b"1,0"}).files["confusion.csv"]
    b'1,0'
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    outcomes: Outcomes | None = None
    files: Mapping[str, bytes | Path] = field(default_factory=dict)
    further: Mapping[str, Outcomes] = field(default_factory=dict)

    def by_metric(self, main: str) -> dict[str, Outcomes]:
        """All outcomes by the name of the metric that is their mean, given that of the main metric."""
        return {**({} if self.outcomes is None else {main: self.outcomes}), **self.further}


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
    """Check what an evaluator returned: numbers by name with its main metric, outcomes, files."""
    who = f"the evaluator '{evaluator.name}'"
    files: Mapping[str, bytes | Path] = {}
    outcomes = returned if isinstance(returned, Outcomes) else None
    more: Any = {}
    further: Mapping[str, Outcomes] = {}
    if isinstance(returned, Measurement):
        further = returned.further
        more, outcomes, files = returned.metrics, returned.outcomes, _contents(who, returned.files)
        returned = more
    if outcomes is not None:
        _check_outcomes(evaluator, outcomes, more)
        returned = {**outcomes.means(evaluator.metric), **more}
    if not isinstance(returned, Mapping):
        raise EvaluationError(
            f"{who} must return a dictionary of numbers, or Outcomes, not {type(returned).__name__}."
        )
    numbers = _numbers(who, returned)
    if evaluator.metric not in numbers:
        raise EvaluationError(
            f"{who} did not return its main metric '{evaluator.metric}', only {some(numbers) or 'nothing'}."
        )
    _check_further(evaluator, further, numbers)
    return Measurement(numbers, outcomes, files, further)


def _numbers(who: str, returned: Mapping[Any, Any]) -> dict[str, float]:
    """The numbers that an evaluator returned, by checked names."""
    numbers: dict[str, float] = {}
    for name, value in returned.items():
        if problem := metric_problem(str(name)):
            raise EvaluationError(f"{who} returned a number named {str(name)!r}, which {problem}.")
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            shown = brief(value)
            raise EvaluationError(f"{who} returned {shown} for '{name}', which is not a number.") from None
    return numbers


def _contents(who: str, files: Mapping[str, Any]) -> dict[str, bytes | Path]:
    """The contents of the files that an evaluator returned, by checked names."""
    if not isinstance(files, Mapping):
        raise EvaluationError(f"{who} returned files as {type(files).__name__}: expected contents by name.")
    contents: dict[str, bytes | Path] = {}
    for name, content in files.items():
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
            raise EvaluationError(
                f"{who} returned a file named {name!r}: use letters, digits, spaces and _.,=+()@- in a plain "
                "name without folders, at most 120 characters."
            )
        if name.lower() in (other.lower() for other in contents):
            raise EvaluationError(f"{who} returned two files that are '{name}' where case does not count.")
        try:
            contents[name] = bytes(content) if isinstance(content, _BYTES) else Path(content).read_bytes()
        except (OSError, TypeError) as error:
            raise EvaluationError(
                f"{who} returned the file '{name}', which is neither bytes nor a path to a file: {error}"
            ) from None
    return contents


def _check_outcomes(evaluator: Evaluator, outcomes: Outcomes, more: Mapping[str, Any]) -> None:
    """Check that the names of tasks and of further metrics are not those of the numbers that follow."""
    who = f"the evaluator '{evaluator.name}'"
    if NORMALISED in outcomes.values:
        raise EvaluationError(f"{who}: call the task '{NORMALISED}' something else: it is a metric's name.")
    following = {evaluator.metric, *(f"{evaluator.metric}/{task}" for task in outcomes.values)}
    if twice := following & (outcomes.metrics.keys() | set(more)):
        raise EvaluationError(f"{who} returned '{min(twice)}' as a metric and as outcomes.")


def _check_further(
    evaluator: Evaluator, further: Mapping[str, Outcomes], numbers: Mapping[str, float]
) -> None:
    """Check that further outcomes are those of numbers that were returned, and not of the main metric."""
    who = f"the evaluator '{evaluator.name}'"
    for name, outcomes in further.items():
        if name == evaluator.metric:
            raise EvaluationError(f"{who} returned outcomes of '{name}', its main metric, as further ones.")
        if name not in numbers:
            raise EvaluationError(f"{who} returned outcomes of '{name}' and no number of that name.")
        if not is_near(mean := outcomes.means(name)[name], numbers[name]):
            raise EvaluationError(
                f"{who} returned {numbers[name]:g} for '{name}', and its outcomes have the mean {mean:g}."
            )


def is_near(mean: float, number: float) -> bool:
    """Whether a mean of outcomes is the number of a library, but for the order in which it adds."""
    if math.isnan(number):
        return math.isnan(mean)
    return math.isclose(mean, number, rel_tol=1e-9, abs_tol=1e-12)
