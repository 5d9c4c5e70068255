"""How much each key of a search decides its metric."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from mecha_exp.numbers import is_number
from mecha_exp.report.results import MISSING, Results
from mecha_exp.runs.values import as_text

FEWEST = 10
"""Settings from which on importances are estimated."""
FANOVA = "fANOVA of a random forest, main effects alone"
PED_ANOVA = "PED-ANOVA of the best tenth against all"


@dataclass(frozen=True)
class Importances:
    """The share of each key.

    Attributes:
        shares: by key, the largest first; they add up to 1.
        estimator: what estimated them.
    """

    shares: Mapping[str, float]
    estimator: str


def importances_of(results: Results) -> Importances | None:
    """The importances of a search's keys; None with too few settings, one key, or without Optuna.

    fANOVA (Hutter et al. 2014) needs scikit-learn; PED-ANOVA (Watanabe et al. 2023, arXiv:2304.10255) stands
    in for it where that is not installed.
    """
    settings = results.measured
    keys = results.varied_keys(settings)
    if len(settings) < FEWEST or len(keys) < 2 or not results.judged or not _has("optuna"):
        return None
    columns = tuple(tuple(_plain(s.values[key]) for s in settings) for key in keys)
    values = tuple(s.estimate(results.metric).mean for s in settings)
    return _estimated(tuple(keys), columns, values, results.minimized)


@functools.lru_cache(maxsize=4)
def _estimated(
    keys: tuple[str, ...],
    columns: tuple[tuple[Hashable, ...], ...],
    values: tuple[float, ...],
    minimized: bool,
) -> Importances | None:
    from mecha_exp.verdict.why import importances, importances_at_the_top

    by_key = dict(zip(keys, columns, strict=True))
    if _has("sklearn"):
        shares, estimator = importances(by_key, values), FANOVA
    else:
        shares, estimator = importances_at_the_top(by_key, values, minimized=minimized), PED_ANOVA
    if isinstance(shares, str):
        return None
    return Importances(dict(sorted(shares.items(), key=lambda item: -item[1])), estimator)


def importance_note(results: Results) -> str | None:
    """The importances as a sentence; None where there are none."""
    importances = importances_of(results)
    if importances is None:
        return None
    parts = ", ".join(f"{key} {share:.2f}" for key, share in importances.shares.items())
    return f"importance for {results.metric}, relative to each other ({importances.estimator}): {parts}"


def _plain(value: Hashable) -> Hashable:
    """A number as it is, anything else as a text."""
    return value if is_number(value) else (as_text(value) if value is not None else "") or MISSING


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
