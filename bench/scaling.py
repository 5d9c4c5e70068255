"""How a sweep grows with its points: processor time, memory, and the time until the first point is shown.

    python -m bench.scaling                  100 and 1,000 points
    python -m bench.scaling --points 3000    the memory of that many
    python -m bench.scaling --save           into bench/RESULTS.md

The points are TIES on the bundled digits, merged in memory and not measured, with a store of their own; the
last rows are tracked. Times are processor time, which other work on the machine does not change, of runs
that find the inputs' hashes and the compiled loops.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.report import as_for_users, machine, make_parser, publish, say, table
from bench.sweeps import APP, REPOSITORY, judged

UNMEASURED = ["recipe=ties", "output=none", "evaluator=none"]
TICKS = os.sysconf("SC_CLK_TCK")
MOST_TIMES, MOST_FIRST, MOST_PLAN, MOST_MEMORY = 11, 5.0, 10.0, 700_000_000
"""The bars: 1,000 points to 100, seconds until the first point, seconds of a plan, bytes of 3,000 points."""


@dataclass(frozen=True)
class Sweep:
    """What a sweep took.

    Attributes:
        points: the number of its points.
        processor: seconds of processor time.
        first: the same until the first point was shown.
        peak: bytes of memory.
    """

    points: int
    processor: float
    first: float
    peak: int


def main() -> None:
    """Measure, print, and save if asked."""
    parser = make_parser(__doc__)
    parser.add_argument("--points", type=int, help="one untracked sweep of so many points, and no other")
    options = parser.parse_args()
    rows = [["sweep", "processor time", "until the first point", "peak memory", "bar"]]
    for row in one(options.points) if options.points else all_rows():
        rows.append(row)
        say(" | ".join(row))
    end = f"{machine()}; TIES on the digits of the package, nothing measured."
    publish("How sweeps grow", f"{table(rows)}\n\n{end}", save=options.save)


def all_rows() -> Iterator[list[str]]:
    """100 and 1,000 points, the plan of 1,000, and 3,000 points."""
    run(10, ["tracking=none"])  # which hashes the inputs
    run(100, ["tracking=none"])  # which compiles the loops
    for name, words in {"": ["tracking=none"], ", tracked": []}.items():
        few, many = run(100, words), run(1000, words)
        yield row(f"100 points{name}", few, "")
        times = many.processor / few.processor
        bar = f"{judged(times <= MOST_TIMES)}: {times:.1f} times 100 points, at most {MOST_TIMES}"
        first = f"{judged(many.first <= MOST_FIRST)}: the first after at most {MOST_FIRST:.0f} s"
        yield row(f"1,000 points{name}", many, f"{bar}; {first}")
    plan = run(1000, ["tracking=none", "debug=plan"])
    yield row("the plan of 1,000", plan, f"{judged(plan.processor <= MOST_PLAN)}: at most {MOST_PLAN:.0f} s")
    yield from one(3000)


def one(points: int) -> Iterator[list[str]]:
    """One sweep without tracking."""
    sweep = run(points, ["tracking=none"])
    bar = f"memory {judged(sweep.peak <= MOST_MEMORY)}: at most 0.7 GB"
    yield row(f"{points:,} points", sweep, bar)


def run(points: int, words: Sequence[str]) -> Sweep:
    """One sweep in a process and a folder of its own."""
    alphas = ",".join(f"{i / points:.6g}" for i in range(points))
    environment = {**as_for_users(), "PYTHONPATH": str(REPOSITORY)}
    first = 0.0
    with tempfile.TemporaryDirectory() as folder:
        command = [*APP, *UNMEASURED, f"alpha={alphas}", *words, "-m"]
        with subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if not first and line.startswith("["):
                    first = processor_time(process.pid)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"failed: python -m mecha_exp {' '.join(command[len(APP) :])[:200]}")
    return Sweep(points, usage.ru_utime + usage.ru_stime, first, usage.ru_maxrss * 1024)


def processor_time(process: int) -> float:
    """The seconds that a process has computed so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def row(what: str, sweep: Sweep, bar: str) -> list[str]:
    """A line of the table."""
    first = f"{sweep.first:.1f} s" if sweep.first else ""
    return [what, f"{sweep.processor:.1f} s", first, f"{sweep.peak / 1e9:.2f} GB", bar]


if __name__ == "__main__":
    main()
