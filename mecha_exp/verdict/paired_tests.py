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
"""So many sums beyond the observed one settle a p-value that is not small (Besag and Clifford 1991)."""
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
    p = np.ones(len(pairs))
    drawn = []
    for place, (one, other) in enumerate(pairs):
        differences = contributions[:, one] - contributions[:, other]
        sizes = np.abs(differences)
        if not len(sizes) or not (largest := sizes.max()):
            continue
        nonzero = differences[sizes > _TIE * largest]
        if np.ptp(np.abs(nonzero)) <= _TIE * largest:
            p[place] = mcnemar((nonzero > 0).sum(), (nonzero < 0).sum())
        elif len(nonzero) <= _ENUMERATED:
            p[place] = _enumerated(nonzero)
        else:
            p[place] = _tail_bound(nonzero)
            if p[place] >= 1 / (flips + 1):
                drawn.append(place)
    if drawn:
        p[drawn] = _drawn(contributions, pairs[drawn], flips, seed)
    return p


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

    p = np.ones(len(pairs))
    for place, (one, other) in enumerate(pairs):
        clusters, replicates, replicate_freedom = squared_errors(panel, int(one), int(other))
        total = clusters + replicates
        if total <= 0:
            continue
        parts = [(clusters, panel.clusters - 1), (replicates, replicate_freedom)]
        freedom = total**2 / sum(part**2 / max(count, 1) for part, count in parts if part > 0)
        t = abs(panel.scores[one] - panel.scores[other]) / math.sqrt(total)
        p[place] = 2 * stdtr(freedom, -t)
    return p


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
