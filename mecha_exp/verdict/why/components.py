"""Variance components: how much of the spread comes from methods, hyperparameters, experts, examples."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mecha_exp.errors import EvaluationError, counted

RESIDUAL = "residual"
_Integers = NDArray[np.intp]


def variance_shares(factors: Mapping[str, Sequence[Hashable]], values: ArrayLike) -> dict[str, float]:
    """Each factor's share of the variance in y = m + a random effect of each factor + residual.

    The components are estimated by equating each factor's sum of squares to its expectation, which is
    unbiased for tables of any balance. Components below zero count as zero. A factor may be nested in
    another: give its levels names of their own, such as `ties alpha=0.3` for hyperparameters within methods.

    Args:
        factors: the level of each row, by factor.
        values: of each row, such as outcomes by example; finite.

    Returns:
        Shares by factor and `residual`, adding up to 1; all zero where the values are equal.

    Raises:
        EvaluationError: lengths differ, a value is not finite, or the table cannot tell two factors apart.

    Source: Henderson 1953, "Estimation of Variance and Covariance Components", method I.
    """
    numbers = np.asarray(values, dtype=np.float64)
    if not len(numbers) or not np.isfinite(numbers).all():
        raise EvaluationError("shares of variance: there are no values, or some are not finite.")
    for name, column in factors.items():
        if len(column) != len(numbers):
            raise EvaluationError(
                f"shares of variance: {counted(len(column), 'level')} of '{name}' for "
                f"{counted(len(numbers), 'value')}."
            )
    codes = {name: _codes(column) for name, column in factors.items() if len(set(column)) > 1}
    centred = numbers - numbers.mean()
    names = [*codes, RESIDUAL]
    squares = [_sum_of_squares(code, centred) for code in codes.values()] + [float(centred @ centred)]
    expected = np.array([_expectation(code, codes, len(numbers)) for code in [*codes.values(), None]])
    if np.linalg.matrix_rank(expected / expected.max(axis=1, keepdims=True)) < len(names):
        raise EvaluationError(
            f"shares of variance: the table cannot tell {sorted(codes)} apart. Leave one out."
        )
    components = np.maximum(0, np.linalg.solve(expected, np.array(squares)))
    total = float(components.sum())
    shares = dict(zip(names, components / total if total > 0 else components, strict=True))
    return {name: float(shares.get(name, 0.0)) for name in (*factors, RESIDUAL)}


def _codes(column: Sequence[Hashable]) -> _Integers:
    """The levels as numbers from 0."""
    places: dict[Hashable, int] = {}
    return np.array([places.setdefault(level, len(places)) for level in column], dtype=np.intp)


def _sum_of_squares(code: _Integers, centred: NDArray[np.float64]) -> float:
    """The sum of squares between the levels of a factor."""
    sums, counts = np.bincount(code, weights=centred), np.bincount(code)
    return float((sums**2 / counts).sum())


def _expectation(code: _Integers | None, codes: Mapping[str, _Integers], rows: int) -> list[float]:
    """The factors of all components in the expectation of a sum of squares; `code` is None for the total."""
    expectation = []
    for other in codes.values():
        sizes = np.bincount(other).astype(np.float64)
        overall = float((sizes**2).sum()) / rows
        expectation.append((rows if code is None else _overlap(code, other)) - overall)
    freedom = rows if code is None else int(code.max()) + 1
    return [*expectation, float(freedom - 1)]


def _overlap(code: _Integers, other: _Integers) -> float:
    """The sum over levels i and j of n_ij^2 / n_i."""
    width = int(other.max()) + 1
    cells, counts = np.unique(code * width + other, return_counts=True)
    sizes = np.bincount(code)
    return float((counts.astype(np.float64) ** 2 / sizes[cells // width]).sum())
