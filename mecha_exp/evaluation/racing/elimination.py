"""Who is dropped from a race: by a sequential test with a known error, or by successive halving."""

from __future__ import annotations

import math

import numpy as np

from mecha_exp.evaluation.racing.order import Floats, Integers

LOOKS = tuple(step / 16 for step in range(1, 16))
"""The parts of the clusters after which the sequential test looks at all points."""
KEPT = 1 / 3
"""The part of the points that goes on to the next rung."""
_LARGEST_BET = 0.9
_ROUNDING = 1e-12


def log_growth(differences: Floats, bound: float, clusters: int, start: int) -> Floats:
    """The logarithm of the growth of a bet that a leader is better than others, after each new cluster.

    The clusters are drawn without replacement from all N. Under the null hypothesis that the other is at
    least as good as the leader on all of them, the differences d add up to at most 0, so the expectation of
    the next is at most m_t = -(d_1 + ... + d_(t-1)) / (N - t + 1). Then the product of
    1 + b_t (d_t - m_t) is a nonnegative supermartingale for every bet 0 <= b_t <= 1 / (bound + m_t) that
    only the past decides. By Ville's inequality it ever reaches 1 / alpha with probability at most alpha.

    The bet is mean / (mean square + bound^2 / start) of d - m over the clusters before `start`, at least 0
    and at most 0.9 / (bound + m_t).

    Args:
        differences: the leader's contributions less the other's, in the order, [clusters so far, others].
        bound: by how much the other is better than the leader in a new cluster at most.
        clusters: how many there are in all, N.
        start: the clusters that decided who leads and the bet; those after it are new, at least 1.

    Returns:
        The sum of logarithms over the new clusters up to each, [new clusters, others].

    Source: Waudby-Smith and Ramdas 2024, arXiv:2010.09686, section 5 (betting without replacement).
    """
    before = differences.cumsum(axis=0) - differences
    expected = -before / (clusters - np.arange(len(differences)))[:, None]
    excess = differences - expected
    square = (excess[:start] ** 2).mean(axis=0) + bound**2 / start
    bet = np.maximum(excess[:start].mean(axis=0), 0) / square
    room = np.maximum(bound + expected[start:], _ROUNDING * bound)
    growth: Floats = np.log1p(np.minimum(bet, _LARGEST_BET / room) * excess[start:]).cumsum(axis=0)
    return growth


def cannot_catch_up(differences: Floats, remaining: float) -> np.ndarray:
    """Whether others stay behind a leader whatever the remaining clusters bring, [others].

    Args:
        differences: the leader's contributions less the other's, [clusters so far, others].
        remaining: what the remaining clusters add at most.
    """
    behind: np.ndarray = differences.sum(axis=0) > remaining + _ROUNDING
    return behind


def halved(scores: Floats) -> Integers:
    """The places of those that successive halving drops: all but the best third, rounded up.

    Source: Jamieson and Talwalkar 2016, arXiv:1502.07943, with thirds as of Hyperband, arXiv:1603.06560.
    """
    order = np.argsort(-scores, kind="stable")
    return order[max(1, math.ceil(len(scores) * KEPT)) :]
