"""Shapley values: how much each block, or each expert, adds to a metric, over all orders of adding them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from mecha_exp.errors import EvaluationError
from mecha_exp.verdict.intervals import Estimate, student

EXACT_PLAYERS = 10
PERMUTATIONS = 200
Coalition = frozenset[str]


def coalitions(players: Sequence[str], *, permutations: int = PERMUTATIONS, seed: int = 0) -> list[Coalition]:
    """The coalitions to measure: all up to 10 players, beyond that those of sampled orders.

    Args:
        players: blocks or experts, with different names.
        permutations: the number of orders to sample, an even one; each second is the reverse of its
            predecessor.
        seed: same seed, same orders.

    Returns:
        Each coalition once, the empty and the full one among them.
    """
    _check(players)
    if len(players) <= EXACT_PLAYERS:
        sizes = range(len(players) + 1)
        return [frozenset(group) for size in sizes for group in combinations(players, size)]
    orders = _orders(players, permutations, seed)
    return list(dict.fromkeys(frozenset(order[:n]) for order in orders for n in range(len(players) + 1)))


def shapley(
    values: Mapping[Coalition, float],
    players: Sequence[str],
    *,
    permutations: int = PERMUTATIONS,
    seed: int = 0,
) -> dict[str, Estimate]:
    """Each player's Shapley value: sum over S without it of |S|! (n - |S| - 1)! / n! (v(S + player) - v(S)).

    Exact, without an interval, where `values` has all coalitions. Otherwise the mean over the sampled orders
    of `coalitions`, which has to be called with the same `permutations` and `seed`; the interval is Student's
    t over pairs of an order and its reverse. Values always add up to v(all) - v(none).

    Args:
        values: the metric of each coalition, finite.
        players: blocks or experts.
        permutations: as for `coalitions`.
        seed: as for `coalitions`.

    Raises:
        EvaluationError: a coalition is missing or not finite, or a player is named twice.

    Source: Shapley 1953; Castro, Gomez and Tejada 2009 (sampling); Mitchell et al. 2022, arXiv:2104.12199
    (orders and their reverses).
    """
    _check(players)
    bad = [group for group, value in values.items() if not math.isfinite(value)]
    if bad:
        raise EvaluationError(f"Shapley values: the value of {_shown(bad[0])} is not finite.")
    exact = len(players) <= EXACT_PLAYERS or len(values) >= 2 ** len(players)
    return _exact(values, players) if exact else _sampled(values, players, permutations, seed)


def weights(players: Sequence[str], groups: Sequence[Coalition]) -> NDArray[np.float64]:
    """The weight of each coalition in each player's exact value, float64 [players, coalitions].

    (|S| - 1)! (n - |S|)! / n! for a coalition S with the player, -|S|! (n - |S| - 1)! / n! for one without.
    """
    count = len(players)
    inside = np.array([[player in group for group in groups] for player in players])
    sizes = np.array([len(group) for group in groups])
    orders = np.array([1 / (count * math.comb(count - 1, size)) for size in range(count)])
    gained, lost = orders[np.maximum(sizes - 1, 0)], orders[np.minimum(sizes, count - 1)]
    table: NDArray[np.float64] = np.where(inside, gained, -lost)
    return table


def _exact(values: Mapping[Coalition, float], players: Sequence[str]) -> dict[str, Estimate]:
    """The sums over all coalitions, which are the bits of a number."""
    count = len(players)
    codes = np.arange(2**count)
    members = codes[:, None] >> np.arange(count) & 1
    table = np.array([_value(values, [p for p, m in zip(players, row, strict=True) if m]) for row in members])
    sizes = members.sum(axis=1)
    weights = np.array([1 / (count * math.comb(count - 1, size)) for size in range(count)])
    result = {}
    for place, player in enumerate(players):
        without = codes[members[:, place] == 0]
        gains = table[without | 1 << place] - table[without]
        result[player] = Estimate(math.fsum(weights[sizes[without]] * gains))
    return result


def _sampled(
    values: Mapping[Coalition, float], players: Sequence[str], permutations: int, seed: int
) -> dict[str, Estimate]:
    """The means over sampled orders of what each player adds to those before it."""
    gains: dict[str, list[float]] = {player: [] for player in players}
    for order in _orders(players, permutations, seed):
        worth = [_value(values, order[:size]) for size in range(len(order) + 1)]
        for player, before, after in zip(order, worth, worth[1:], strict=False):
            gains[player].append(after - before)
    return {player: student(np.array(column).reshape(-1, 2).mean(axis=1)) for player, column in gains.items()}


def _orders(players: Sequence[str], permutations: int, seed: int) -> list[list[str]]:
    """Sampled orders, each followed by its reverse."""
    random = np.random.default_rng([seed, 5])
    draws = [random.permutation(len(players)) for _ in range(max(2, (permutations + 1) // 2))]
    return [[players[i] for i in order] for draw in draws for order in (draw, draw[::-1])]


def _value(values: Mapping[Coalition, float], group: Sequence[str]) -> float:
    """The value of a coalition."""
    try:
        return float(values[frozenset(group)])
    except KeyError:
        missing = _shown(frozenset(group))
        raise EvaluationError(
            f"Shapley values: {missing} was not measured. `coalitions` lists all."
        ) from None


def _check(players: Sequence[str]) -> None:
    """Raise if a player is named twice or there is none."""
    if not players or len(set(players)) < len(players):
        raise EvaluationError(f"Shapley values: players need different names, not {list(players)}.")


def _shown(group: Coalition) -> str:
    """A coalition as a text."""
    return f"the coalition {sorted(group)}"
