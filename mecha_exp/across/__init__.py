"""One merge by many processes or machines: each makes whole files of the output, one puts them in place."""

from mecha_exp.across.merge import run_plan

__all__ = ["run_plan"]
