"""Tracking of runs by MLflow, which is imported only where its client is needed."""

from mecha_exp.tracking.store import Store

__all__ = ["Store"]
