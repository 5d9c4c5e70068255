"""The tags of runs, and names and values that MLflow accepts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mecha_exp.errors import TrackingError

PARENT_TAG = "mlflow.parentRunId"
SWEPT_TAG = "swept"
"""The tag of a sweep's run with the keys that differ between its points."""
LOGGED_BY = "logged_by"
"""The tag with the machine, the process and the time of logging: it tells a run that was abandoned."""
HYPERPARAMETER = "hp/"
"""The start of the metrics that repeat numeric parameters: MLflow searches and plots metrics as numbers."""
NOTE_TAG = "mlflow.note.content"
"""The tag with the description of a run, which MLflow shows as Markdown."""
MAIN_METRIC = "mlflow.experiment.primaryMetric.name"
MORE_IS_BETTER = "mlflow.experiment.primaryMetric.greaterIsBetter"
"""The tags of an experiment with the metric that MLflow draws first where runs are compared."""
MAX_VALUE, MAX_KEY, MAX_TAG, MAX_DIGEST, MAX_EXPERIMENT = 6000, 250, 8000, 36, 500


def experiment(name: Any) -> str:
    """The name of an experiment; a number is one, too.

    Raises:
        TrackingError: MLflow would refuse it.
    """
    text = "" if name is None else str(name)
    if not text.strip() or len(text) > MAX_EXPERIMENT:
        raise TrackingError(
            f"tracking.experiment={name}: expected a name of 1 to {MAX_EXPERIMENT} characters, such as "
            "tracking.experiment=my_merges."
        )
    return text


def acceptable(text: str) -> str:
    """A name that MLflow accepts: letters, digits and `_-. :/`, and no part that is empty or of dots alone.

    >>> acceptable("weights/distance/.."), acceptable("a/"), acceptable("50 %")
    ('weights/distance/__', 'a/_', '50 _')
    """
    plain = "".join(c if c.isalnum() or c in "_-. :/" else "_" for c in text)[:MAX_KEY]
    return "/".join("_" * max(len(part), 1) if not part.strip(".") else part for part in plain.split("/"))


def accepted(names: Iterable[str]) -> dict[str, str]:
    """Acceptable names by the names; of names that would be one, all but the first end with a number."""
    names = list(dict.fromkeys(names))
    taken = {name: name for name in names if acceptable(name) == name}
    for name in sorted(names):  # so that the order, which may differ between runs, decides nothing
        if name not in taken.values():
            taken[next(each for each in _numbered(acceptable(name)) if each not in taken)] = name
    return {name: plain for plain, name in taken.items()}


def _apart(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    by_name = accepted(values)
    return ((by_name[name], value) for name, value in values.items())


def _numbered(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name[: MAX_KEY - 8]}_{number}" for number in itertools.count(2))


def metrics(values: Mapping[str, float]) -> dict[str, float]:
    """Metrics by acceptable names."""
    return {name: float(value) for name, value in _apart(values)}


def parameters(values: Mapping[str, Any]) -> dict[str, str]:
    """Parameters as texts that are not too long."""
    return {name: str(value)[:MAX_VALUE] for name, value in _apart(values)}


def tags(values: Mapping[str, str]) -> dict[str, str]:
    """Tags that are not too long."""
    return {name: value[:MAX_TAG] for name, value in _apart(values)}


def hyperparameters(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among parameters, as metrics."""
    numbers = {k: v for k, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return {HYPERPARAMETER + name: float(value) for name, value in numbers.items()}
