"""Paired tests of two settings on the same examples, and Holm's correction for many of them."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from mecha_exp.verdict.intervals import student_quantile
from mecha_exp.verdict.panel import Floats, Integers, Panel

FLIPS = 9999
_ENUMERATED = 12
_CHUNK = 1 << 21
_TIE = 1e-9
_ENOUGH = 100
"""The number of sums beyond the observed one that settles a large p-value (Besag and Clifford 1991)."""
_DRAWS_FOR_A_LEVEL = 20
"""The number of draws beyond the observed sum to be expected at a level; below it the bound decides."""
_LEAST, _HALVINGS = 1e-300, 40
"""The least p-value over replicates, and how often the range of its logarithm is halved."""
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
    """Two-sided p-values of differences over examples and replicates, both random, which are crossed.

    p solves difference^2 = t(p, C - 1)^2 V_examples + sum t(p, R - 1)^2 V_replicates, where V are squared
    standard errors and t(p, f) the two-sided quantile of Student's t with f degrees of freedom. It is never
    above the p of a t test with the degrees of freedom of the replicates alone, and holds its level for any
    spread that replicates may have, another one in each setting. Replicates are paired where both settings
    have the same labels, so that effects which they share cancel.

    Source: Banerjee 1960, "Approximate confidence interval for linear functions of means of k populations
    when the population variances are not equal", Sankhya 22.
    """
    from scipy.special import stdtr

    p_values = np.ones(len(pairs))
    if not len(pairs):
        return p_values
    errors, freedom = map(np.array, zip(*(_padded(panel, int(i), int(j)) for i, j in pairs), strict=True))
    squares = (panel.scores[pairs[:, 0]] - panel.scores[pairs[:, 1]]) ** 2
    differing = np.flatnonzero((errors.sum(axis=1) > 0) & (squares > 0))
    errors, freedom, squares = errors[differing], freedom[differing], squares[differing, None]
    t = np.sqrt(squares / errors.sum(axis=1, keepdims=True))
    ends = np.log(2 * stdtr(np.where(errors > 0, freedom, np.inf), -t).clip(_LEAST))
    low, high = ends.min(axis=1, keepdims=True), ends.max(axis=1, keepdims=True)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        needed = (student_quantile(freedom, np.exp(middle)) ** 2 * errors).sum(axis=1, keepdims=True)
        low, high = np.where(needed > squares, middle, low), np.where(needed > squares, high, middle)
    p_values[differing] = np.exp(high[:, 0])
    return p_values


def _padded(panel: Panel, one: int, other: int) -> tuple[Floats, Floats]:
    """`squared_errors` as three parts each; those that are not there are 0, with one degree of freedom."""
    errors, freedom = squared_errors(panel, one, other)
    rest = 3 - len(errors)
    return np.pad(errors, (0, rest)), np.pad(freedom, (0, rest), constant_values=1.0)


def detectable_difference(
    panel: Panel, one: int, other: int, *, level: float, power: float, flips: int = FLIPS
) -> float:
    """The true difference D of two settings that their test shows with a power, at a level of its p-value.

    D = c sqrt(V + D^2 / C) + z_power sqrt(V), where V is the squared standard error of the difference over C
    clusters, and c what the test of this pair needs: the normal quantile and one example more for McNemar's
    test, which counts whole examples; for drawn signs the normal quantile, or that of their bound where draws
    are too coarse. With replicates c varies from one set of replicates to the next, with their spread, and
    the difference is that whose power over all such spreads is as asked.

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

    differences = panel.contributions[:, one] - panel.contributions[:, other]
    sizes = np.abs(differences)
    if not len(sizes) or not sizes.max():
        return 0.0
    spread, more = _spread(panel, differences), 0.0
    if (panel.counts[[one, other]] > 1).any():
        return _detectable_by_t(panel, (one, other), spread, level, power)
    sizes = sizes[sizes > _TIE * sizes.max()]
    tail = level / 2
    if np.ptp(sizes) <= _TIE * sizes.max():
        more = float(sizes[0])
    elif level * (flips + 1) < _DRAWS_FOR_A_LEVEL:
        tail = level / (2 * _GAUSSIAN_FACTOR)
    needed, wanted = float(ndtri(tail)), more + float(ndtri(power)) * math.sqrt(spread)
    share = needed**2 / panel.effective_clusters
    if share >= 1:
        return math.inf
    root = share * wanted**2 + (1 - share) * needed**2 * spread
    return (wanted + math.sqrt(root)) / (1 - share)


