"""Paired tests of two settings on the same examples, and Holm's correction for many of them."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from mecha_exp.verdict.panel import Floats, Integers, Panel

FLIPS = 9999
_ENUMERATED = 12
_CHUNK = 1 << 21
_TIE = 1e-9
_ENOUGH = 100
"""The number of sums beyond the observed one that settles a large p-value (Besag and Clifford 1991)."""
_DRAWS_FOR_A_LEVEL = 20
"""The number of draws beyond the observed sum to be expected at a level; below it the bound decides."""
_SPREADS = 64
"""Quantiles by which the spread of replicates is averaged over."""
_GAUSSIAN_FACTOR = 1 / (4 * 0.0786496035251426)
"""1 / (4 P(Z >= sqrt 2)): no weighted sum of signs has a heavier tail than so many times the normal one."""


def mcnemar(gained: ArrayLike, lost: ArrayLike) -> Floats:
    """The exact McNemar test: two-sided p of `gained` against `lost` discordant examples, Binomial(n, 1/2).

    Source: McNemar 1947; exact by the binomial distribution.
    """
    from scipy.special import bdtr

    gained, lost = np.asarray(gained, dtype=np.float64), np.asarray(lost, dtype=np.float64)
    fewer, count = np.minimum(gained, lost), gained + lost
    p: Floats = np.minimum(1.0, 2 * bdtr(fewer, np.maximum(count, 1).astype(np.int64), 0.5))
    return np.where(count == 0, 1.0, p)


def sign_flips(contributions: Floats, pairs: Integers, *, flips: int = FLIPS, seed: int = 0) -> Floats:
    """Two-sided p-values of paired permutation tests: the sign of each cluster's difference is exchanged.

    The statistic is the sum of differences. Where all differences that are not zero have one magnitude, as of
    0/1 outcomes without clusters, its distribution is binomial, and the test is the exact McNemar test. Up to
    12 differences are enumerated. Others are drawn, with p = (1 + exceeding) / (1 + drawn); where that is
    too coarse, p is a bound that no such test exceeds: 6.36 P(Z >= |sum| / sqrt(sum of squares)).

    Args:
        contributions: what each cluster adds to each setting's score, float64 [clusters, settings].
        pairs: two settings each, [comparisons, 2].
        flips: the number of drawn sign patterns, fewer where 100 exceed.
        seed: same seed, same p-values.

    Sources: Fisher 1935 (the test); Bentkus and Dzindzalieta 2015, arXiv:1307.3451 (the bound).
    """
    p_values = np.ones(len(pairs))
    drawn = []
    for number, (one, other) in enumerate(pairs):
        differences = contributions[:, one] - contributions[:, other]
        sizes = np.abs(differences)
        if not len(sizes) or not (largest := sizes.max()):
            continue
        nonzero = differences[sizes > _TIE * largest]
        if np.ptp(np.abs(nonzero)) <= _TIE * largest:
            p_values[number] = mcnemar((nonzero > 0).sum(), (nonzero < 0).sum())
        elif len(nonzero) <= _ENUMERATED:
            p_values[number] = _enumerated(nonzero)
        else:
            p_values[number] = _tail_bound(nonzero)
            if p_values[number] >= 1 / (flips + 1):
                drawn.append(number)
    if drawn:
        p_values[drawn] = _drawn(contributions, pairs[drawn], flips, seed)
    return p_values


def _enumerated(differences: Floats) -> float:
    """The share of all sign patterns whose sum is as far from zero."""
    patterns = np.arange(2 ** len(differences))[:, None] >> np.arange(len(differences)) & 1
    sums = np.abs((2 * patterns - 1) @ differences)
    limit = abs(differences.sum()) - _TIE * np.abs(differences).sum()
    return float((sums >= limit).mean())


def _tail_bound(differences: Floats) -> float:
    """An upper bound of the two-sided p-value of a weighted sum of random signs."""
    from scipy.special import ndtr

    units = differences / np.abs(differences).max()
    z = abs(units.sum()) / math.sqrt((units**2).sum())
    return min(1.0, float(2 * _GAUSSIAN_FACTOR * ndtr(-z)))


def _drawn(contributions: Floats, pairs: Integers, flips: int, seed: int) -> Floats:
    """The share of drawn sign patterns whose sum is as far from zero, counting the observed one."""
    scores = contributions.sum(axis=0)
    rounding = _TIE * np.abs(contributions).sum(axis=0).max()
    limits = np.abs(scores[pairs[:, 0]] - scores[pairs[:, 1]]) - rounding
    random, clusters = np.random.default_rng([seed, 3]), len(contributions)
    exceeding, drawn, active = np.zeros(len(pairs)), np.zeros(len(pairs)), np.arange(len(pairs))
    step = max(1, min(_CHUNK // clusters, flips // 10))
    for start in range(0, flips, step):
        rows = min(step, flips - start)
        signs = random.integers(0, 2, size=(rows, clusters), dtype=np.int8) * 2.0 - 1.0
        settings, places = np.unique(pairs[active], return_inverse=True)
        sums = (signs @ contributions[:, settings])[:, places.reshape(-1, 2)]
        exceeding[active] += (np.abs(sums[..., 0] - sums[..., 1]) >= limits[active]).sum(axis=0)
        drawn[active] += rows
        active = active[exceeding[active] < _ENOUGH]
        if not len(active):
            break
    p: Floats = (exceeding + 1) / (drawn + 1)
    return p


def two_way(panel: Panel, pairs: Integers) -> Floats:
    """Two-sided p-values of differences over examples and replicates, which are crossed.

    t = difference / sqrt(V_replicates / R + V_clusters / C), with Satterthwaite's degrees of freedom.
    Replicates are paired where both settings have the same labels.
    """
    from scipy.special import stdtr

    p_values = np.ones(len(pairs))
    for number, (one, other) in enumerate(pairs):
        error, freedom = standard_error(panel, int(one), int(other))
        if error > 0:
            t = abs(panel.scores[one] - panel.scores[other]) / error
            p_values[number] = 2 * stdtr(freedom, -t)
    return p_values


def standard_error(panel: Panel, one: int, other: int) -> tuple[float, float]:
    """Compute a difference's standard error over examples and replicates, and Satterthwaite's freedom."""
    clusters, replicates, replicate_freedom = squared_errors(panel, one, other)
    total = clusters + replicates
    if total <= 0:
        return 0.0, math.inf
    return math.sqrt(total), float(_freedom(panel, clusters, np.array(replicates), replicate_freedom))


def _freedom(panel: Panel, clusters: float, replicates: Floats, replicate_freedom: float) -> Floats:
    """Satterthwaite's degrees of freedom of the sum of two squared errors, for any of the second."""
    parts = clusters**2 / max(panel.clusters - 1, 1) + replicates**2 / max(replicate_freedom, 1)
    freedom: Floats = (clusters + replicates) ** 2 / parts
    return freedom


