"""Functional ANOVA: how much of a metric's variance each swept key, and each pair of them, explains."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from mecha_exp.errors import EvaluationError, counted
from mecha_exp.numbers import is_number
from mecha_exp.system.optuna_log import quiet_optuna
from mecha_exp.verdict.panel import Floats

Part = tuple[str, ...]
"""The keys of a main effect or an interaction."""
REST: Part = ("three keys and more",)


@dataclass(frozen=True)
class Effects:
    """The decomposition of a metric over a grid.

    Attributes:
        mean: over the grid.
        variance: over the grid, of means over replicates.
        curves: for each key the mean at each of its values, less the mean of the grid.
        main: each key's share of the variance, 0 to 1.
        pairs: the share of each pair's interaction, beyond both main effects.
        rest: the share of interactions of three and more keys.
    """

    mean: float
    variance: float
    curves: Mapping[str, Mapping[Hashable, float]]
    main: Mapping[str, float]
    pairs: Mapping[tuple[str, str], float]
    rest: float


def functional_anova(keys: Mapping[str, Sequence[Hashable]], values: Sequence[float]) -> Effects:
    """Decompose the values of a full grid exactly, each point of the grid counting alike.

    f(x) = m + sum_i f_i(x_i) + sum_(i<j) f_ij(x_i, x_j) + ..., where f_i is the mean over all other keys less
    m, and f_ij the mean over all but two less m, f_i and f_j. The variances of the parts add up to that of f.

    Args:
        keys: the value of each swept key, by key, one for each measured point.
        values: the metric of each point, finite. Points with equal keys are replicates and are averaged.

    Raises:
        EvaluationError: a number is not finite, there is no key, or a point of the grid was not measured.

    Source: Hoeffding 1948; Hutter, Hoos and Leyton-Brown 2014, "An Efficient Approach for Assessing
    Hyperparameter Importance".
    """
    grid, levels = grid_of(keys, np.asarray(values, dtype=np.float64)[None])
    names, mean = list(keys), float(grid.mean())
    parts = decompose(names, grid)
    variance = float(((grid - mean) ** 2).mean())
    shares = {part: _share(array, variance) for part, array in parts.items()}
    return Effects(
        mean,
        variance,
        {name: dict(zip(levels[name], parts[name,].ravel().tolist(), strict=True)) for name in names},
        {part[0]: share for part, share in shares.items() if len(part) == 1 and part != REST},
        {(part[0], part[1]): share for part, share in shares.items() if len(part) == 2},
        shares.get(REST, 0.0),
    )


def decompose(names: Sequence[str], grids: Floats) -> dict[Part, Floats]:
    """The parts f_i, f_ij and the rest of grids, by their keys; the first axis is of several grids.

    Args:
        names: of the keys, one for each other axis.
        grids: float64 [grids, *levels].
    """
    axes = range(1, grids.ndim)
    centred = grids - grids.mean(axis=tuple(axes), keepdims=True)
    parts: dict[Part, Floats] = {
        (n,): _mean_over_others(centred, [i]) for n, i in zip(names, axes, strict=True)
    }
    mains = list(parts.values())
    for i, j in combinations(axes, 2):
        both = _mean_over_others(centred, [i, j])
        parts[names[i - 1], names[j - 1]] = both - mains[i - 1] - mains[j - 1]
    if len(names) > 2:
        parts[REST] = centred - sum(np.broadcast_to(part, centred.shape) for part in parts.values())
    return parts


def importances(
    keys: Mapping[str, Sequence[Hashable]], values: Sequence[float], *, seed: int = 0
) -> dict[str, float] | str:
    """Main effects of drawn points, by fANOVA of a random forest (Optuna); or why there are none.

    They are relative to each other: they add up to 1 whether or not any key matters. See `chance_of_keys`.

    Args:
        keys: the value of each searched key, by key, one for each measured point: numbers or texts.
        values: the metric of each point, finite.
        seed: of the forest.

    Returns:
        Shares that add up to 1, by key; a sentence where Optuna or scikit-learn is not installed, or where
        the points do not tell.
    """
    if len(set(values)) < 2:
        return "All points have the same value: there is no variance to explain."
    try:
        shares = _forest_shares(keys, values, seed)
    except ImportError:
        return "Importances of drawn points need Optuna: pip install 'mecha_exp[search]' scikit-learn."
    return {name: float(shares[name]) for name in keys}


def importances_at_the_top(
    keys: Mapping[str, Sequence[Hashable]], values: Sequence[float], *, minimized: bool
) -> dict[str, float] | str:
    """What sets the best tenth of drawn points apart, by PED-ANOVA (Optuna); or why there is nothing.

    Args:
        keys: as for `importances`.
        values: the metric of each point, finite.
        minimized: whether less is better.

    Returns:
        Shares that add up to 1, by key; a sentence where Optuna is not installed, or where all are equal.

    Source: Watanabe, Bansal and Hutter 2023, arXiv:2304.10255.
    """
    if len(set(values)) < 2:
        return "All points have the same value: there is no variance to explain."
    signed = values if minimized else [-value for value in values]
    try:
        import optuna
    except ImportError:
        return "Importances of drawn points need Optuna: pip install 'mecha_exp[search]'."
    with quiet_optuna():
        shares = _shares(keys, signed, optuna.importance.PedAnovaImportanceEvaluator())
    return {name: float(shares[name]) for name in keys}


def _forest_shares(
    keys: Mapping[str, Sequence[Hashable]], values: Sequence[float], seed: int
) -> Mapping[str, float]:
    import optuna

    with quiet_optuna():
        return _shares(keys, values, optuna.importance.FanovaImportanceEvaluator(seed=seed))


def _shares(
    keys: Mapping[str, Sequence[Hashable]], values: Sequence[float], evaluator: Any
) -> Mapping[str, float]:
    """Let an evaluator of Optuna's explain a study that holds the points; less is better."""
    import optuna

    ranges = {name: _range(column) for name, column in keys.items()}
    study = optuna.create_study()
    for row, value in enumerate(values):
        params = {name: _within(ranges[name], column[row]) for name, column in keys.items()}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=ranges, value=float(value)))
    shares: Mapping[str, float] = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return shares


