"""Evaluators: functions from a state dict to numbers, found by name."""

from mecha_exp.evaluation.registry import Evaluator, evaluator, find_evaluator

__all__ = ["Evaluator", "evaluator", "find_evaluator"]
