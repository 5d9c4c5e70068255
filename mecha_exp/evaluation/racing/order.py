"""The order in which a race measures the examples: shuffled once, by cluster, alike for all points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mecha_exp.errors import EvaluationError, counted
from mecha_exp.evaluation.outcomes import Names, Outcomes, common_clusters

Floats = NDArray[np.float64]
Integers = NDArray[np.intp]
Part = dict[str, list[int]]
"""The positions of some examples by task, ascending; tasks without any are left out."""


@dataclass(frozen=True, eq=False)
class Order:
    """The clusters of an evaluation in random order.

    Attributes:
        places: the place of each example's cluster in the order, by task.
        names: of the examples, by task.
        sizes: examples of each cluster, in the order, [clusters].
        bounds: what each cluster adds at most to the score where outcomes are 0 to 1, [clusters]. The score
            is the mean over tasks of the mean over their examples, so the bounds add up to 1.
    """

    places: Mapping[str, Integers]
    names: Mapping[str, Names]
    sizes: Integers
    bounds: Floats

    @classmethod
    def of(cls, whole: Outcomes, seed: int) -> Order:
        """Shuffle the clusters of outcomes that have all examples; same seed and clusters, same order."""
        codes = common_clusters(whole)
        count = max(int(part.max()) for part in codes.values()) + 1
        place = np.empty(count, dtype=np.intp)
        place[np.random.default_rng([seed, 19]).permutation(count)] = np.arange(count)
        places = {task: place[part] for task, part in codes.items()}
        sizes, bounds = np.zeros(count, dtype=np.intp), np.zeros(count)
        for part in places.values():
            of_task = np.bincount(part, minlength=count)
            sizes += of_task
            bounds += of_task / (len(part) * len(places))
        return cls(places, whole.examples, sizes, bounds)

    @property
    def clusters(self) -> int:
        """The number of clusters."""
        return len(self.sizes)

    @property
    def examples(self) -> int:
        """The number of examples."""
        return int(self.sizes.sum())

    def part(self, start: int, end: int) -> Part:
        """The examples of the clusters from place `start` to before `end`."""
        positions = {
            task: np.flatnonzero((places >= start) & (places < end)) for task, places in self.places.items()
        }
        return {task: found.tolist() for task, found in positions.items() if len(found)}

    def check(self, outcomes: Outcomes, part: Part) -> None:
        """Check that an evaluator returned an outcome for each example of a part, and no others.

        Raises:
            EvaluationError: it did not.
        """
        for task in {**part, **outcomes.values}:
            asked = self.names[task][part[task]] if task in part else np.array([], dtype=str)
            if not np.array_equal(outcomes.examples.get(task, np.array([], dtype=str)), asked):
                count = len(outcomes.values.get(task, ()))
                others = " others" if count == len(asked) else ""
                raise EvaluationError(
                    f"it was asked for {counted(len(asked), 'example')} of the task '{task}' and returned "
                    f"{count}{others}. Where it declares takes_examples=True, "
                    "`examples` has the positions by task of those to measure: return their outcomes, under "
                    "the names that they have when all are measured."
                )

    def contributions(self, outcomes: Outcomes, start: int, end: int) -> Floats:
        """What each cluster of a part adds to the score, [end - start]."""
        added = np.zeros(end - start)
        for task, values in outcomes.values.items():
            places = self.places[task]
            inside = places[(places >= start) & (places < end)] - start
            weight = len(places) * len(self.places)
            added += np.bincount(inside, weights=values, minlength=end - start) / weight
        return added
