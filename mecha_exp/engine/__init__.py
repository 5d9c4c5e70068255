"""The streaming merge engine: plan, program, execution."""

from mecha_exp.engine.merging import MergeReport, merge_many, run_plan
from mecha_exp.engine.options import EngineOptions
from mecha_exp.engine.planned import Job, Plan
from mecha_exp.engine.planning import plan

__all__ = ["EngineOptions", "Job", "MergeReport", "Plan", "merge_many", "plan", "run_plan"]
