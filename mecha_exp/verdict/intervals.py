"""Confidence intervals: Wilson for proportions, else the bootstrap over clusters; t over replicates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mecha_exp.verdict.panel import Floats, Panel

CONFIDENCE = 0.95
RESAMPLES = 2000
_CHUNK = 1 << 21
_EQUAL = 1e-12


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % confidence interval; the bounds are NaN where there is none."""

    value: float
    low: float = math.nan
    high: float = math.nan

    @property
    def ci95(self) -> tuple[float, float]:
        """The bounds of the interval."""
        return self.low, self.high


def student_quantile(freedom: ArrayLike, p: ArrayLike = 1 - CONFIDENCE) -> Floats:
    """What |t| exceeds with probability p, by Student's t; an infinite freedom is the normal distribution."""
    from scipy.special import stdtrit

    quantile: Floats = -stdtrit(np.asarray(freedom, dtype=np.float64), np.asarray(p) / 2)
    return quantile


def wilson(successes: ArrayLike, count: int) -> tuple[Floats, Floats]:
    """Wilson's score interval of proportions: (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n).

    Args:
        successes: 0 to `count`, any shape.
        count: of examples, at least 1.

    Returns:
        Lower and upper bounds, with the shape of `successes`.

    Source: Wilson 1927, "Probable Inference, the Law of Succession, and Statistical Inference".
    """
    z, share = float(student_quantile(math.inf)), np.asarray(successes, dtype=np.float64) / count
    middle = share + z * z / (2 * count)
    spread = z * np.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    low, high = (middle - spread) / scale, (middle + spread) / scale
    return np.where(share == 0, 0.0, low), np.where(share == 1, 1.0, high)


def unseen(count: int) -> float:
    """The largest share that an event may have which was not seen in `count` examples: 1 - 0.025^(1/n)."""
    return float(1 - ((1 - CONFIDENCE) / 2) ** (1 / count))


