"""Where a score's uncertainty comes from: the examples, and whatever replicates differ in."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping

import numpy as np

from mecha_exp.verdict.panel import Floats, Panel

EXAMPLES, REPLICATES = "examples", "replicates"


def variance_sources(panel: Panel, setting: int) -> dict[str, float]:
    """Each source's share of the squared standard error of a setting's score, adding up to 1.

    Examples: the sum over clusters of what they add to the score less the mean of their stratum, squared.
    Replicates: the variance of their scores over their number, shared among what their labels differ in
    (`seed=1,models.set=2`) by variance components; what these leave is `replicates`.

    Args:
        panel: of a split.
        setting: its place.

    Returns:
        Shares by source; empty where nothing varies.
    """
    of_examples = error_over_examples(panel, panel.contributions[:, setting]) ** 2
    squares = {EXAMPLES: of_examples, **_of_replicates(panel, setting)}
    total = sum(squares.values())
    return {name: part / total for name, part in squares.items()} if total > 0 else {}


def error_over_examples(panel: Panel, parts: Floats) -> float:
    """Compute the standard error of a sum over clusters, which are drawn within strata.

    Args:
        panel: that has the clusters.
        parts: what each cluster adds, [clusters].
    """
    total = 0.0
    for code in np.unique(panel.strata):
        group = parts[panel.strata == code]
        if len(group) > 1:
            total += len(group) * float(group.var(ddof=1))
    return math.sqrt(total)


def _of_replicates(panel: Panel, setting: int) -> dict[str, float]:
    """The squared standard error over replicates, by what their labels differ in."""
    from mecha_exp.errors import EvaluationError
    from mecha_exp.verdict.why.components import RESIDUAL, variance_shares

    labels, start = panel.replicates[setting], int(panel.starts[setting])
    scores: Floats = panel.column_scores[start : start + len(labels)]
    if len(labels) < 2:
        return {}
    square = float(scores.var(ddof=1)) / len(labels)
    factors = _factors(labels)
    if len(factors) < 2:
        return {next(iter(factors), REPLICATES): square}
    try:
        shares = variance_shares(factors, scores)
    except EvaluationError:  # the labels do not tell the factors apart
        return {REPLICATES: square}
    named = {(REPLICATES if name == RESIDUAL else name): share * square for name, share in shares.items()}
    return {name: part for name, part in named.items() if name != REPLICATES or part > 0}


def _factors(labels: tuple[str, ...]) -> Mapping[str, list[Hashable]]:
    """The values of each key of labels like `seed=1,models.set=2`, where they differ."""
    rows = [dict(part.partition("=")[::2] for part in label.split(",") if "=" in part) for label in labels]
    keys = dict.fromkeys(key for row in rows for key in row)
    columns: dict[str, list[Hashable]] = {key: [row.get(key, "") for row in rows] for key in keys}
    return {key: column for key, column in columns.items() if len(set(column)) > 1}