def detectable_difference(
    panel: Panel, one: int, other: int, *, level: float, power: float, flips: int = FLIPS
) -> float:
    """The true difference of two settings that their test shows with a power, at a level of its p-value.

    (c + z_power) times the standard error, where c is what the test of this pair needs: the normal quantile
    and one example more for McNemar's test, which counts whole examples; for drawn signs the normal quantile,
    or that of their bound where draws are too coarse. With replicates c varies from one set of replicates to
    the next, with their spread, and the difference is that whose power over all such spreads is as asked.

    Args:
        panel: of both settings.
        one: the first setting, by place.
        other: the second.
        level: the p-value below which the pair counts as different, after the correction.
        power: the chance to find the difference.
        flips: drawn sign patterns, as for `sign_flips`.

    Returns:
        The difference in units of the metric; 0 where the two agree on all examples.
    """
    from scipy.special import ndtri

    error, _ = standard_error(panel, one, other)
    if error == 0:
        return 0.0
    if (panel.counts[[one, other]] > 1).any():
        return _detectable_by_t(panel, one, other, level, power)
    sizes = np.abs(panel.contributions[:, one] - panel.contributions[:, other])
    sizes = sizes[sizes > _TIE * sizes.max()]
    if np.ptp(sizes) <= _TIE * sizes.max():
        return float(ndtri(1 - level / 2) + ndtri(power)) * error + float(sizes[0])
    tail = level / 2 if level * (flips + 1) >= _DRAWS_FOR_A_LEVEL else level / (2 * _GAUSSIAN_FACTOR)
    return float(-ndtri(tail) + ndtri(power)) * error


