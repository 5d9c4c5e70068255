"""Programs in processes of their own, with what they take."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def run_program(folder: Path, code: str, *words: str) -> list[str]:
    """Run a program of Python in a folder; returns its seconds, CPU seconds and peak memory as text."""
    began = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen([sys.executable, "-c", code, *words], cwd=folder, env=environment)
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.monotonic() - began
    if status:
        sys.exit("the program failed")
    peak = used.ru_maxrss / 1e6 * 1.024
    return [f"{seconds:.1f} s", f"{used.ru_utime + used.ru_stime:.1f} s", f"{peak:.2f} GB"]
