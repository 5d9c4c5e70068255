"""Families of comparisons: which settings are compared, and for how many comparisons that is corrected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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

    def without(self, point: str, against: str | None) -> Family:
        """The family without one of its pairs, which is compared elsewhere."""
        names = self.panel.names
        kept = [(i, j) for i, j in self.pairs if (names[i], names[j]) != (point, against)]
        return replace(self, pairs=np.array(kept, dtype=np.intp).reshape(-1, 2))

    def comparisons(self, differences: Sequence[Estimate], *, flips: int, seed: int) -> list[Comparison]:
        """Test each pair, whose difference was estimated already."""
        p_values = paired_p_values(self.panel, self.pairs, flips=flips, seed=seed)
        adjusted = np.minimum(1, holm(p_values, self.size) / self.share)
        names = self.panel.names
        return [
            Comparison(names[i], names[j], self.split, difference, float(p), float(q), bool(q < LEVEL))
            for (i, j), difference, p, q in zip(self.pairs, differences, p_values, adjusted, strict=True)
        ]


def every_pair(settings: int, inputs: int) -> int:
    """The number of pairs of settings, and of a setting and an input."""
    return settings * (settings - 1) // 2 + settings * inputs


def independent_family(
    panel: Panel,
    split: str,
    points: Integers,
    chosen: int,
    base: int | None,
    best_input: int | None = None,
    *,
    eligible: int = 0,
) -> Family:
    """Compare points with the chosen one and the base on examples that had no part in the choice.

    Without replicates the pairs were fixed before the data were seen, so the correction is for those that are
    made. Replicates did have a part: the same models were measured when the point was chosen, and a point
    that was lucky in its seeds is lucky on any examples. Then the correction is for all pairs of `eligible`.
    """
    pairs = _pairs(points, chosen, base, best_input)
    size, inputs = len(pairs), (base is not None) + (best_input is not None)
    if (panel.counts[points] > 1).any():
        size = max(size, every_pair(max(eligible, len(points)), inputs))
    return Family(panel, split, pairs, size)


def selected_family(
    panel: Panel,
    split: str,
    eligible: Integers,
    points: Integers,
    chosen: int,
    base: int | None,
    best_input: int | None = None,
    *,
    inputs: int = 0,
    dropped: int = 0,
) -> Family:
    """Compare points with the best one and the base on the data that made it the best.

    Any two of the eligible points could have been compared, since any could have been the best, and so could
    those that a race dropped, and any of the inputs could have been the best one. The correction is for all
    these pairs, whichever are looked at.

    Args:
        panel: of all of them.
        split: its name.
        eligible: the points that could have been chosen.
        points: those that are compared.
        chosen: the best of them.
        base: the input with which all are compared; None without one.
        best_input: the best of the inputs, with which the chosen point is compared; None without one.
        inputs: how many inputs could have been the best, the base not counted.
        dropped: how many more points could have been chosen.
    """
    others = (base is not None) + (inputs if best_input is not None else 0)
    size = every_pair(len(eligible) + dropped, others)
    return Family(panel, split, _pairs(points, chosen, base, best_input), size)


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


def _pairs(points: Integers, chosen: int, base: int | None, best_input: int | None = None) -> Integers:
    """Pair each point with the chosen one and with the base, then the chosen one with the best input."""
    pairs = [(point, chosen) for point in points if point != chosen]
    if base is not None:
        pairs += [(point, base) for point in points if point != base]
    if best_input is not None and best_input != base:
        pairs.append((chosen, best_input))
    return np.array(pairs, dtype=np.intp).reshape(-1, 2)
