"""The hypervolume of settings: the volume between a reference point and all that a front dominates.

Source: Zitzler and Thiele 1998, "Multiobjective Optimization Using Evolutionary Algorithms" (the measure);
While, Bradstreet and Barone 2012, "A Fast Way of Calculating Exact Hypervolumes" (exclusive volumes).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def worst_values(metrics: Mapping[str, Sequence[float]], directions: Mapping[str, str]) -> dict[str, float]:
    """The worst value of each metric over the settings whose metrics are all finite; empty without any.

    Args:
        metrics: the values of all settings, by metric.
        directions: `maximize` or `minimize`, by metric.
    """
    rows = np.array([metrics[name] for name in directions], dtype=np.float64)
    rows = rows[:, np.isfinite(rows).all(axis=0)]
    if not rows.size:
        return {}
    return {
        name: float(row.min() if directions[name] == "maximize" else row.max())
        for name, row in zip(directions, rows, strict=True)
    }


def hypervolumes(
    metrics: Mapping[str, Sequence[float]],
    directions: Mapping[str, str],
    reference: Mapping[str, float],
) -> list[float]:
    """The hypervolume after each setting: that of all settings up to it.

    A setting that is not better than the reference point in all metrics, or not finite, adds nothing.

    Args:
        metrics: the values of the settings in their order, by metric.
        directions: `maximize` or `minimize`, by metric.
        reference: a value for each metric.

    Returns:
        a volume for each setting, in the product of the metrics' units.

    >>> hypervolumes({"a": [1, 2, 0.5], "b": [2, 1, 9]}, {"a": "maximize", "b": "maximize"}, {"a": 0, "b": 0})
    [2.0, 3.0, 6.5]
    """
    signs = {name: 1.0 if better == "maximize" else -1.0 for name, better in directions.items()}
    gains = np.stack(
        [sign * (np.asarray(metrics[n], dtype=np.float64) - reference[n]) for n, sign in signs.items()],
        axis=1,
    )
    front, volume, volumes = np.zeros((0, len(signs))), 0.0, []
    for gain in gains:
        if np.isfinite(gain).all() and (gain > 0).all():
            added = _exclusive(gain, front)
            if added > 0:
                volume += added
                front = _undominated(np.concatenate([front, gain[None]]))
        volumes.append(volume)
    return volumes


def _volume(front: Floats) -> float:
    """The volume between the origin and all that a front dominates, [points, metrics], positive."""
    if not len(front):
        return 0.0
    if front.shape[1] == 1:
        return float(front.max())
    if front.shape[1] == 2:
        ordered = front[np.argsort(-front[:, 0], kind="stable")]
        heights = np.maximum.accumulate(ordered[:, 1])
        steps = np.diff(heights, prepend=0.0)
        return float((ordered[:, 0] * steps).sum())
    return sum(_exclusive(point, front[number + 1 :]) for number, point in enumerate(front))


def _exclusive(point: Floats, others: Floats) -> float:
    """The volume that a point dominates and the others do not."""
    limited = _undominated(np.minimum(others, point))
    return max(0.0, float(point.prod()) - _volume(limited))


def _undominated(points: Floats) -> Floats:
    """The points that no other one is as good as in all metrics; one of those that are equal."""
    points = np.unique(points, axis=0)
    as_good: NDArray[np.bool_] = np.all(points[:, None, :] >= points[None, :, :], axis=2)
    undominated: Floats = points[as_good.sum(axis=0) == 1]  # a point is as good as itself
    return undominated
