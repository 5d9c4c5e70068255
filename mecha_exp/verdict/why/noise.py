"""What noise alone would show: effects less what chance gives them, and tests of drawn keys."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mecha_exp.numbers import is_number
from mecha_exp.verdict.intervals import Estimate, Resampling
from mecha_exp.verdict.paired_tests import holm
from mecha_exp.verdict.panel import Floats, Panel
from mecha_exp.verdict.why.anova import Part, decompose, grid_of

DRAWS = 1000
LEVEL = 0.05
_LARGE = 300
"""Points from which on fewer permutations are drawn."""


@dataclass(frozen=True)
class EffectsOverNoise:
    """Effects on a grid, less what noise alone would give them.

    Attributes:
        shares: of the variance that noise does not explain, by the keys of a main effect or an interaction
            (`rest` for those of three and more), with 95 % intervals. They add up to 1, or are all 0.
        p_values: of the hypothesis that a part is noise alone, after Holm's correction for all parts.
        curves: for each key the mean at each of its values, less the mean of the grid, with 95 % intervals.
        noise: the variance over the grid that noise alone would give.
    """

    shares: Mapping[Part, Estimate]
    p_values: Mapping[Part, float]
    curves: Mapping[str, Mapping[Hashable, Estimate]]
    noise: float

    @property
    def nothing_told(self) -> bool:
        """Whether no part can be told from noise."""
        return all(p >= LEVEL for p in self.p_values.values())


def score_errors(panel: Panel, *, draws: int = DRAWS, seed: int = 0) -> Floats:
    """Errors of the settings' scores as chance may draw them, float64 [draws, settings].

    Clusters of examples are drawn with replacement, the same for all settings. Of settings with R replicates
    a normal error with their variance over R is added.
    """
    resampling, errors = Resampling(panel, draws, seed), np.zeros((draws, len(panel.names)))
    for name in panel.tasks:
        errors += panel.by_setting(resampling.task_means(name)) / len(panel.tasks)
    random, columns = np.random.default_rng([seed, 6]), panel.column_scores
    for place, (start, count) in enumerate(zip(panel.starts, panel.counts.astype(int), strict=True)):
        if count > 1:
            deviation = columns[start : start + count].std(ddof=1) / np.sqrt(count)
            errors[:, place] += deviation * random.normal(size=draws)
    return errors - panel.scores


def effects_over_noise(
    keys: Mapping[str, Sequence[Hashable]], values: Sequence[float], errors: Floats
) -> EffectsOverNoise:
    """Decompose the values of a full grid, and subtract from each part what errors would give it.

    The mean square of a part is on average that of its truth and that of the errors' part, which
    is subtracted; a share is not below 0. Its p-value is the share of draws of errors with a part as large.

    Args:
        keys: as for `functional_anova`.
        values: the metric of each point, finite.
        errors: of the values, as chance may draw them, [draws, points].

    Raises:
        EvaluationError: as `functional_anova`.
    """
    grid, levels = grid_of(keys, np.asarray(values, dtype=np.float64)[None])
    drawn, _ = grid_of(keys, errors)
    parts, of_errors, of_draws = (decompose(list(keys), g) for g in (grid, drawn, grid + drawn))
    squares = {part: float((array**2).mean()) for part, array in parts.items()}
    noise = {part: (array**2).mean(axis=tuple(range(1, array.ndim))) for part, array in of_errors.items()}
    again = {part: (array**2).mean(axis=tuple(range(1, array.ndim))) for part, array in of_draws.items()}
    means = {part: float(n.mean()) for part, n in noise.items()}
    p = [(1 + (noise[part] >= squares[part] * (1 - 1e-9)).sum()) / (1 + len(errors)) for part in parts]
    value = _shares({part: np.array([squares[part] - means[part]]) for part in parts})
    draws = _shares({part: again[part] - 2 * means[part] for part in parts})
    bounds = {part: np.quantile(draws[part], [0.025, 0.975]) for part in parts}
    return EffectsOverNoise(
        {part: Estimate(float(value[part][0]), *map(float, bounds[part])) for part in parts},
        dict(zip(parts, map(float, holm(p)), strict=True)),
        {name: _curve(parts[name,], of_errors[name,], levels[name]) for name in keys},
        float(sum(means.values())),
    )


def _shares(signals: Mapping[Part, Floats]) -> dict[Part, Floats]:
    """Each part's share of all that is above 0; 0 where nothing is."""
    above = {part: np.maximum(signal, 0.0) for part, signal in signals.items()}
    total = np.sum(list(above.values()), axis=0)
    return {
        part: np.divide(signal, total, out=np.zeros_like(signal), where=total > 0)
        for part, signal in above.items()
    }


def _curve(part: Floats, errors: Floats, levels: Sequence[Hashable]) -> dict[Hashable, Estimate]:
    """The effect of a key at each of its values; an error lies as far on the other side."""
    values, drawn = part.reshape(-1), errors.reshape(len(errors), -1)
    low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
    ends = zip(levels, values, values - high, values - low, strict=True)
    return {level: Estimate(float(value), float(a), float(b)) for level, value, a, b in ends}


def chance_of_keys(
    keys: Mapping[str, Sequence[Hashable]], values: Sequence[float], *, permutations: int = 999, seed: int = 0
) -> dict[str, float]:
    """The p-value of each key's independence of the metric, by permutations, after Holm over the keys.

    The statistic is the distance covariance of the key's values and the metric: it is 0 where they are
    independent, and finds any other relation, not only lines. Texts are 0 apart where equal, else 1. It holds
    for points that were drawn independently; a search draws where it was good before, and seems surer.

    Args:
        keys: the value of each key, by key, one for each point.
        values: the metric of each point, finite.
        permutations: a fifth of them from 300 points on.
        seed: same seed, same p-values.

    Source: Szekely, Rizzo and Bakirov 2007, "Measuring and testing dependence by correlation of distances".
    """
    metric = np.asarray(values, dtype=np.float64)
    count = permutations if len(metric) < _LARGE else permutations // 5
    random, of_metric = np.random.default_rng([seed, 7]), _centred(np.abs(metric[:, None] - metric))
    orders = [random.permutation(len(metric)) for _ in range(count)]
    p_values = []
    for column in keys.values():
        of_key = _centred(_distances(column))
        observed = float((of_key * of_metric).sum())
        drawn = np.array([float((of_key * of_metric[np.ix_(order, order)]).sum()) for order in orders])
        p_values.append((1 + (drawn >= observed * (1 - 1e-9)).sum()) / (1 + count))
    return dict(zip(keys, map(float, holm(p_values)), strict=True))


def _distances(column: Sequence[Hashable]) -> Floats:
    """The distances of a key's values: of numbers, or whether texts differ."""
    if all(is_number(value) for value in column):
        numbers = np.array([float(str(value)) for value in column])
        apart: Floats = np.abs(numbers[:, None] - numbers)
        return apart
    codes = np.unique([str(value) for value in column], return_inverse=True)[1]
    differ: Floats = (codes[:, None] != codes).astype(np.float64)
    return differ


def _centred(distances: Floats) -> Floats:
    """Distances less the means of their rows and columns."""
    rows: Floats = distances.mean(axis=0)
    centred: Floats = distances - rows - rows[:, None] + rows.mean()
    return centred
