"""The engine beside its peers: seconds, peak memory, and how far from the floor.

    python -m bench.engine --size small --repeat 1          a quick look
    python -m bench.engine --save                           the whole table, into bench/RESULTS.md
    python -m bench.engine --cases ties slerp --no-peers    single rows
    python -m bench.engine --cases families --size half     a method of each family, 0.5 GB models
    python -m bench.engine --cases data --no-peers          merging with data, and the methods of its years
    python -m bench.engine --cases peers --size small       each method that a peer has too
    python -m bench.engine --cases all --size small --no-peers    every row, and one for each method
    python -m bench.engine --cases sdxl --disk /var/tmp     what needs more room than the memory disk has

The floor of a case is the time to read every input once (`cat` to nowhere) and to copy one output. Each run
is a process of its own, tools take turns, imports do not count, nothing is flushed to disk, and the memory
that a tool takes is ready when it starts (`cases.touch_memory`). Each peer is installed into an environment
of its own. A case that takes a peer over a minute is run once. A tool that fails, or takes over half an hour,
has no figure, and its last words are shown; the other rows go on.
The last column says whether what the engine must reach is met (`bars.py`).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.bars import Reached, verdict
from bench.cases import MEMORY_VARIABLE, OF_STATISTICS, WORKERS_VARIABLE, touch_memory
from bench.models import make_models, many_keys
from bench.report import as_for_users, machine, make_parser, save_section, say, table
from bench.rows import CASES, DATA, EVERY_FAMILY, EVERYTHING, SHARED, Case, chosen_cases
from bench.statistics_files import make_statistics

REPOSITORY = Path(__file__).parents[1]
CASES_SCRIPT = Path(__file__).with_name("cases.py")
PEERS = {"sd-mecha": "sd-mecha==1.1.8", "mergekit": "mergekit==0.1.5"}
MEMORY = {"mecha_exp": 300_000_000, "sd-mecha": 6_000_000_000, "mergekit": 8_000_000_000}
"""Bytes that a tool takes beside its outputs, about; they are made ready before it starts."""
SIZE_OF_BARS = "sd15"
"""The size of models that the seconds of a bar are for."""

LONG_SECONDS = 60
LIMIT_SECONDS = 1800
"""After which a run has failed."""

NOTE = (
    "The sweep is of 0.5 GB models: with eight outputs of 2.1 GB it takes 26 GB of memory disk. "
    "Workers are as many as there are cores, and fewer."
)


@dataclass
class Measured:
    """The runs of one tool on one case.

    Attributes:
        seconds: of each merge, imports left out.
        processor: the processor time of each merge, by all threads.
        starts: what the process of each took besides.
        peak: bytes of memory, at most.
    """

    seconds: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    peak: int = 0
    failed: bool = False

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def main() -> None:
    """Measure, print, and save if asked."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--size", default=SIZE_OF_BARS, choices=["small", "half", "sd15", "sdxl"], help="of the models"
    )
    names = [*(case.name for case in CASES), EVERY_FAMILY, EVERYTHING, DATA, SHARED]
    parser.add_argument(
        "--cases", nargs="*", choices=names, metavar="CASE", help=f"only these of: {', '.join(names)}"
    )
    parser.add_argument("--repeat", type=int, default=5, help="runs of each (default: %(default)s)")
    parser.add_argument("--peer-repeat", type=int, help="runs of each peer (default: as many)")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/mecha_exp_bench"), help="of the models")
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="where cases on disk put theirs")
    parser.add_argument("--minutes", type=float, help="begin no further row after so long")
    parser.add_argument("--environments", type=Path, default=Path(".bench"), help="of the peers")
    parser.add_argument("--no-peers", action="store_true", help="mecha_exp and the floor only")
    options = parser.parse_args()
    pythons = {"mecha_exp": Path(sys.executable)}
    if not options.no_peers:
        pythons |= peers(options.environments)
    repeat = (options.repeat, options.peer_repeat or options.repeat)
    ours = ["mecha_exp", "of the floor", "processor", "peak memory"]
    rows = [["work", "floor", *ours, "sd-mecha", "mergekit", "bar"]]
    runs = f"medians of {repeat[0]} (peers: {repeat[1]}; 1 where a run takes a minute)"
    end = f"{machine()}; models of size {options.size}; {runs}. {NOTE}"
    ends = time.monotonic() + 60 * (options.minutes or float("inf"))
    for case in chosen_cases(options.cases):
        if time.monotonic() > ends:
            say(f"no time left for {case.title}")
            continue
        folder = options.disk / options.folder.name if case.on_disk else options.folder
        rows.append(row(case, options.size, folder, pythons, repeat))
        say(" | ".join(rows[-1]))
        if options.save:  # what is measured is not lost if a later row breaks off
            which = f": {', '.join(options.cases)}" if options.cases else " beside its peers"
            save_section(f"The engine{which} ({options.size})", f"{table(rows)}\n\n{end}")
    say(f"{table(rows)}\n\n{end}")


def peers(environments: Path) -> dict[str, Path]:
    """The interpreters of the peers; one that cannot be installed is left out."""
    pythons = {}
    for name, what in PEERS.items():
        try:
            pythons[name] = environment(environments / name, what)
        except (OSError, subprocess.CalledProcessError) as error:
            say(f"{name} is left out: {error}")
    return pythons


