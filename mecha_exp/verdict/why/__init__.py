"""What moved the metric of a sweep: effects of swept keys, shares of variance, values of players.

All functions take plain values: columns of a table, or a dictionary of coalitions.
"""

from mecha_exp.verdict.why.anova import Effects, functional_anova, importances
from mecha_exp.verdict.why.components import variance_shares
from mecha_exp.verdict.why.shapley import EXACT_PLAYERS, coalitions, shapley

__all__ = [
    "EXACT_PLAYERS",
    "Effects",
    "coalitions",
    "functional_anova",
    "importances",
    "shapley",
    "variance_shares",
]
