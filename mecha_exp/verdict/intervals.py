"""Confidence intervals: Wilson for proportions, the bootstrap over clusters and replicates for the rest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mecha_exp.verdict.panel import Floats, Panel, TaskPanel

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


def wilson(successes: ArrayLike, count: int) -> tuple[Floats, Floats]:
    """Wilson's score interval of proportions: (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n).

    Args:
        successes: 0 to `count`, any shape.
        count: of examples, at least 1.

    Returns:
        Lower and upper bounds, with the shape of `successes`.

    Source: Wilson 1927, "Probable Inference, the Law of Succession, and Statistical Inference".
    """
    from scipy.special import ndtri

    z, share = float(ndtri((1 + CONFIDENCE) / 2)), np.asarray(successes, dtype=np.float64) / count
    middle = share + z * z / (2 * count)
    spread = z * np.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    low, high = (middle - spread) / scale, (middle + spread) / scale
    return np.where(share == 0, 0.0, low), np.where(share == 1, 1.0, high)


def unseen(count: int) -> float:
    """The largest share that an event may have which was not seen in `count` examples: 1 - 0.025^(1/n)."""
    return float(1 - ((1 - CONFIDENCE) / 2) ** (1 / count))


class Resampling:
    """Draws of a panel's clusters and replicates with replacement.

    Clusters are drawn within strata (the tasks that they have examples of), the same for all settings:
    differences are paired. Replicates are the outer level: settings with the same labels share their draws.
    The deviations of drawn replicates are widened by sqrt(R / (R - 1)), since R of them spread too little.

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

    def over_replicates(self, drawn: Floats) -> Floats:
        """Average columns over drawn replicates, [resamples, candidates] to [resamples, settings]."""
        panel, averaged = self._panel, self._panel.by_setting(drawn)
        if not panel.replicated:
            return averaged
        shares: dict[tuple[str, ...], Floats] = {}
        for setting, (labels, start) in enumerate(zip(panel.replicates, panel.starts, strict=True)):
            count = len(labels)
            if count == 1:
                continue
            order = np.argsort(np.array(labels))
            group = tuple(sorted(labels))
            if group not in shares:
                random = np.random.default_rng([self._seed, 2, len(shares)])
                weights = random.multinomial(count, np.full(count, 1 / count), size=self._resamples)
                shares[group] = (weights / count - 1 / count) * math.sqrt(count / (count - 1))
            columns = drawn[:, start : start + count][:, order]
            averaged[:, setting] += (shares[group] * columns).sum(axis=1)
        return averaged


def percentile_bounds(draws: Floats) -> tuple[Floats, Floats]:
    """The 2.5 % and 97.5 % quantiles over the first axis (percentile bootstrap; Efron 1979)."""
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(draws, [tail, 1 - tail], axis=0)
    return low, high


def task_bounds(panel: Panel, task: TaskPanel, draws: Floats) -> tuple[Floats, Floats]:
    """Bounds of the task's means, [settings]: Wilson for proportions without clusters, else of the draws."""
    if task.binary and not task.clustered and not panel.replicated:
        return wilson(task.sums.sum(axis=0), task.examples)
    return widened(percentile_bounds(draws), panel.by_setting(task.means), task.binary, len(task.sizes))


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
    draws: Floats, values: Floats, tasks: Sequence[tuple[Floats, tuple[Floats, Floats], bool]]
) -> tuple[Floats, Floats]:
    """Bounds of macro means, [settings]: of the draws, and of tasks that are all hits or all misses.

    Draws of such a task never differ, so its own interval takes their place: m - sqrt((m - l)^2 + sum of
    ((m_t - l_t) / T)^2) below, and the like above.

    Args:
        draws: of the macro means, [resamples, settings].
        values: the macro means m, [settings].
        tasks: means m_t and bounds of each of the T tasks, [settings], and whether outcomes are 0 or 1.

    Source: Zou and Donner 2008, "Construction of confidence limits about effect measures" (MOVER).
    """
    low, high = percentile_bounds(draws)
    below, above = (values - low) ** 2, (high - values) ** 2
    for means, (task_low, task_high), binary in tasks:
        alike = (means <= _EQUAL) | (means >= 1 - _EQUAL) if binary else np.zeros(len(means), dtype=bool)
        below += np.where(alike, ((means - task_low) / len(tasks)) ** 2, 0)
        above += np.where(alike, ((task_high - means) / len(tasks)) ** 2, 0)
    low = np.where(low > values, low, values - np.sqrt(below))
    high = np.where(high < values, high, values + np.sqrt(above))
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
    from scipy.special import stdtrit

    half = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2) * values.std(ddof=1) / math.sqrt(count))
    return Estimate(mean, mean - half, mean + half)
