"""Panels: the outcomes of comparable candidates on one split, as arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mecha_exp.evaluation.outcomes import Names, Outcomes, common_clusters
from mecha_exp.verdict.candidates import Candidate

Floats = NDArray[np.float64]
Integers = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class TaskPanel:
    """The outcomes of one task, added up by cluster.

    Attributes:
        sums: of values, float64 [clusters of the task, candidates].
        sizes: examples of each cluster, float64 [clusters of the task].
        members: the place of each cluster among those of the panel, [clusters of the task].
        binary: whether all values are 0 or 1.
    """

    sums: Floats
    sizes: Floats
    members: Integers
    binary: bool

    @property
    def examples(self) -> int:
        """The number of examples."""
        return int(self.sizes.sum())

    @property
    def clustered(self) -> bool:
        """Whether a cluster has several examples."""
        return self.examples > len(self.sizes)

    @cached_property
    def means(self) -> Floats:
        """The mean of each candidate, float64 [candidates]."""
        means: Floats = self.sums.sum(axis=0) / self.sizes.sum()
        return means


@dataclass(frozen=True, eq=False)
class Panel:
    """The outcomes of candidates on a split. The columns of a setting's replicates are neighbours.

    Attributes:
        names: of the settings.
        replicates: labels of the replicates of each setting.
        starts: the first column of each setting.
        tasks: by name.
        strata: for each cluster which tasks it has examples of, as a code.
    """

    names: tuple[str, ...]
    replicates: tuple[tuple[str, ...], ...]
    starts: Integers
    tasks: Mapping[str, TaskPanel]
    strata: Integers

    @classmethod
    def of(cls, candidates: Sequence[Candidate], split: str) -> Panel:
        """Arrange the outcomes of comparable candidates (see `comparable`), at least one."""
        settings: dict[str, list[Candidate]] = {}
        for candidate in candidates:
            settings.setdefault(candidate.name, []).append(candidate)
        columns = [c.outcomes[split] for group in settings.values() for c in group]
        sources, tasks = common_clusters(columns[0]), {}
        for task in columns[0].values:
            tasks[task] = _task_panel(columns, task, sources[task])
        present = np.zeros((max(int(codes.max()) for codes in sources.values()) + 1, len(tasks)), dtype=bool)
        for place, task in enumerate(tasks):
            present[tasks[task].members, place] = True
        _, strata = np.unique(present, axis=0, return_inverse=True)
        counts = [len(group) for group in settings.values()]
        return cls(
            tuple(settings),
            tuple(tuple(c.replicate for c in group) for group in settings.values()),
            np.concatenate([[0], np.cumsum(counts[:-1])]).astype(np.intp),
            tasks,
            strata.reshape(-1).astype(np.intp),
        )

    @property
    def clusters(self) -> int:
        """The number of clusters, over all tasks."""
        return len(self.strata)

    @property
    def examples(self) -> int:
        """The number of examples, over all tasks."""
        return sum(task.examples for task in self.tasks.values())

    @property
    def binary(self) -> bool:
        """Whether all values are 0 or 1."""
        return all(task.binary for task in self.tasks.values())

    @property
    def replicated(self) -> bool:
        """Whether a setting has several replicates."""
        return any(len(labels) > 1 for labels in self.replicates)

    @cached_property
    def counts(self) -> Floats:
        """The number of replicates of each setting."""
        return np.array([len(labels) for labels in self.replicates], dtype=np.float64)

    def by_setting(self, columns: Floats) -> Floats:
        """The means over replicates, [..., candidates] to [..., settings]."""
        if not self.replicated:
            return columns
        means: Floats = np.add.reduceat(columns, self.starts, axis=-1) / self.counts
        return means

    @cached_property
    def column_scores(self) -> Floats:
        """The macro mean of each candidate, float64 [candidates]."""
        scores: Floats = np.mean([task.means for task in self.tasks.values()], axis=0)
        return scores

    @cached_property
    def scores(self) -> Floats:
        """The macro mean of each setting, over replicates, float64 [settings]."""
        return self.by_setting(self.column_scores)

    @cached_property
    def contributions(self) -> Floats:
        """What each cluster adds to the macro mean of each setting, float64 [clusters, settings]."""
        parts = np.zeros((self.clusters, len(self.names)))
        for task in self.tasks.values():
            parts[task.members] += self.by_setting(task.sums) / (task.examples * len(self.tasks))
        return parts

    @cached_property
    def weights(self) -> Floats:
        """The share of each cluster in macro means, float64 [clusters]; they add up to 1."""
        weights = np.zeros(self.clusters)
        for task in self.tasks.values():
            weights[task.members] += task.sizes / (task.examples * len(self.tasks))
        return weights

    @cached_property
    def effective_clusters(self) -> float:
        """How many clusters of one weight w would tell as much: 1 / sum w^2 (Kish 1965)."""
        return float(1 / (self.weights**2).sum())

    def index(self, name: str) -> int:
        """The place of a setting."""
        return self.names.index(name)

    def of_settings(self, places: Integers) -> Panel:
        """The panel of some settings, in the order of their places."""
        columns = np.concatenate([self.starts[p] + np.arange(len(self.replicates[p])) for p in places])
        counts = [len(self.replicates[place]) for place in places]
        return Panel(
            tuple(self.names[place] for place in places),
            tuple(self.replicates[place] for place in places),
            np.concatenate([[0], np.cumsum(counts[:-1])]).astype(np.intp),
            {name: replace(task, sums=task.sums[:, columns]) for name, task in self.tasks.items()},
            self.strata,
        )

    def restricted(self, task: str) -> Panel:
        """The panel of one task alone."""
        part = self.tasks[task]
        alone = TaskPanel(part.sums, part.sizes, np.arange(len(part.members)), part.binary)
        strata = np.zeros(len(part.members), dtype=np.intp)
        return Panel(self.names, self.replicates, self.starts, {task: alone}, strata)


def _task_panel(columns: Sequence[Outcomes], task: str, codes: Integers) -> TaskPanel:
    """Add up the values of a task by cluster, column by column."""
    members, places = np.unique(codes, return_inverse=True)
    places, binary = places.reshape(-1), True
    sums, first = np.empty((len(members), len(columns))), columns[0].examples[task]
    for column, outcomes in enumerate(columns):
        values = outcomes.values[task][_order(first, outcomes.examples[task])]
        binary = binary and bool(((values == 0) | (values == 1)).all())
        sums[:, column] = np.bincount(places, weights=values, minlength=len(members))
    return TaskPanel(sums, np.bincount(places).astype(np.float64), members.astype(np.intp), binary)


def _order(names: Names, others: Names) -> slice | Integers:
    """The places of `names` among `others`, which are the same in another order."""
    if names is others or np.array_equal(names, others):
        return slice(None)
    order = np.argsort(others)
    places: Integers = order[np.searchsorted(others[order], names)]
    return places
