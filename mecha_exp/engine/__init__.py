"""The streaming merge engine: plan, program, execution."""

from mecha_exp.engine.merge import merge_many, run_plan
from mecha_exp.engine.options import EngineOptions
from mecha_exp.engine.planner.plan import Job, Plan
from mecha_exp.engine.planner.planner import plan
from mecha_exp.engine.report import MergeReport

__all__ = ["EngineOptions", "Job", "MergeReport", "Plan", "merge_many", "plan", "run_plan"]