def _detectable_by_t(panel: Panel, one: int, other: int, level: float, power: float) -> float:
    """The difference that `two_way` shows with a power, over the spreads that replicates may have."""
    from scipy.optimize import brentq
    from scipy.special import gammaincinv, ndtr, stdtrit

    clusters, replicates, freedom = squared_errors(panel, one, other)
    half = max(freedom, 1) / 2
    drawn = replicates * gammaincinv(half, (np.arange(_SPREADS) + 0.5) / _SPREADS) / half
    critical = stdtrit(_freedom(panel, clusters, drawn, freedom), 1 - level / 2) * np.sqrt(clusters + drawn)
    error = math.sqrt(clusters + replicates)
    highest = float(critical.max()) + 10 * error
    return float(brentq(lambda d: float(ndtr((d - critical) / error).mean()) - power, 0, highest))


def squared_errors(panel: Panel, one: int, other: int) -> tuple[float, float, float]:
    """Squared standard errors of a difference: over clusters, over replicates, and the latter's freedom."""
    differences = panel.contributions[:, one] - panel.contributions[:, other]
    clusters = float((differences**2).sum())
    scores = [dict(zip(panel.replicates[i], _column_scores(panel, i), strict=True)) for i in (one, other)]
    if set(scores[0]) == set(scores[1]):
        samples = [np.array([scores[0][label] - scores[1][label] for label in scores[0]])]
    else:
        samples = [np.array(list(score.values())) for score in scores]
    parts = [(float(s.var(ddof=1)) / len(s), len(s) - 1) for s in samples if len(s) > 1]
    replicates = sum(part for part, _ in parts)
    denominator = sum(part**2 / freedom for part, freedom in parts)
    return clusters, replicates, replicates**2 / denominator if denominator else 0.0


def _column_scores(panel: Panel, setting: int) -> Floats:
    """The scores of a setting's replicates."""
    start = int(panel.starts[setting])
    return panel.column_scores[start : start + len(panel.replicates[setting])]


def paired_p_values(panel: Panel, pairs: Integers, *, flips: int = FLIPS, seed: int = 0) -> Floats:
    """Two-sided p-values of differences: `two_way` where there are replicates, else `sign_flips`."""
    p = np.ones(len(pairs))
    if len(pairs):
        replicated = (panel.counts[pairs] > 1).any(axis=1)
        p[replicated] = two_way(panel, pairs[replicated])
        p[~replicated] = sign_flips(panel.contributions, pairs[~replicated], flips=flips, seed=seed)
    return p


def holm(p_values: ArrayLike, family: int | None = None) -> Floats:
    """Holm's step-down adjustment: the largest of (m - i) p_(i) so far, at most 1.

    Args:
        p_values: of the comparisons that were made, [comparisons].
        family: the number of comparisons m that could have been made; those that were not count as not
            rejected. The number of p-values if it is not given.

    Source: Holm 1979, "A Simple Sequentially Rejective Multiple Test Procedure".
    """
    p = np.asarray(p_values, dtype=np.float64)
    family = len(p) if family is None else max(family, len(p))
    order = np.argsort(p, kind="stable")
    steps = np.minimum(1.0, p[order] * (family - np.arange(len(p))))
    adjusted = np.empty(len(p))
    adjusted[order] = np.maximum.accumulate(steps)
    return adjusted
