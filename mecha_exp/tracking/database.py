"""A local MLflow database: its address, and its creation."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from mecha_exp.errors import TrackingError

SQLITE = "sqlite:///"


def absolute_uri(uri: str) -> str:
    """The address with the path of a database made absolute, and its folder created; others unchanged."""
    if not uri.startswith(SQLITE):
        return uri
    name = uri.removeprefix(SQLITE)
    path = Path(name).absolute()
    if not name or path.is_dir():
        raise TrackingError(f"tracking.uri={uri} names no file: write it as sqlite:///outputs/mlflow.db.")
    path.parent.mkdir(parents=True, exist_ok=True)
    return SQLITE + path.as_posix()


def create_database(database: Path) -> None:
    """Create MLflow's tables in a database file that does not exist yet; the file appears complete.

    MLflow takes seconds and many steps for it. A kill in between, or two processes at once, would leave a
    database that no later start can use.
    """
    if database.exists():
        return
    from mlflow.tracking import MlflowClient

    with tempfile.TemporaryDirectory(dir=database.parent, prefix=f".{database.name}.") as folder:
        new = Path(folder) / database.name
        client = MlflowClient(tracking_uri=SQLITE + new.as_posix())
        client.search_experiments(max_results=1)
        client._tracking_client.store.engine.dispose()  # which closes the file
        with suppress(FileExistsError):  # another process was quicker
            new.rename(database) if sys.platform == "win32" else os.link(new, database)
