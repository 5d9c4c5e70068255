"""A local MLflow database: its address, and its creation."""

from __future__ import annotations

import os
import sqlite3
import sys
import tempfile
from contextlib import closing, suppress
from importlib.metadata import version
from pathlib import Path
from urllib.parse import unquote

from mecha_exp.errors import TrackingError
from mecha_exp.system.cache import private_folder, read_checksummed, write_checksummed
from mecha_exp.system.write_errors import cause_of, existing_folder

SQLITE = "sqlite:///"
ARTIFACTS_FOLDER = "mlartifacts"


def absolute_uri(uri: str) -> str:
    """The address with the path of a database made absolute, and its folder created; others unchanged.

    Raises:
        TrackingError: it names no file, or one that MLflow would not find or that cannot be made.
    """
    if not uri.startswith(SQLITE.rstrip("/")):
        return uri
    name = uri.removeprefix(SQLITE)
    path = Path(name).absolute()
    if not name or name == uri or path.is_dir():
        raise TrackingError(f"tracking.uri={uri} names no file: write it as sqlite:///outputs/mlflow.db.")
    if unquote(path.as_posix()) != path.as_posix() or "?" in path.as_posix():
        raise TrackingError(
            f"tracking.uri={uri}: MLflow would not find the file {path}, since it reads '?' and '%20' in its "
            "path as parts of an address. Name another file with tracking.uri=sqlite:////PATH, or leave it "
            "out with tracking=none."
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        cause = cause_of(error, existing_folder(path)) or error.strerror
        raise TrackingError(
            f"tracking.uri={uri} cannot be created: {cause}. Name a file elsewhere, or leave it out with "
            "tracking=none."
        ) from error
    return SQLITE + path.as_posix()


def artifacts_beside(uri: str) -> str | None:
    """The address of the folder for artifacts beside a database; None for a server, which decides it."""
    if not uri.startswith(SQLITE):
        return None
    return (Path(uri.removeprefix(SQLITE)).parent / ARTIFACTS_FOLDER).as_uri()


def create_database(database: Path) -> None:
    """Create MLflow's tables in a database file that does not exist yet; the file appears complete.

    MLflow takes seconds and many steps for it, so a database with empty tables is kept in the user's cache
    for each version. A kill in between, or two processes at once, would leave a database that no later start
    can use.
    """
    if database.exists():
        return
    kept = _kept_database()
    with tempfile.TemporaryDirectory(dir=database.parent, prefix=f".{database.name}.") as folder:
        new = Path(folder) / database.name
        if kept and (content := read_checksummed(kept)):
            new.write_bytes(content)
        else:
            _create_tables(new)
            if kept:
                write_checksummed(kept, new.read_bytes())
        with suppress(FileExistsError):  # another process was quicker
            new.rename(database) if sys.platform == "win32" else os.link(new, database)


def _kept_database() -> Path | None:
    """The file in the cache with the tables of the installed MLflow; None if there is no cache."""
    folder = private_folder("tracking")
    return folder and folder / f"mlflow-{version('mlflow')}.db"


def _create_tables(database: Path) -> None:
    """Let MLflow create a database, without the experiment that names the folder of its creation."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=SQLITE + database.as_posix())
    client.search_experiments(max_results=1)
    client._tracking_client.store.engine.dispose()  # which closes the file
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("DELETE FROM experiments")
