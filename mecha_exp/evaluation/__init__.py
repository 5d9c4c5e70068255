"""Evaluators: functions from a state dict to numbers, found by name."""

from mecha_exp.evaluation.registry import Evaluator, all_evaluators, evaluator, find_evaluator
from mecha_exp.evaluation.scoring import Evaluation, Scoring, nan_warning, read_scoring, wants_weight_stats

__all__ = [
    "Evaluation",
    "Evaluator",
    "Scoring",
    "all_evaluators",
    "evaluator",
    "find_evaluator",
    "nan_warning",
    "read_scoring",
    "wants_weight_stats",
]
