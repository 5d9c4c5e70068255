"""Outcomes: what an evaluator saw on each example, from which its numbers and their uncertainty follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mecha_exp.errors import EvaluationError, counted

Values = NDArray[np.float64]
Names = NDArray[np.str_]


@dataclass(frozen=True, init=False, eq=False)
class Outcomes:
    """One value for each example of each task, as an evaluator returns them.

    The metric of a task is the mean of its values; the main metric is the mean over tasks (macro mean).

    Attributes:
        values: float64 arrays of shape [examples], by task. A hit is 1, a miss is 0.
        examples: a stable name for each example, by task: positions ("0", "1", ...) where none were given.
        clusters: the source of each example, by task: examples of one cluster are not independent (crops of
            one photograph). A task without clusters has one cluster for each example, named like it.
        metrics: further numbers of the model, such as a loss, which have no value for each example.

    Args:
        values: numbers or truth values by task, one-dimensional, at least one a task. NaN is allowed: the
            metric is NaN then, and the point never counts as the best.
        clusters: by task, as long as its values. Tasks may share clusters: equal names are one source.
        examples: by task, as long as its values, without repetitions.
        metrics: by name.

    Raises:
        EvaluationError: an array is empty, not one-dimensional, of another length than its task's values, or
            belongs to no task; an example is named twice.

    >>> Outcomes({"cats": [1, 1, 0, 1], "dogs": [0, 1]}).means("accuracy")
    {'accuracy': 0.625, 'accuracy/cats': 0.75, 'accuracy/dogs': 0.5}
    """

    values: Mapping[str, Values]
    examples: Mapping[str, Names]
    clusters: Mapping[str, Names]
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __init__(
        self,
        values: Mapping[str, ArrayLike],
        *,
        clusters: Mapping[str, ArrayLike] | None = None,
        examples: Mapping[str, ArrayLike] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        if not values:
            raise EvaluationError("outcomes: there is no task. Give the values of at least one.")
        arrays = {task: _vector(task, array) for task, array in values.items()}
        names = _names("examples", examples or {}, arrays)
        names = {task: names.get(task, _positions(len(arrays[task]))) for task in arrays}
        for task, listed in names.items():
            if len(set(listed.tolist())) < len(listed):
                raise EvaluationError(f"outcomes: the examples of the task '{task}' have names that repeat.")
        sources = {**names, **_names("clusters", clusters or {}, arrays)}
        numbers = {name: float(number) for name, number in (metrics or {}).items()}
        self._set(arrays, names, sources, numbers)

    @classmethod
    def checked_before(
        cls,
        values: Mapping[str, Values],
        examples: Mapping[str, Names],
        clusters: Mapping[str, Names],
        metrics: Mapping[str, float] | None = None,
    ) -> Outcomes:
        """Outcomes of arrays that were checked when they were made, such as those of a file."""
        outcomes = object.__new__(cls)
        outcomes._set(values, examples, clusters, metrics or {})
        return outcomes

    def _set(self, *contents: Mapping[str, Any]) -> None:
        for name, content in zip(("values", "examples", "clusters", "metrics"), contents, strict=True):
            object.__setattr__(self, name, MappingProxyType(dict(content)))

    def __reduce__(self) -> tuple[Any, ...]:
        contents = (self.values, self.examples, self.clusters, self.metrics)
        return Outcomes.checked_before, tuple(dict(content) for content in contents)

    def equals(self, other: Outcomes) -> bool:
        """Whether tasks, examples, clusters and values are the same; NaN equals NaN."""
        return list(self.values) == list(other.values) and all(
            np.array_equal(self.values[task], other.values[task], equal_nan=True)
            and np.array_equal(self.examples[task], other.examples[task])
            and np.array_equal(self.clusters[task], other.clusters[task])
            for task in self.values
        )

    def followed_by(self, other: Outcomes) -> Outcomes:
        """These outcomes and then those of other examples, of the same tasks or others."""

        def joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
            tasks = dict.fromkeys([*first, *second])
            return {t: np.concatenate([part[t] for part in (first, second) if t in part]) for t in tasks}

        return Outcomes.checked_before(
            joined(self.values, other.values),
            joined(self.examples, other.examples),
            joined(self.clusters, other.clusters),
            {**self.metrics, **other.metrics},
        )

    def of_task(self, task: str) -> Outcomes:
        """The outcomes of one task alone, whose mean is the metric of that task."""
        values, examples, clusters = self.values[task], self.examples[task], self.clusters[task]
        return Outcomes.checked_before({task: values}, {task: examples}, {task: clusters})

    def means(self, metric: str) -> dict[str, float]:
        """The numbers of the outcomes: `metric` (macro mean), `metric/TASK`, and the further metrics."""
        by_task = {task: float(array.mean()) for task, array in self.values.items()}
        overall = {metric: float(np.mean(list(by_task.values())))}
        return {**overall, **{f"{metric}/{task}": mean for task, mean in by_task.items()}, **self.metrics}


def _vector(task: str, array: Any) -> Values:
    """The values of a task as float64."""
    try:
        vector = np.asarray(array, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise EvaluationError(f"outcomes: the values of the task '{task}' are not numbers: {error}") from None
    if vector.ndim != 1 or not len(vector):
        shape = list(vector.shape)
        raise EvaluationError(f"outcomes: the task '{task}' needs one value an example, not shape {shape}.")
    return vector


@lru_cache(maxsize=64)
def _positions(count: int) -> Names:
    """The names "0", "1", ... of examples without names: one array for all outcomes of that length."""
    positions = np.arange(count).astype(str)
    positions.flags.writeable = False
    return positions


def _names(what: str, given: Mapping[str, ArrayLike], values: Mapping[str, Values]) -> dict[str, Names]:
    """Names of examples or clusters as texts, checked against the values of their tasks."""
    names = {task: np.asarray(array).astype(str) for task, array in given.items()}
    for task, array in names.items():
        if task not in values:
            raise EvaluationError(f"outcomes: {what} name the task '{task}', which has no values.")
        if array.shape != values[task].shape:
            given_names = counted(array.size, what.removesuffix("s"))
            expected = counted(values[task].size, "value")
            raise EvaluationError(f"outcomes: {given_names} for {expected} of the task '{task}'.")
    return names


def common_clusters(outcomes: Outcomes) -> dict[str, NDArray[np.intp]]:
    """The clusters of each example as places in one list for all tasks: equal names are one source.

    Positions ("0", "1", ...), the names of examples without names, are sources of their task alone.
    """
    names = [_own_names(task, clusters) for task, clusters in outcomes.clusters.items()]
    _, codes = np.unique(np.concatenate(names), return_inverse=True)
    lengths = np.cumsum([len(names) for names in outcomes.clusters.values()])[:-1]
    parts = np.split(codes.reshape(-1).astype(np.intp), lengths)
    return dict(zip(outcomes.clusters, parts, strict=True))


def _own_names(task: str, clusters: Names) -> Names:
    """Names of clusters, with the task in front where they are positions."""
    if np.array_equal(clusters, np.arange(len(clusters)).astype(str)):
        return np.char.add(f"{task}\n", clusters)
    return clusters
