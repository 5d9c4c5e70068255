"""The default places of outputs, and of the runs in MLflow."""

from __future__ import annotations

import os
from pathlib import Path

OUTPUTS = Path("outputs")
STORE = OUTPUTS / "store"
STATISTICS = OUTPUTS / "statistics"


def tracking_uri() -> str:
    """The store of MLflow where nothing else is said: MLflow's own variable, or a file here."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{OUTPUTS.as_posix()}/mlflow.db"


def tracking_experiment() -> str:
    """The experiment where nothing else is said: MLflow's own variable, or `mecha_exp`."""
    return os.environ.get("MLFLOW_EXPERIMENT_NAME") or "mecha_exp"