class Resampling:
    """Draws of a panel's clusters with replacement.

    Clusters are drawn within strata (the tasks that they have examples of), the same for all settings:
    differences are paired. Replicates are not drawn, since they are few: see `over_replicates`.

    Args:
        panel: whose settings are measured.
        resamples: the number of draws.
        seed: same seed, same draws.
    """

    def __init__(self, panel: Panel, resamples: int = RESAMPLES, seed: int = 0) -> None:
        self._panel, self._resamples, self._seed = panel, resamples, seed

    def task_means(self, name: str) -> Floats:
        """The mean of a task for each draw of clusters, float64 [resamples, candidates]."""
        task = self._panel.tasks[name]
        drawn = np.empty((self._resamples, task.sums.shape[1]))
        start = 0
        for weights in self._cluster_weights():
            chosen = weights[:, task.members]
            drawn[start : start + len(weights)] = (chosen @ task.sums) / (chosen @ task.sizes)[:, None]
            start += len(weights)
        return drawn

    def _cluster_weights(self) -> Iterator[Floats]:
        """How often each cluster is drawn, float64 [some resamples, clusters], the same at each call."""
        clusters = self._panel.clusters
        random = np.random.default_rng([self._seed, 1])
        groups = [np.flatnonzero(self._panel.strata == code) for code in np.unique(self._panel.strata)]
        step = max(1, _CHUNK // clusters)
        for start in range(0, self._resamples, step):
            rows = min(step, self._resamples - start)
            offsets = np.arange(rows)[:, None] * clusters
            places = [group[random.integers(len(group), size=(rows, len(group)))] for group in groups]
            flat = np.concatenate([(offsets + place).reshape(-1) for place in places])
            yield np.bincount(flat, minlength=rows * clusters).reshape(rows, clusters).astype(np.float64)


def percentile_bounds(draws: Floats, values: Floats, panel: Panel) -> tuple[Floats, Floats]:
    """The 2.5 % and 97.5 % quantiles over the first axis, as far from the values as few clusters demand.

    Draws of C clusters in S strata spread too little by sqrt((C - S) / C), and normal quantiles are short by
    t / z with C - S degrees of freedom; both are made up for. C is the effective number of clusters. With as
    many strata as clusters nothing is known of the spread, and nothing is widened.

    Source: Efron 1979 (percentile bootstrap); Hesterberg 2015, arXiv:1411.5279 (its narrowness).
    """
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(draws, [tail, 1 - tail], axis=0)
    factor = _for_few(panel.effective_clusters, len(np.unique(panel.strata)))
    return values - factor * (values - low), values + factor * (high - values)


def _for_few(clusters: float, strata: int) -> float:
    """What the deviations of a bootstrap's quantiles are multiplied by."""
    if clusters <= strata + _EQUAL:
        return 1.0
    freedom = clusters - strata
    quantiles = student_quantile(max(freedom, 1.0)) / student_quantile(math.inf)
    return float(quantiles) * math.sqrt(clusters / freedom)


def over_replicates(bounds: tuple[Floats, Floats], values: Floats, squares: Floats) -> tuple[Floats, Floats]:
    """Bounds over examples and replicates: v - sqrt((v - low)^2 + s) below, and the like above.

    Examples and replicates are crossed, and both are random. The interval of the sum of two errors holds at
    least what it says where each has its own quantile of Student's t (Banerjee 1960; `two_way` is its test).

    Args:
        bounds: over examples.
        values: means over examples and replicates.
        squares: t^2 times the squared standard error over replicates, as `replicate_squares` has it.
    """
    low, high = bounds
    return values - np.sqrt((values - low) ** 2 + squares), values + np.sqrt((high - values) ** 2 + squares)


def replicate_squares(panel: Panel, columns: Floats, p: float = 1 - CONFIDENCE) -> Floats:
    """t(p, R - 1)^2 / R times the variance of each setting's R replicates, [settings]; 0 where R is 1.

    Args:
        panel: that has the settings.
        columns: a number for each candidate, [candidates].
        p: two-sided; the interval's level is 1 - p.
    """
    squares = np.zeros(len(panel.names))
    for setting, (start, count) in enumerate(zip(panel.starts, panel.counts.astype(int), strict=True)):
        if count > 1:
            t = float(student_quantile(count - 1, p))
            squares[setting] = t * t * columns[start : start + count].var(ddof=1) / count
    return squares


def uses_wilson(panel: Panel, name: str) -> bool:
    """Whether a task's means are proportions of independent examples, without replicates."""
    task = panel.tasks[name]
    return task.binary and not task.clustered and not panel.replicated


def task_bounds(panel: Panel, name: str, draws: Floats) -> tuple[Floats, Floats]:
    """Bounds of a task's means, [settings]: Wilson for proportions without clusters, else of the draws."""
    task = panel.tasks[name]
    if uses_wilson(panel, name):
        return wilson(task.sums.sum(axis=0), task.examples)
    values = panel.by_setting(task.means)
    bounds = percentile_bounds(draws, values, panel.restricted(name))
    bounds = over_replicates(bounds, values, replicate_squares(panel, task.means))
    return widened(bounds, values, task.binary, len(task.sizes))


def widened(
    bounds: tuple[Floats, Floats], values: Floats, binary: bool, clusters: int
) -> tuple[Floats, Floats]:
    """Bounds of proportions, kept within 0 to 1 and as wide as unseen misses or hits demand.

    Where all examples are hits (or misses) a bootstrap never draws the other, and its interval has no width.
    """
    low, high = bounds
    if not binary:
        return low, high
    rest = unseen(clusters)
    low = np.where(values >= 1 - _EQUAL, 1 - rest, low)
    high = np.where(values <= _EQUAL, rest, high)
    return np.clip(low, 0, 1), np.clip(high, 0, 1)


def macro_bounds(
    panel: Panel, draws: Floats, tasks: Sequence[tuple[Floats, tuple[Floats, Floats], bool]]
) -> tuple[Floats, Floats]:
    """Bounds of macro means, [settings]: of the draws, and of tasks that are all hits or all misses.

    Draws of such a task never differ, so its own interval takes their place: m - sqrt((m - l)^2 + sum of
    ((m_t - l_t) / T)^2) below, and the like above.

    Args:
        panel: whose macro means m these are.
        draws: of the macro means, [resamples, settings].
        tasks: means m_t and bounds of each of the T tasks, [settings], and whether outcomes are 0 or 1.

    Source: Zou and Donner 2008, "Construction of confidence limits about effect measures" (MOVER).
    """
    values = panel.scores
    low, high = percentile_bounds(draws, values, panel)
    low, high = over_replicates((low, high), values, replicate_squares(panel, panel.column_scores))
    below, above = (values - low) ** 2, (high - values) ** 2
    for means, (task_low, task_high), binary in tasks:
        alike = (means <= _EQUAL) | (means >= 1 - _EQUAL) if binary else np.zeros(len(means), dtype=bool)
        below += np.where(alike, ((means - task_low) / len(tasks)) ** 2, 0)
        above += np.where(alike, ((task_high - means) / len(tasks)) ** 2, 0)
    low, high = values - np.sqrt(below), values + np.sqrt(above)
    if all(binary for _, _, binary in tasks):
        return np.clip(low, 0, 1), np.clip(high, 0, 1)
    return low, high


def estimates(values: Floats, bounds: tuple[Floats, Floats]) -> list[Estimate]:
    """Values with their bounds, [settings] each."""
    low, high = bounds
    return [Estimate(float(v), float(a), float(b)) for v, a, b in zip(values, low, high, strict=True)]


def student(values: NDArray[np.float64]) -> Estimate:
    """The mean of replicates with Student's t interval; no bounds for fewer than two, or for infinities."""
    with np.errstate(invalid="ignore"):  # infinities of both signs
        mean, count = float(values.mean()), len(values)
    if count < 2 or not math.isfinite(mean):
        return Estimate(mean)
    half = float(student_quantile(count - 1)) * float(values.std(ddof=1)) / math.sqrt(count)
    return Estimate(mean, mean - half, mean + half)
