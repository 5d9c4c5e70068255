"""Studies of thousands of points: time and memory of the sweep, of what is shown of it, and of going on.

    python -m bench.studies                                    100, 1,000 and 10,000 points
    python -m bench.studies --tracking none database server    the same untracked, and tracked in two ways
    python -m bench.studies --points 300 --tracking server     that many alone
    python -m bench.studies --shares 8 --save                  in 8 shares, into bench/RESULTS.md

Each study is TIES on the bundled digits over alpha and k, with an evaluator that takes no time and gives 100
outcomes, and a store of its own. It is killed after nine tenths of its points, and the same command goes on.
Times are processor time, which other work on the machine does not change, of runs that find the inputs'
hashes and the compiled loops. In shares the work is done by other processes, so times are wall times, and the
memory is that of the head. The end is all that comes after the last point: verdict, table, figures, report.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.report import as_for_users, machine, make_parser, save_section, say, table
from bench.scaling import processor_time
from bench.sweeps import APP, REPOSITORY
from tests.support.tracking_server import TrackingServer

POINTS = (100, 1_000, 10_000)
HEADINGS = [
    "points",
    "the sweep",
    "growth",
    "a point",
    "peak memory",
    "going on: first new point",
    "the end",
    "again, complete",
    "`table` after the kill",
    "`ls`",
    "`table`",
    "report",
]
EVALUATOR = '''
from mecha_exp import Outcomes, evaluator


@evaluator("signs", metric="positive", direction="maximize", units={"positive": "fraction"})
def signs(state_dict):
    """The share of the first 100 elements that are positive, each of them an outcome."""
    first = next(iter(state_dict.values())).flatten()[:100]
    return Outcomes({"all": (first > 0).double().tolist()})
'''


@dataclass(frozen=True)
class Taken:
    """What a command had taken at some moment.

    Attributes:
        wall: seconds.
        processor: seconds of its own processor time.
    """

    wall: float = 0.0
    processor: float = 0.0


@dataclass(frozen=True)
class Command:
    """What a command took.

    Attributes:
        all: until it ended.
        first: until its first line about a point.
        last: until its last one.
        peak: bytes of memory.
    """

    all: Taken
    first: Taken
    last: Taken
    peak: int


def main() -> None:
    """Measure, print, and save if asked."""
    parser = make_parser(__doc__)
    parser.add_argument("--points", type=int, nargs="+", default=POINTS, help="sizes")
    parser.add_argument("--shares", type=int, help="cut into so many shares, each in a process")
    parser.add_argument("--tracking", nargs="+", default=["none"], choices=["none", "database", "server"])
    options = parser.parse_args()
    load = os.getloadavg()[0]
    clock = "wall" if options.shares else "processor"
    title = "Studies of thousands of points" + (f", in {options.shares} shares" if options.shares else "")
    end = f"{machine()}; {clock} times, a load of {load:.1f} by other work when it began."
    rows = [HEADINGS]
    for tracking in options.tracking:
        before: list[str] = []
        for points in options.points:
            rows.append(row(points, tracking, options.shares, clock, before))
            before = rows[-1]
            say(" | ".join(before))
            if options.save:  # what is measured is not lost if a later study breaks off
                save_section(title, f"{table(rows)}\n\n{end}")
    say(f"{table(rows)}\n\n{end}")


def row(points: int, tracking: str, shares: int | None, clock: str, before: Sequence[str]) -> list[str]:
    """A study that is killed and goes on, what is shown of it, and the same command once more."""
    with tempfile.TemporaryDirectory() as name, tracked(tracking, Path(name)) as words:
        folder = Path(name)
        (folder / "signs.py").write_text(EVALUATOR)
        run(folder, [*study(10), "tracking=none", "store=null"])  # which compiles the loops
        words = [*study(points), *words]
        words += ["hydra/launcher=processes", f"hydra.launcher.workers={shares}"] if shares else []
        killed = run(folder, words, until=f"[{points * 9 // 10}/")
        incomplete = run(folder, ["table"])
        after, again = run(folder, words), run(folder, words)
        listed, shown = run(folder, ["ls"]), run(folder, ["table"])
        report = next(folder.glob("outputs/multiruns/*/report.html")).stat().st_size

    def taken(moment: Taken) -> float:
        return float(getattr(moment, clock))

    total = taken(killed.all) + taken(after.all)
    return [
        f"{points:,}" + ("" if tracking == "none" else f", tracked at a {tracking}"),
        f"{total:.0f} s",
        f"{total / float(before[1].split()[0]):.1f} times" if before else "",
        f"{1000 * total / points:.0f} ms",
        f"{max(c.peak for c in (killed, after, again, incomplete, listed, shown)) / 1e9:.2f} GB",
        f"{taken(after.first):.1f} s",
        f"{taken(after.all) - taken(after.last):.1f} s",
        f"{taken(again.all):.1f} s",
        f"{taken(incomplete.all):.1f} s",
        f"{taken(listed.all):.1f} s",
        f"{taken(shown.all):.1f} s",
        f"{report / 1e6:.1f} MB",
    ]


@contextmanager
def tracked(tracking: str, folder: Path) -> Iterator[list[str]]:
    """The words that track a study: not at all, in a database, or at a server that runs meanwhile."""
    if tracking != "server":
        yield ["tracking=none"] if tracking == "none" else []
        return
    own = folder / "server"
    own.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    server = TrackingServer(own, f"sqlite:///{own}/server.db", port)
    try:
        yield [f"tracking.uri={server.uri}"]
    finally:
        server.kill()


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
    first = last = Taken()
    peak = 0
    started = time.perf_counter()
    with subprocess.Popen(
        [*APP, *words], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("["):
                last = Taken(time.perf_counter() - started, processor_time(process.pid))
                first = first if first.wall else last
            peak = peak_of(process.pid) or peak
            if until and line.startswith(until):
                process.send_signal(signal.SIGKILL)
                break
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, -signal.SIGKILL if until else 0):
        sys.exit(f"failed: python -m mecha_exp {' '.join(words)[:200]}")
    end = Taken(time.perf_counter() - started, usage.ru_utime + usage.ru_stime)
    return Command(end, first, last, peak)


def peak_of(pid: int) -> int:
    """The bytes of memory that a process has taken at most; 0 if it has ended."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


if __name__ == "__main__":
    main()
