"""Evaluators: functions from a state dict to numbers or outcomes, found by name."""

from mecha_exp.evaluation.context import Context
from mecha_exp.evaluation.declaration import Evaluator
from mecha_exp.evaluation.learning.registry import logits_of, loss
from mecha_exp.evaluation.measurement import NORMALISED, Measurement
from mecha_exp.evaluation.outcomes import Outcomes
from mecha_exp.evaluation.registry import all_evaluators, evaluator, find_evaluator
from mecha_exp.evaluation.scoring import Evaluation, Scoring, nan_warning
from mecha_exp.evaluation.settings import read_scoring, wants_weight_stats

__all__ = [
    "NORMALISED",
    "Context",
    "Evaluation",
    "Evaluator",
    "Measurement",
    "Outcomes",
    "Scoring",
    "all_evaluators",
    "evaluator",
    "find_evaluator",
    "logits_of",
    "loss",
    "nan_warning",
    "read_scoring",
    "wants_weight_stats",
]
