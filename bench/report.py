"""What every benchmark shares: arguments, medians of processes, the machine, sections of RESULTS.md."""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

RESULTS = Path(__file__).with_name("RESULTS.md")


def make_parser(text: str | None) -> argparse.ArgumentParser:
    """A parser of a benchmark's arguments with `--save`; its help is the text of the module."""
    layout = argparse.RawDescriptionHelpFormatter
    name = f"python -m bench.{Path(sys.argv[0]).stem}"
    parser = argparse.ArgumentParser(name, description=text, formatter_class=layout)
    parser.add_argument("--save", action="store_true", help="write the table into bench/RESULTS.md")
    return parser


def say(text: str) -> None:
    """Print a line of progress."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def publish(title: str, text: str, *, save: bool) -> None:
    """Print what was measured, and keep it in RESULTS.md if asked."""
    if save:
        save_section(title, text)
    say(text)


def seconds(command: Sequence[str], cwd: Path, environment: dict[str, str] | None = None) -> float:
    """The wall time of one run of a command that must succeed."""
    started = time.perf_counter()
    done = subprocess.run(
        command, cwd=cwd, env={**as_for_users(), **(environment or {})}, capture_output=True, text=True
    )
    elapsed = time.perf_counter() - started
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return elapsed


def as_for_users() -> dict[str, str]:
    """The environment without what keeps Python from storing what it compiled: users import that."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def median_and_spread(values: Sequence[float]) -> str:
    """The median, and the smallest and largest, in seconds."""
    return f"{statistics.median(values):.2f} s ({min(values):.2f} to {max(values):.2f})"


def machine() -> str:
    """The machine that a table was measured on."""
    cpu = platform.processor() or platform.machine()
    try:
        text = Path("/proc/cpuinfo").read_text()
        cpu = next(m[1] for m in re.finditer(r"model name\s*: (.*)", text))
    except (OSError, StopIteration):
        pass
    return (
        f"{cpu}, {os.cpu_count()} cores; {platform.system()}; Python {platform.python_version()}, "
        f"torch {torch.__version__}"
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of a Markdown table, the first one being its head."""
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "|" + " --- |" * len(rows[0]), *body])


def save_section(title: str, text: str) -> None:
    """Put a section into RESULTS.md, in place of the one of that title or else at the end."""
    old = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else "# What was measured\n"
    parts = [part.strip() for part in re.split(r"(?m)^(?=## )", old)]
    heading = f"## {title}\n"
    places = [place for place, part in enumerate(parts) if part.startswith(heading)] or [len(parts)]
    parts[places[0] : places[0] + 1] = [f"{heading}\n{text.strip()}"]
    RESULTS.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