def _range(column: Sequence[Hashable]) -> object:
    """The range of a key: from its least to its greatest number, or its texts."""
    from optuna import distributions

    numbers = [float(v) for v in column if is_number(v)]
    if len(numbers) == len(column) and min(numbers) < max(numbers):
        return distributions.FloatDistribution(min(numbers), max(numbers))
    return distributions.CategoricalDistribution(tuple(dict.fromkeys(str(_plain(v)) for v in column)))


def _within(values: object, value: Hashable) -> Hashable:
    """A value as a range has it: among texts a number is one, too."""
    from optuna import distributions

    plain = _plain(value)
    return str(plain) if isinstance(values, distributions.CategoricalDistribution) else plain


def _plain(value: Hashable) -> Hashable:
    """Numbers as floats, anything else as a text."""
    return float(value) if is_number(value) else str(value)


def grid_of(
    keys: Mapping[str, Sequence[Hashable]], values: Floats
) -> tuple[Floats, dict[str, list[Hashable]]]:
    """The means over replicates as arrays with an axis for each key, and the levels of the axes.

    Args:
        keys: the value of each swept key, by key, one for each measured point.
        values: of the points, several times, [times, points].

    Returns:
        The grids, float64 [times, *levels].

    Raises:
        EvaluationError: as `functional_anova`.
    """
    numbers = values[0]
    if not keys or not len(numbers):
        raise EvaluationError("effects: there is no swept key, or no point. Sweep at least one key.")
    for name, column in keys.items():
        if len(column) != len(numbers):
            raise EvaluationError(
                f"effects: {counted(len(column), 'value')} of '{name}' for {counted(len(numbers), 'point')}."
            )
    if not np.isfinite(numbers).all():
        count = int((~np.isfinite(numbers)).sum())
        raise EvaluationError(
            f"effects: {count} of {counted(len(numbers), 'value')} {'is' if count == 1 else 'are'} not "
            "finite. Leave them out."
        )
    levels = {name: list(dict.fromkeys(column)) for name, column in keys.items()}
    shape = tuple(len(level) for level in levels.values())
    if math.prod(shape) > len(numbers):
        points = f"{counted(len(numbers), 'point')} cannot fill a grid of {' x '.join(map(str, shape))}"
        raise EvaluationError(f"effects: {points}.")
    places = [[levels[name].index(value) for value in column] for name, column in keys.items()]
    flat = np.ravel_multi_index(tuple(np.array(place) for place in places), shape)
    counts = np.bincount(flat, minlength=math.prod(shape))
    if (counts == 0).any():
        missing = np.unravel_index(int(np.flatnonzero(counts == 0)[0]), shape)
        named = ", ".join(f"{n}={levels[n][int(i)]}" for n, i in zip(levels, missing, strict=True))
        raise EvaluationError(f"effects: the grid lacks {named}. Measure it, or use importances.")
    sums = np.zeros((math.prod(shape), len(values)))
    np.add.at(sums, flat, values.T)
    return (sums / counts[:, None]).T.reshape(len(values), *shape), levels


def _mean_over_others(grid: Floats, axes: Sequence[int]) -> Floats:
    """The mean over all axes but the first and some."""
    others = tuple(axis for axis in range(1, grid.ndim) if axis not in axes)
    return grid.mean(axis=others, keepdims=True) if others else grid


def _share(part: Floats, variance: float) -> float:
    """The mean square of a part over the variance of all."""
    return float((part**2).mean()) / variance if variance else 0.0
