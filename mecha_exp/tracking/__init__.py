"""MLflow, and nothing of it where tracking is off."""

from mecha_exp.tracking.mlflow_store import Store

__all__ = ["Store"]
