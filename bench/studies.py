"""Studies of thousands of points: time and memory of the sweep, of what is shown of it, and of going on.

    python -m bench.studies                        100, 1,000 and 10,000 points, untracked and tracked
    python -m bench.studies --points 1000          that many alone
    python -m bench.studies --untracked --save     into bench/RESULTS.md
    python -m bench.studies --shares 8             10,000 points in 8 shares, wall times

Each study is TIES on the bundled digits over alpha and k, with an evaluator that takes no time and gives 100
outcomes, and a store of its own. It is killed after nine tenths of its points, and the same command goes on.
Times are processor time, which other work on the machine does not change, of runs that find the inputs'
hashes and the compiled loops. In shares the work is done by other processes, so times are wall times, and the
memory is that of the head.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.report import as_for_users, machine, make_parser, publish, save_section, say, table
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
        wall: seconds.
        wall_first: the same until its first line about a point.
        peak: bytes of memory.
    """

    processor: float
    first: float
    wall: float
    wall_first: float
    peak: int


def main() -> None:
    """Measure, print, and save if asked."""
    parser = make_parser(__doc__)
    parser.add_argument("--points", type=int, help="one size alone")
    parser.add_argument("--untracked", action="store_true", help="without the tracked studies")
    parser.add_argument("--shares", type=int, help="one study in so many shares, each in a process")
    options = parser.parse_args()
    if options.shares:
        in_shares(options.points or POINTS[-1], options.shares, save=options.save)
        return
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


def in_shares(points: int, shares: int, *, save: bool) -> None:
    """A study in shares that is killed and goes on; what is shown of it while it is incomplete and after."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "signs.py").write_text(EVALUATOR)
        run(folder, [*study(10), "tracking=none", "store=null"])  # which compiles the loops
        words = [*study(points), "tracking=none", "hydra/launcher=processes"]
        words.append(f"hydra.launcher.workers={shares}")
        before = run(folder, words, until=f"[{points * 9 // 10}/")
        while_running = run(folder, ["table"])
        after, again = run(folder, words), run(folder, words)
        listed, shown = run(folder, ["ls"]), run(folder, ["table"])
    steps = {
        f"the sweep until it is killed after {points * 9 // 10:,} points": before,
        "`table` of what is there": while_running,
        "the same command, which goes on": after,
        "the same command again, complete": again,
        "`ls`": listed,
        "`table`": shown,
    }
    rows = [["step", "wall time", "processor time", "until the first point", "peak memory of the head"]]
    for step, c in steps.items():
        first = f"{c.wall_first:.1f} s" if c in (before, after) else ""
        rows.append([step, f"{c.wall:.1f} s", f"{c.processor:.1f} s", first, f"{c.peak / 1e9:.2f} GB"])
    text = f"{table(rows)}\n\n{machine()}; a load of {load:.1f} by other work when it began."
    publish(f"A study of {points:,} points in {shares} shares", text, save=save)


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
    first = wall_first = 0.0
    peak = 0
    started = time.perf_counter()
    with subprocess.Popen(
        [*APP, *words], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not first and line.startswith("["):
                first = processor_time(process.pid)
                wall_first = time.perf_counter() - started
            peak = peak_of(process.pid) or peak
            if until and line.startswith(until):
                process.send_signal(signal.SIGKILL)
                break
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, -signal.SIGKILL if until else 0):
        sys.exit(f"failed: python -m mecha_exp {' '.join(words)[:200]}")
    wall = time.perf_counter() - started
    return Command(usage.ru_utime + usage.ru_stime, first, wall, wall_first, peak)


def peak_of(pid: int) -> int:
    """The bytes of memory that a process has taken at most; 0 if it has ended."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


if __name__ == "__main__":
    main()
