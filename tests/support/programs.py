"""Programs in a process of their own: those of this folder, and any other Python."""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
REPOSITORY = FOLDER.parents[1]


def environment() -> dict[str, str]:
    """The variables of this process as they are now, for one that has our code and one thread."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


def program(name: str, *arguments: object) -> list[str]:
    """The words that start a program of this folder."""
    return [sys.executable, str(FOLDER / f"{name}.py"), *map(str, arguments)]


def printed(name: str, *arguments: object, timeout: float = 400, cwd: Path | None = None) -> str:
    """What a program of this folder prints; it has to succeed."""
    words = program(name, *arguments)
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=timeout, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout
