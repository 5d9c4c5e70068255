"""What moved the metric of a sweep: effects of swept keys, shares of variance, values of players.

All functions take plain values: columns of a table, or a dictionary of coalitions.
"""

from mecha_exp.verdict.why.anova import Effects, functional_anova, importances, importances_at_the_top
from mecha_exp.verdict.why.components import variance_shares
from mecha_exp.verdict.why.noise import EffectsOverNoise, chance_of_keys, effects_over_noise, score_errors
from mecha_exp.verdict.why.shapley import EXACT_PLAYERS, coalitions, shapley

__all__ = [
    "EXACT_PLAYERS",
    "Effects",
    "EffectsOverNoise",
    "chance_of_keys",
    "coalitions",
    "effects_over_noise",
    "functional_anova",
    "importances",
    "importances_at_the_top",
    "score_errors",
    "shapley",
    "variance_shares",
]