def _spread(panel: Panel, differences: Floats) -> float:
    """The squared standard error of a sum of differences over clusters, apart from their mean."""
    return float(((differences - differences.sum() * panel.weights) ** 2).sum())


def _detectable_by_t(panel: Panel, pair: tuple[int, int], spread: float, level: float, power: float) -> float:
    """The difference that `two_way` shows with a power, over the spreads that replicates may have."""
    from scipy.optimize import brentq
    from scipy.special import gammaincinv, ndtr

    errors, freedom = squared_errors(panel, *pair)
    quantiles, places = student_quantile(freedom, level) ** 2, (np.arange(_SPREADS) + 0.5) / _SPREADS
    halves = freedom[1:, None] / 2
    drawn = errors[1:, None] * gammaincinv(halves, places) / halves
    needed, error = quantiles[1:] @ drawn, math.sqrt(spread + errors[1:].sum())

    def found(d: float) -> float:
        critical = np.sqrt(quantiles[0] * (spread + d * d / panel.effective_clusters) + needed)
        return float(ndtr((d - critical) / error).mean()) - power

    highest = error
    for _ in range(60):
        if found(highest) > 0:
            return float(brentq(found, 0, highest))
        highest *= 2
    return math.inf


def squared_errors(panel: Panel, one: int, other: int) -> tuple[Floats, Floats]:
    """Squared standard errors of a difference with their degrees of freedom: over clusters, over replicates.

    The latter are one of the differences where both settings have the same replicates, else one of each
    setting with several. What replicates and examples do together is in both, so that their sum is not too
    small. Two replicates that differ may have as many hits by chance: counts have the variance of rounding,
    1/12 of an example squared, beside that of the replicates.
    """
    differences = panel.contributions[:, one] - panel.contributions[:, other]
    parts = [(float((differences**2).sum()), max(panel.effective_clusters - 1, 1.0))]
    both = [(panel.replicates[place], _columns(panel, panel.column_scores, place)) for place in (one, other)]
    scores = [dict(zip(labels, columns, strict=True)) for labels, columns in both]
    if set(scores[0]) == set(scores[1]):
        samples = [np.array([scores[0][label] - scores[1][label] for label in scores[0]])]
    else:
        samples = [np.array(list(score.values())) for score in scores]
    rounding = _rounding(panel, one, other)
    parts += [((float(s.var(ddof=1)) + rounding) / len(s), len(s) - 1.0) for s in samples if len(s) > 1]
    errors, freedom = np.array(parts).T
    return errors, freedom


def _rounding(panel: Panel, one: int, other: int) -> float:
    """The variance of counts as scores of 0/1 outcomes; 0 where all replicates of both settings are alike."""
    alike = all(
        (columns == columns[:, :1]).all()
        for task in panel.tasks.values()
        for columns in (_columns(panel, task.sums, one), _columns(panel, task.sums, other))
    )
    steps = [1 / (task.examples * len(panel.tasks)) for task in panel.tasks.values() if task.binary]
    return 0.0 if alike else sum(step**2 for step in steps) / 12


def _columns(panel: Panel, values: Floats, setting: int) -> Floats:
    """The columns of a setting's replicates, [..., replicates]."""
    start = int(panel.starts[setting])
    return values[..., start : start + len(panel.replicates[setting])]


def skewness(panel: Panel, parts: Floats) -> float:
    """The skewness of a sum of parts under sampling of clusters: sum d^3 / (sum d^2)^1.5, less the mean.

    0 for 0/1 outcomes without clusters, whose tests and intervals are exact whatever their skewness.

    Args:
        panel: that has the clusters.
        parts: what each cluster adds to a score or to a difference, [clusters].
    """
    if panel.binary and panel.clusters == panel.examples:
        return 0.0
    centred = parts - parts.sum() * panel.weights
    square = float((centred**2).sum())
    return float((centred**3).sum()) / square**1.5 if square > 0 else 0.0


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
