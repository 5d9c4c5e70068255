"""PostgreSQL on a socket: a server of the system's packages, in a folder of its own."""

from __future__ import annotations

import getpass
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OF_DEBIAN = "/usr/lib/postgresql"
_USER = "postgres"
"""Who runs the server where root starts it, which PostgreSQL refuses to be run by."""


def why_not() -> str | None:
    """Why PostgreSQL cannot be used here; None if it can."""
    if importlib.util.find_spec("psycopg") is None:
        return "the driver of PostgreSQL is not installed here (pip install 'psycopg[binary]')"
    return None if _binary("initdb") else "PostgreSQL is not installed here (apt-get install postgresql)"


@contextmanager
def postgres_here() -> Iterator[str]:
    """Start a server with an empty database; yields its address for SQLAlchemy."""
    initdb, control = _binary("initdb"), _binary("pg_ctl")
    with tempfile.TemporaryDirectory(prefix="postgres-") as name:
        user, run = getpass.getuser(), []
        if os.geteuid() == 0:
            user, run = _USER, ["runuser", "-u", _USER, "--"]
            shutil.chown(name, user)
        data = f"{name}/data"
        subprocess.run([*run, initdb, "-D", data, "-A", "trust", "-U", user], check=True, capture_output=True)
        start = [*run, control, "-D", data, "-o", f"-k {name} -c listen_addresses=''", "-l", f"{name}/log"]
        subprocess.run([*start, "-w", "start"], check=True, stdout=subprocess.DEVNULL)
        try:
            yield f"postgresql+psycopg://{user}@/postgres?host={name}"
        finally:
            stop = [*run, control, "-D", data, "-m", "immediate", "stop"]
            subprocess.run(stop, check=True, capture_output=True)


def _binary(name: str) -> str | None:
    """A program of PostgreSQL, also where Debian puts it, the newest version of several."""
    folders = sorted(Path(_OF_DEBIAN).glob("*/bin"), key=lambda path: float(path.parent.name), reverse=True)
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *map(str, folders)]))
