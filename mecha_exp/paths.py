"""The default places of outputs."""

from __future__ import annotations

from pathlib import Path

OUTPUTS = Path("outputs")
STORE = OUTPUTS / "store"
STATISTICS = OUTPUTS / "statistics"
TRACKING_URI = f"sqlite:///{OUTPUTS.as_posix()}/mlflow.db"
