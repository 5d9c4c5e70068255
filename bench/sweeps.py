"""Sweeps: many points beside one point, and from the command to the table.

    python -m bench.sweeps --size small --repeat 1     a quick look
    python -m bench.sweeps --save                      the whole table, into bench/RESULTS.md

Every run is a process of its own with a store of its own, so that nothing is known beforehand; hashes of the
inputs are remembered from the first one on. The demo's figures are drawn and its runs tracked.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.models import make_models
from bench.report import machine, save_section, table

REPOSITORY = Path(__file__).parents[1]
APP = [sys.executable, "-m", "mecha_exp"]
ALPHAS = ",".join(f"{0.1 * i:g}" for i in range(1, 11))
DEMO_ALPHAS = ",".join(f"{i / 100:g}" for i in range(1, 101))


@dataclass(frozen=True)
class Run:
    """What one process took."""

    seconds: float
    processor: float
    peak: int


def main() -> None:
    """Measure, print, and save if asked."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m bench.sweeps", description=__doc__, formatter_class=layout
    )
    parser.add_argument("--size", default="sd15", choices=["small", "half", "sd15"], help="of the models")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each (default: %(default)s)")
    parser.add_argument(
        "--folder", type=Path, default=Path("/dev/shm/mecha_exp_sweeps"), help="of the models"
    )
    parser.add_argument("--only", choices=["demo", "models"], help="one half of the table")
    parser.add_argument("--save", action="store_true", help="write the table into bench/RESULTS.md")
    options = parser.parse_args()
    rows = [["work", "time", "processor time", "peak memory", "bar"]]
    if options.only != "models":
        rows += demo(options.repeat)
    if options.only != "demo":
        rows += models(options.size, options.folder, options.repeat)
    text = f"{table(rows)}\n\n{machine()}; models of size {options.size}; medians of {options.repeat}."
    sys.stdout.write(text + "\n")
    if options.save:
        save_section(f"Sweeps ({options.size})", text)


def demo(repeat: int) -> list[list[str]]:
    """A hundred points on the bundled digits, evaluated and tracked, and the same command again."""
    command = ["recipe=ties", f"alpha={DEMO_ALPHAS}", "output=none", "-m"]
    first, again = [], []
    for _ in range(repeat):
        with tempfile.TemporaryDirectory() as folder:
            first.append(run(command, Path(folder)))
            again.append(run(command, Path(folder)))
    return [
        row("100 points on the digits demo, command to table", first, "30 s"),
        row("the same command again", again, "6 s"),
    ]


def models(size: str, folder: Path, repeat: int) -> list[list[str]]:
    """TIES over large models: one point and ten, measured only, and written."""
    base, *experts = make_models(folder, 4, size)
    inputs = ["recipe=ties", f"models.base={base}", f"models.experts=[{','.join(map(str, experts))}]"]
    inputs += ["evaluator=none", "tracking=none", "-m"]
    measured = ["output=none"]
    written = ["output.durable=false", f"output.path='{folder}/out-${{alpha}}.safetensors'"]
    run([*inputs, "alpha=0.7", *measured], folder)  # compiles the loops, and hashes the inputs
    rows = []
    for name, more in (("weight statistics alone", measured), ("written", written)):
        one, ten = [], []
        for _ in range(repeat):
            one.append(run([*inputs, "alpha=0.5", "store=null", *more], folder))
            ten.append(run([*inputs, f"alpha={ALPHAS}", "store=null", *more], folder))
        ratio = statistics.median(r.seconds for r in ten) / statistics.median(r.seconds for r in one)
        rows.append(row(f"TIES, 1 point, {name}", one, ""))
        bar = "1.5 times one point" if more is measured else "one point and 1.5 times the copying"
        rows.append(row(f"TIES, 10 points, {name} ({ratio:.2f} times)", ten, bar))
    rows.append(["copying 10 outputs", f"{copying(base, folder):.1f} s", "", "", ""])
    return rows


def run(arguments: list[str], folder: Path) -> Run:
    """One process; outputs are removed afterwards."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    started = time.perf_counter()
    with subprocess.Popen(
        [*APP, *arguments], cwd=folder, env=environment, stdout=subprocess.DEVNULL
    ) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"failed; run it by hand in {folder}: python -m mecha_exp {' '.join(arguments)}")
    for path in folder.glob("out-*.safetensors"):
        path.unlink()
    return Run(time.perf_counter() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def copying(file: Path, folder: Path) -> float:
    """The seconds that ten copies take."""
    started = time.perf_counter()
    for number in range(10):
        subprocess.run(["cp", str(file), str(folder / f"copy-{number}")], check=True)
    taken = time.perf_counter() - started
    for number in range(10):
        (folder / f"copy-{number}").unlink()
    return taken


def row(what: str, runs: list[Run], bar: str) -> list[str]:
    """A line of the table."""
    seconds = statistics.median(r.seconds for r in runs)
    processor = statistics.median(r.processor for r in runs)
    return [what, f"{seconds:.1f} s", f"{processor:.1f} s", f"{max(r.peak for r in runs) / 1e9:.2f} GB", bar]


if __name__ == "__main__":
    main()
