"""Tracking of runs by MLflow, which is imported only when runs are tracked."""

from mecha_exp.tracking.mlflow_store import Store

__all__ = ["Store"]
