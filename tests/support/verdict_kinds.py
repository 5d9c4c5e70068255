"""Simulated sweeps with the structure of real ones, for how often a verdict is wrong and what it sees.

An example is easy or hard for all points alike, neighbouring points err alike, and examples of a cluster have
a difficulty in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.verdict import Candidate
from mecha_exp.verdict.panel import Panel


@dataclass(frozen=True)
class Kind:
    """A kind of sweep: its size, its data, and how alike its points err."""

    name: str
    points: int
    examples: int
    clusters: int = 0
    tasks: int = 1
    replicates: int = 1
    binary: bool = True
    likeness: float = 0.8
    accuracy: float = 0.87

    def draw(self, random: np.random.Generator, effects: Sequence[float] = ()) -> Panel:
        """One sweep; `effects[i]` is added to the chance of point i to succeed, or to its values if real."""
        groups = self.clusters or self.examples
        group = np.arange(self.examples) % groups
        shape = (self.points, self.replicates)
        easy = np.sqrt(0.5) * (random.normal(size=groups)[group] + random.normal(size=self.examples))
        own = np.sqrt(0.5) * random.normal(size=(groups, *shape))[group]
        own += np.sqrt(0.5) * random.normal(size=(self.examples, *shape))
        latent = np.sqrt(self.likeness) * easy[:, None, None] + np.sqrt(1 - self.likeness) * own
        shift = np.zeros(self.points)
        shift[: len(effects)] = effects
        if self.binary:
            values = (latent < ndtri(self.accuracy + shift)[:, None]).astype(float)
        else:
            values = latent + shift[:, None]
        return Panel.of(self._candidates(values, group), "test")

    def _candidates(self, values: NDArray[np.float64], group: NDArray[np.intp]) -> list[Candidate]:
        """The outcomes as candidates, the examples dealt to tasks of different sizes."""
        bounds = np.cumsum(np.arange(1, self.tasks + 1)) / (self.tasks * (self.tasks + 1) / 2)
        task = np.searchsorted(bounds, (np.arange(self.examples) + 0.5) / self.examples)
        names = {f"t{i}": np.flatnonzero(task == i) for i in range(self.tasks)}
        sources = np.char.add("g", group.astype(str))
        clusters = {name: sources[rows] for name, rows in names.items()}
        return [
            Candidate(
                f"p{point}",
                outcomes={
                    "test": Outcomes(
                        {name: values[rows, point, replicate] for name, rows in names.items()},
                        clusters=clusters,
                    )
                },
                replicate=str(replicate),
            )
            for point in range(self.points)
            for replicate in range(self.replicates)
        ]


KINDS = [
    Kind("10 points, 719 images", 10, 719),
    Kind("50 points, 719 images", 50, 719),
    Kind("90 points, 719 images, neighbours alike", 90, 719, likeness=0.95),
    Kind("20 points, 100 images", 20, 100),
    Kind("20 points, 600 images of 150 sources", 20, 600, clusters=150),
    Kind("20 points, 3 tasks of 600 images", 20, 600, tasks=3),
    Kind("20 points, a loss on 300 texts", 20, 300, binary=False),
    Kind("10 points, 5 seeds, 300 images", 10, 300, replicates=5),
]


def effects(kind: Kind, difference: float) -> list[float]:
    """The first point is better than all others by a difference, above and below the kind's accuracy."""
    if not kind.binary:
        return [difference]
    half = min(difference / 2, 0.99 - kind.accuracy)
    return [half, *([half - difference] * (kind.points - 1))]
