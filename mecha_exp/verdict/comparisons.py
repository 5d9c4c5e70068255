"""Families of comparisons: which settings are compared, and for how many comparisons that is corrected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mecha_exp.verdict.candidates import Direction
from mecha_exp.verdict.choice import LEVEL, best
from mecha_exp.verdict.intervals import Estimate
from mecha_exp.verdict.paired_tests import holm, paired_p_values
from mecha_exp.verdict.panel import Integers, Panel
from mecha_exp.verdict.result import Column, Comparison


@dataclass(frozen=True, eq=False)
class Family:
    """The comparisons of one split, which share a correction.

    Attributes:
        panel: of the split.
        split: its name.
        pairs: settings by place, first less second, [comparisons, 2].
        size: the number of comparisons that Holm's correction is for.
        share: of the 5 % that this family has.
    """

    panel: Panel
    split: str
    pairs: Integers
    size: int
    share: float = 1.0

    def comparisons(self, differences: Sequence[Estimate], *, flips: int, seed: int) -> list[Comparison]:
        """Test each pair, whose difference was estimated already."""
        p_values = paired_p_values(self.panel, self.pairs, flips=flips, seed=seed)
        adjusted = np.minimum(1, holm(p_values, self.size) / self.share)
        names = self.panel.names
        return [
            Comparison(names[i], names[j], self.split, difference, float(p), float(q), bool(q < LEVEL))
            for (i, j), difference, p, q in zip(self.pairs, differences, p_values, adjusted, strict=True)
        ]


def independent_family(panel: Panel, split: str, points: Integers, chosen: int, base: int | None) -> Family:
    """Compare points with the chosen one and the base on data that had no part in the choice.

    The pairs were fixed before the data were seen, so the correction is for those that are made.
    """
    pairs = _pairs(points, chosen, base)
    return Family(panel, split, pairs, len(pairs))


def selected_family(
    panel: Panel,
    split: str,
    eligible: Integers,
    points: Integers,
    chosen: int,
    base: int | None,
    dropped: int = 0,
) -> Family:
    """Compare points with the best one and the base on the data that made it the best.

    Any two of the eligible points could have been compared, since any could have been the best, and so could
    those that a race dropped. The correction is for all their pairs, whichever are looked at.
    """
    count = len(eligible) + dropped
    size = count * (count - 1) // 2 + (count if base is not None else 0)
    return Family(panel, split, _pairs(points, chosen, base), size)


def columns(
    panel: Panel, rows: Integers, direction: Direction, *, flips: int, seed: int
) -> tuple[Column, ...]:
    """The best of each column of a table, and the rows that cannot be told from it.

    The best is chosen on the same data, so the correction is for all pairs of rows in all columns.
    """
    if not len(rows):
        return ()
    parts: list[tuple[str | None, Panel]] = [(None, panel)]
    if len(panel.tasks) > 1:
        parts += [(task, panel.restricted(task)) for task in panel.tasks]
    leaders, p_values = [], []
    for _, part in parts:
        leader = int(rows[best(part.scores[rows], direction)])
        leaders.append(leader)
        p_values.append(paired_p_values(part, _pairs(rows, leader, None), flips=flips, seed=seed))
    family = len(parts) * len(rows) * (len(rows) - 1) // 2
    adjusted = iter(np.split(holm(np.concatenate(p_values), family), len(parts)))
    table = []
    for (task, _), leader in zip(parts, leaders, strict=True):
        others = [panel.names[row] for row in rows if row != leader]
        tied = tuple(name for name, q in zip(others, next(adjusted), strict=True) if q >= LEVEL)
        table.append(Column(task, panel.names[leader], tied))
    return tuple(table)


def _pairs(points: Integers, chosen: int, base: int | None) -> Integers:
    """Each point against the chosen one, then each against the base."""
    pairs = [(point, chosen) for point in points if point != chosen]
    if base is not None:
        pairs += [(point, base) for point in points if point != base]
    return np.array(pairs, dtype=np.intp).reshape(-1, 2)
