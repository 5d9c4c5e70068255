"""Studies of thousands of points: time and memory of the sweep, of what is shown of it, and of going on.

    python -m bench.studies                        100, 1,000 and 10,000 points, untracked and tracked
    python -m bench.studies --points 1000          that many alone
    python -m bench.studies --untracked --save     into bench/RESULTS.md

Each study is TIES on the bundled digits over alpha and k, with an evaluator that takes no time and gives 100
outcomes, and a store of its own. It is killed after nine tenths of its points, and the same command goes on.
Times are processor time, which other work on the machine does not change, of runs that find the inputs'
hashes and the compiled loops.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.engine import say
from bench.report import as_for_users, machine, save_section, table
from bench.scaling import processor_time
from bench.sweeps import APP, REPOSITORY

POINTS = (100, 1_000, 10_000)
EVALUATOR = '''
from mecha_exp import Outcomes, evaluator


@evaluator("signs", metric="positive", direction="maximize", units={"positive": "fraction"})
def signs(state_dict):
    """The share of the first 100 elements that are positive, each of them an outcome."""
    first = next(iter(state_dict.values())).flatten()[:100]
    return Outcomes({"all": (first > 0).double().tolist()})
'''


@dataclass(frozen=True)
class Command:
    """What a command took.

    Attributes:
        processor: seconds of processor time.
        first: the same until its first line about a point; 0 without any.
        peak: bytes of memory.
    """

    processor: float
    first: float
    peak: int


def main() -> None:
    """Measure, print, and save if asked."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m bench.studies", description=__doc__, formatter_class=layout
    )
    parser.add_argument("--points", type=int, help="one size alone")
    parser.add_argument("--untracked", action="store_true", help="without the tracked studies")
    parser.add_argument("--save", action="store_true", help="write the table into bench/RESULTS.md")
    options = parser.parse_args()
    headings = ["points", "the sweep", "a point", "peak memory", "going on: first new point"]
    rows = [[*headings, "again, complete", "`ls`", "`table`", "report"]]
    end = f"{machine()}; processor times."
    for tracked in (False,) if options.untracked else (False, True):
        for points in (options.points,) if options.points else POINTS:
            rows.append(row(points, tracked=tracked))
            say(" | ".join(rows[-1]))
            if options.save:  # what is measured is not lost if a later study breaks off
                save_section("Studies of thousands of points", f"{table(rows)}\n\n{end}")
    say(f"{table(rows)}\n\n{end}")


def row(points: int, *, tracked: bool) -> list[str]:
    """A study that is killed and goes on, what is shown of it, and the same command once more."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "signs.py").write_text(EVALUATOR)
        words = [*study(points), *([] if tracked else ["tracking=none"])]
        run(folder, [*study(10), "tracking=none", "store=null"])  # which compiles the loops
        before = run(folder, words, until=f"[{points * 9 // 10}/")
        after = run(folder, words)
        again = run(folder, words)
        listed, shown = run(folder, ["ls"]), run(folder, ["table"])
        report = next(folder.glob("outputs/multiruns/*/report.html")).stat().st_size
    total = before.processor + after.processor
    return [
        f"{points:,}{', tracked' if tracked else ''}",
        f"{total:.0f} s",
        f"{1000 * total / points:.0f} ms",
        f"{max(c.peak for c in (before, after, again, listed, shown)) / 1e9:.2f} GB",
        f"{after.first:.1f} s",
        f"{again.processor:.1f} s",
        f"{listed.processor:.1f} s",
        f"{shown.processor:.1f} s",
        f"{report / 1e6:.1f} MB",
    ]


def study(points: int) -> list[str]:
    """The words of a sweep with that many points."""
    side = 10
    alphas = ",".join(f"{(i + 1) * side / points:.6g}" for i in range(points // side))
    densities = ",".join(f"{(i + 1) / side:g}" for i in range(side))
    measured = ["plugins=[signs.py]", "evaluator.name=signs"]
    return ["recipe=ties", f"alpha={alphas}", f"k={densities}", "output=none", *measured, "-m"]


def run(folder: Path, words: Sequence[str], until: str = "") -> Command:
    """Run a command; with `until` it is killed when it shows a line that begins so."""
    environment = {**as_for_users(), "PYTHONPATH": str(REPOSITORY)}
    first = processor = 0.0
    with subprocess.Popen(
        [*APP, *words], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not first and line.startswith("["):
                first = processor_time(process.pid)
            if until and line.startswith(until):
                process.send_signal(signal.SIGKILL)
                break
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, -signal.SIGKILL if until else 0):
        sys.exit(f"failed: python -m mecha_exp {' '.join(words)[:200]}")
    processor = usage.ru_utime + usage.ru_stime
    return Command(processor, first, usage.ru_maxrss * 1024)


if __name__ == "__main__":
    main()
