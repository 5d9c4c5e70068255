"""Sweeps: many points beside one point, and from the command to the table.

    python -m bench.sweeps --size small --repeat 1     a quick look
    python -m bench.sweeps --save                      the whole table, into bench/RESULTS.md
    python -m bench.sweeps --budget                    the demo's processor time stage by stage

Every run is a process of its own with a store of its own, so that nothing is known beforehand; hashes of the
inputs and compiled loops are remembered from the first one on. The memory that a run takes is ready when it
starts (`cases.touch_memory`). The demo's figures are drawn, its runs tracked. Ten written models of full size
and their inputs need 30 GB: where the folder has less, they are of size `half`; `--written DIR` puts them, as
well as the copies that they are compared with, on a disk. sd-mecha merges one point, and is said to take ten
times as long for ten, and its start once.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from bench.cases import touch_memory
from bench.engine import PEERS, Measured, environment
from bench.engine import run as peer_run
from bench.models import make_models
from bench.report import as_for_users, machine, make_parser, publish, save_section, say, table
from bench.rows import Case

REPOSITORY = Path(__file__).parents[1]
APP = [sys.executable, "-m", "mecha_exp"]
ALPHAS = ",".join(f"{0.1 * i:g}" for i in range(1, 11))
MEASURED = ["output=none"]
ROOM = 32_000_000_000
"""Bytes that ten models of full size and their inputs take."""
MEMORY = 1_000_000_000
"""Bytes that a sweep may take at its peak."""
DEMO_ALPHAS = ",".join(f"{i / 100:g}" for i in range(1, 101))


@dataclass(frozen=True)
class Run:
    """The time and the peak memory of one process."""

    seconds: float
    processor: float
    peak: int


def main() -> None:
    """Measure, print, and save if asked."""
    parser = make_parser(__doc__)
    parser.add_argument("--size", default="sd15", choices=["small", "half", "sd15"], help="of the models")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each (default: %(default)s)")
    parser.add_argument(
        "--folder", type=Path, default=Path("/dev/shm/mecha_exp_sweeps"), help="of the models"
    )
    parser.add_argument("--written", type=Path, help="folder of written models, 22 GB (default: the same)")
    parser.add_argument("--only", choices=["demo", "models", "written"], help="a part of the table")
    parser.add_argument("--environments", type=Path, default=Path(".bench"), help="of sd-mecha")
    parser.add_argument("--no-peers", action="store_true", help="without sd-mecha")
    parser.add_argument("--budget", action="store_true", help="the stages of the demo alone")
    parser.add_argument("--points", type=int, nargs="*", default=[100, 1000], help="of the budget")
    options = parser.parse_args()
    if options.budget:
        text = f"{table(budget(options.points, options.repeat))}\n\n{machine()}; medians of {options.repeat}."
        publish("The budget of a point", text, save=options.save)
        return
    rows = [["work", "time", "processor time", "peak memory", "bar"]]
    end = f"{machine()}; models of size {options.size}; medians of {options.repeat}."
    halves = []
    if options.only in (None, "demo"):
        halves.append(demo(options.repeat))
    if options.only in (None, "models"):
        peer = None if options.no_peers else environment(options.environments / "sd-mecha", PEERS["sd-mecha"])
        halves.append(models(options.size, options.folder, options.repeat, peer))
    if options.only in (None, "written"):
        halves.append(written(options.size, options.folder, options.written, options.repeat))
    for row in chain.from_iterable(halves):
        rows.append(row)
        say(" | ".join(row))
        if options.save:  # what is measured is not lost if a later row breaks off
            which = f": {options.only}" if options.only else ""
            save_section(f"Sweeps{which} ({options.size})", f"{table(rows)}\n\n{end}")
    say(f"{table(rows)}\n\n{end}")


def demo(repeat: int) -> Iterator[list[str]]:
    """A hundred points on the bundled digits, evaluated and tracked, and the same command again."""
    command = ["recipe=ties", f"alpha={DEMO_ALPHAS}", "output=none", "-m"]
    first, again = [], []
    for _ in range(repeat):
        with tempfile.TemporaryDirectory() as folder:
            first.append(run(command, Path(folder)))
            again.append(run(command, Path(folder)))
    yield row("100 points on the digits demo, command to table", first, at_most(seconds(first), 30))
    yield row("the same command again", again, at_most(seconds(again), 6))


def budget(points: Sequence[int], repeat: int) -> list[list[str]]:
    """The processor seconds of each stage of the demo, and of the same command again: see `bench.budget`."""
    runs: dict[str, list[dict[str, float]]] = defaultdict(list)
    for count in points:
        command = ["recipe=ties", f"alpha={','.join(f'{i / count:g}' for i in range(1, count + 1))}"]
        for _ in range(repeat):
            with tempfile.TemporaryDirectory() as folder:
                for title in (f"{count} points", f"{count} again"):
                    runs[title].append(stages([*command, "output=none", "-m"], Path(folder)))
    rows = [["stage", *runs]]
    for stage in dict.fromkeys(chain.from_iterable(chain.from_iterable(runs.values()))):
        rows.append([stage, *(f"{_median(each, stage):.2f} s" for each in runs.values())])
    totals = (statistics.median(sum(run.values()) for run in each) for each in runs.values())
    return [*rows, ["all", *(f"{total:.2f} s" for total in totals)]]


def _median(runs: Sequence[Mapping[str, float]], stage: str) -> float:
    return statistics.median(run.get(stage, 0.0) for run in runs)


def stages(arguments: list[str], folder: Path) -> dict[str, float]:
    """The processor seconds of the stages of one command."""
    command = [sys.executable, "-m", "bench.budget", *arguments]
    environment = {**as_for_users(), "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def models(size: str, folder: Path, repeat: int, peer: Path | None) -> Iterator[list[str]]:
    """TIES over large models: one point and ten, measured only."""
    one, ten = points(size, folder, repeat, MEASURED)
    yield row(f"TIES, 1 point, weight statistics alone ({size})", one, memory(one))
    ratio = seconds(ten) / seconds(one)
    bar = f"{judged(ratio <= 1.5)}: {ratio:.2f} times one point, at most 1.5; {memory(ten)}"
    yield row(f"TIES, 10 points, weight statistics alone ({size})", ten, bar)
    if peer is not None:
        taken = Measured()
        inputs = make_models(folder, 4, size)
        case = Case("ties", "TIES", 4)
        peer_run(peer, "sd-mecha", case, folder / "merged.safetensors", inputs, taken)
        if taken.failed:
            yield ["the same by sd-mecha 1.1.8", "failed", "", "", ""]
        else:
            total = 10 * taken.median + taken.starts[0]
            times = total / seconds(ten)
            bar = f"{judged(times >= 150)}: {times:.0f} times as long, at least 150"
            title = (
                f"the same by sd-mecha 1.1.8: ten times one point of {taken.median:.1f} s, "
                f"and a start of {taken.starts[0]:.1f} s"
            )
            yield [title, f"{total:.0f} s", "", f"{taken.peak / 1e9:.2f} GB", bar]


def written(size: str, folder: Path, disk: Path | None, repeat: int) -> Iterator[list[str]]:
    """The same written, and the copying of as many files."""
    folder.mkdir(parents=True, exist_ok=True)
    if disk is None and size == "sd15" and shutil.disk_usage(folder).total < ROOM:
        for path in folder.glob(f"{size}-*.safetensors"):  # a memory disk holds the models of one size only
            path.unlink()
        size = "half"
    target = disk or folder
    where = "on disk" if disk else "on the memory disk"
    output = ["output.durable=false", f"output.path='{target}/out-${{alpha}}.safetensors'"]
    one, ten = points(size, folder, repeat, output, target)
    copied = statistics.median(copying(make_models(folder, 1, size)[0], target) for _ in range(repeat))
    most = seconds(one) + 1.5 * copied
    yield row(f"TIES, 1 point, written {where} ({size})", one, memory(one))
    yield [f"copying 10 outputs ({size})", f"{copied:.1f} s", "", "", ""]
    bar = f"{at_most(seconds(ten), most)}, one point and 1.5 times the copying; {memory(ten)}"
    yield row(f"TIES, 10 points, written {where} ({size})", ten, bar)


def points(
    size: str, folder: Path, repeat: int, more: list[str], target: Path | None = None
) -> tuple[list[Run], list[Run]]:
    """One point and ten, taking turns, after one of each that compiles the loops and hashes the inputs.

    Args:
        target: where outputs are written.
    """
    base, *experts = make_models(folder, 4, size)
    inputs = ["recipe=ties", f"models.base={base}", f"models.experts=[{','.join(map(str, experts))}]"]
    inputs += ["evaluator=none", "tracking=none", "store=null", *more, "-m"]
    one, ten = [], []
    size_of_one = base.stat().st_size if target else 0
    for _ in range(repeat + 1):
        one.append(run([*inputs, "alpha=0.5"], folder, target, size_of_one))
        ten.append(run([*inputs, f"alpha={ALPHAS}"], folder, target, 10 * size_of_one))
    return one[1:], ten[1:]


def seconds(runs: Sequence[Run]) -> float:
    """The median wall time."""
    return statistics.median(run.seconds for run in runs)


def judged(met: bool) -> str:
    """A word for whether a bar is met."""
    return "met" if met else "missed"


def at_most(taken: float, most: float) -> str:
    """Whether a time is within its bar."""
    return f"{judged(taken <= most)}: at most {most:.1f} s"


def memory(runs: Sequence[Run]) -> str:
    """Whether the peak memory of some runs is within its bar."""
    return f"memory {judged(max(run.peak for run in runs) <= MEMORY)}: at most 1 GB"


def run(arguments: list[str], folder: Path, target: Path | None = None, writes: int = 0) -> Run:
    """One process, which finds the memory ready for itself and what it writes; that is removed afterwards."""
    make_ready(writes)
    environment = {**as_for_users(), "PYTHONPATH": str(REPOSITORY)}
    started = time.perf_counter()
    with subprocess.Popen(
        [*APP, *arguments], cwd=folder, env=environment, stdout=subprocess.DEVNULL
    ) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"failed; run it by hand in {folder}: python -m mecha_exp {' '.join(arguments)}")
    for path in (target or folder).glob("out-*.safetensors"):
        path.unlink()
    return Run(time.perf_counter() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def make_ready(size: int) -> None:
    """Have memory ready for a process that writes so much, as far as there is as much."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    touch_memory(min(MEMORY + size, free * 3 // 4))


def copying(file: Path, folder: Path) -> float:
    """The seconds that ten copies take."""
    make_ready(10 * file.stat().st_size)
    started = time.perf_counter()
    for number in range(10):
        subprocess.run(["cp", str(file), str(folder / f"copy-{number}")], check=True)
    taken = time.perf_counter() - started
    for number in range(10):
        (folder / f"copy-{number}").unlink()
    return taken


def row(what: str, runs: Sequence[Run], bar: str) -> list[str]:
    """A line of the table."""
    processor = statistics.median(r.processor for r in runs)
    peak = max(r.peak for r in runs)
    return [what, f"{seconds(runs):.1f} s", f"{processor:.1f} s", f"{peak / 1e9:.2f} GB", bar]


if __name__ == "__main__":
    main()