def row(case: Case, size: str, folder: Path, pythons: dict[str, Path], repeat: tuple[int, int]) -> list[str]:
    """Measure one case with every tool, taking turns; `repeat` is for us and for the peers."""
    of_models = case.size or size
    prefix = f"keys{of_models}-" if isinstance(of_models, int) else f"{of_models}-"
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.safetensors"):  # a memory disk holds the models of one size only
        if not path.name.startswith(prefix):
            path.unlink()
    models = (many_keys if isinstance(of_models, int) else make_models)(folder, case.inputs, of_models)
    kind = OF_STATISTICS.get(case.name)
    measured_files = make_statistics(models[-2:], kind) if kind else []
    inputs = [*models, *measured_files]
    output = folder / "output.safetensors"
    measured = {tool: Measured() for tool in case.tools if tool in pythons}
    point = Measured()
    floors: list[tuple[float, float]] = []
    for turn in range(max(repeat)):
        floors.append(floor(inputs, output, case.outputs))
        for tool, result in measured.items():
            is_long = bool(result.seconds) and result.seconds[0] > LONG_SECONDS
            if turn < repeat[tool != "mecha_exp"] and not is_long and not result.failed:
                run(pythons[tool], tool, case, output, inputs, result)
        if case.point and turn < repeat[0]:
            run(pythons["mecha_exp"], "mecha_exp", replace(case, work=case.point), output, inputs, point)
    for path in measured_files:  # as large as two models, and no other row reads them
        path.unlink()
    reading, copying = (statistics.median(part) for part in zip(*floors, strict=True))
    best = reading + copying
    mine = measured["mecha_exp"]
    if not mine.seconds:
        return [case.title, f"{best:.2f} s", "failed", *["-"] * 5, "missed: it failed"]
    times = [
        f"{m.median:.1f} s, {m.median / mine.median:.1f} times, {m.peak / 1e9:.1f} GB"
        if m and m.seconds
        else "failed"
        if m and m.failed
        else "-"
        for m in map(measured.get, PEERS)
    ]
    reached = Reached(
        mine.median,
        mine.peak,
        best,
        copying,
        point.median if point.seconds else None,
        {name: m.median for name, m in measured.items() if m is not mine and m.seconds},
        of_models if isinstance(of_models, int) else 1,
    )
    bar = case.bar if of_models == SIZE_OF_BARS else replace(case.bar, seconds=None)
    taken = f"{mine.median:.2f} s" + (f" (one point {point.median:.2f} s)" if point.seconds else "")
    spent = [f"{mine.median / best:.2f}", f"{statistics.median(mine.processor):.2f} s"]
    peak = f"{mine.peak / 1e6:.0f} MB"
    return [case.title, f"{best:.2f} s", taken, *spent, peak, *times, verdict(bar, reached)]


def floor(inputs: Sequence[Path], output: Path, outputs: int) -> tuple[float, float]:
    """The seconds of reading every input once, and of copying the outputs."""
    touch_memory(outputs * inputs[0].stat().st_size)
    started = time.perf_counter()
    with Path(os.devnull).open("wb") as nowhere:
        subprocess.run(["cat", *map(str, inputs)], stdout=nowhere, check=True)
    read = time.perf_counter()
    for number in range(outputs):
        subprocess.run(["cp", str(inputs[0]), f"{output}.{number}"], check=True)
    copied = time.perf_counter()
    for path in output.parent.glob(f"{output.name}.*"):
        path.unlink()
    return read - started, copied - read


def run(python: Path, tool: str, case: Case, output: Path, inputs: Sequence[Path], result: Measured) -> None:
    """One run in a process of its own; its seconds and its peak resident size."""
    command = [str(python), str(CASES_SCRIPT), tool, case.work or case.name, str(output), *map(str, inputs)]
    memory = MEMORY[tool] + case.outputs * inputs[0].stat().st_size
    environment = as_for_users() | {MEMORY_VARIABLE: str(memory), "PYTHONPATH": str(REPOSITORY)}
    if tool == "mecha_exp":
        environment |= {WORKERS_VARIABLE: str(case.workers or "")}
    started = time.perf_counter()
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors) as process:
            assert process.stdout is not None
            limit = threading.Timer(LIMIT_SECONDS, process.kill)
            limit.start()
            printed = process.stdout.read().decode()
            process.wait()
            limit.cancel()
        if process.returncode:
            errors.seek(0)
            last = errors.read().decode(errors="replace").strip().splitlines()[-1:]
            say(f"{tool} failed at {case.title}: {' '.join(last)}\n    {' '.join(command)}")
            result.failed = True
        else:
            taken = json.loads(printed.splitlines()[-1])
            result.seconds.append(taken["seconds"])
            result.processor.append(taken["processor"])
            result.starts.append(time.perf_counter() - started - taken["seconds"] - taken["touching"])
            result.peak = max(result.peak, taken["peak"])
    for path in output.parent.glob(f"{output.stem}*"):
        if path.is_dir():
            for part in path.iterdir():
                part.unlink()
            path.rmdir()
        else:
            path.unlink()


def environment(folder: Path, what: str) -> Path:
    """The interpreter of an environment in which a peer is installed; made when it is not there."""
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        say(f"installing {what} into {folder}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet"]
        pins = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
        torch = next(line for line in pins if line.startswith("torch=="))
        subprocess.run([*install, torch.split(";")[0].strip()], check=True)
        subprocess.run([*install, what], check=True)
        (folder / ".ready").touch()
    return python


if __name__ == "__main__":
    main()
