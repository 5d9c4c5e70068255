"""The engine beside its peers: seconds, peak memory, and how far from the floor.

    python -m bench.engine --size small --repeat 1          a quick look
    python -m bench.engine --save                           the whole table, into bench/RESULTS.md
    python -m bench.engine --cases ties slerp --no-peers    single rows
    python -m bench.engine --cases families --size half     a method of each family, 0.5 GB models
    python -m bench.engine --cases sdxl --disk /var/tmp     what needs more room than the memory disk has

The floor of a case is the time to read every input once (`cat` to nowhere) and to copy one output. Each run
is a process of its own, tools take turns, imports do not count, and nothing is flushed to disk. Each peer is
installed into an environment of its own. A case that takes a peer over a minute is run once; a tool that
fails has no figure, and its last words are shown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.cases import WORKERS_VARIABLE
from bench.models import make_models, many_keys
from bench.report import machine, save_section, table

REPOSITORY = Path(__file__).parents[1]
CASES_SCRIPT = Path(__file__).with_name("cases.py")
PEERS = {"sd-mecha": "sd-mecha==1.1.8", "mergekit": "mergekit==0.1.5"}
LONG_SECONDS = 60


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        name: how `--cases` calls it.
        title: of the row.
        inputs: how many models it has.
        work: what is done, a name of `cases.py`; the row's own by default.
        size: of the models; None is the size that is asked for, a number so many keys of ten elements each.
        outputs: how many models it writes.
        tools: who can do it.
        workers: threads of mecha_exp; None is one for each core.
        on_disk: whether the files lie on the disk rather than in memory.
    """

    name: str
    title: str
    inputs: int
    work: str = ""
    size: str | int | None = None
    outputs: int = 1
    tools: tuple[str, ...] = ("mecha_exp", "sd-mecha", "mergekit")
    workers: int | None = None
    on_disk: bool = False


WITHOUT_MERGEKIT = ("mecha_exp", "sd-mecha")
ALONE = ("mecha_exp",)
FAMILIES = {
    "centres": Case("centres", "model stock by row, 3 experts", 4, tools=ALONE),
    "difference": Case("difference", "train difference of 3", 3, tools=ALONE),
    "dropout": Case("dropout", "DELLA, 3 experts", 4, tools=ALONE),
    "frequency": Case("frequency", "crossover of 2", 2, tools=ALONE),
    "limiting": Case("limiting", "clamp by 3", 4, tools=ALONE),
    "linear": Case("linear", "task arithmetic, 3 experts", 4, tools=ALONE),
    "outliers": Case("outliers", "breadcrumbs, 3 experts", 4, tools=ALONE),
    "slicing": Case("slicing", "tensor_sum of 2", 2, tools=ALONE),
    "spectral": Case("spectral", "rotate of 2", 2, tools=ALONE),
    "spherical": Case("spherical", "Karcher mean of 4", 4, tools=ALONE),
    "subspaces": Case("subspaces", "TSV-Merge, 3 experts", 4, tools=ALONE),
    "tasks": Case("tasks", "consensus, 3 experts", 4, tools=ALONE),
    "trimming": Case("trimming", "weighted TIES, 3 experts", 4, tools=ALONE),
}
"""One method of each family, by a name of `cases.py`."""
CASES = [
    Case("weighted_sum", "weighted sum of 2", 2),
    Case("add_difference", "add difference of 3", 3),
    Case("slerp", "SLERP of 2", 2, tools=WITHOUT_MERGEKIT),
    Case("perpendicular", "perpendicular of 2", 2, tools=WITHOUT_MERGEKIT),
    Case("ties", "TIES, 3 experts, k=0.2", 4),
    Case("dare_ties", "DARE-TIES, 3 experts", 4),
    Case("n_average", "n_average of 10 (0.5 GB each)", 10, size="half"),
    Case("ties_sweep", "TIES, 8 alphas, 0.5 GB models", 4, size="half", outputs=8, tools=ALONE),
    Case("n_average_2", "n_average of 2 (0.5 GB each)", 2, "n_average", "half", tools=ALONE),
    Case("n_average_4", "n_average of 4 (0.5 GB each)", 4, "n_average", "half", tools=ALONE),
    Case("statistics", "weighted sum of 2, with statistics", 2, tools=ALONE),
    Case("keys", "weighted sum of 2, 100,000 keys of 10 elements", 2, "weighted_sum", 100_000),
    Case("deep", "40 nodes deep, each used twice, 0.1 GB models", 2, size="small", tools=WITHOUT_MERGEKIT),
    *(
        Case(f"workers_{n}", f"TIES, 3 experts, {n} workers", 4, "ties", tools=ALONE, workers=n)
        for n in (1, 2, 4, 8)
        if n <= (os.cpu_count() or 1)
    ),
    Case(
        "sdxl",
        "weighted sum of 2, 6.9 GB each, on disk",
        2,
        "weighted_sum",
        "sdxl",
        tools=ALONE,
        on_disk=True,
    ),
    *FAMILIES.values(),
]
EVERY_FAMILY = "families"
BY_NAME_ONLY = ("sdxl", *FAMILIES)
"""Rows that are measured only if they are named: they need 21 GB of disk, or make the table long."""


@dataclass
class Measured:
    """The runs of one tool on one case."""

    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    failed: bool = False

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def main() -> None:
    """Measure, print, and save if asked."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine", description=__doc__, formatter_class=layout
    )
    parser.add_argument(
        "--size", default="sd15", choices=["small", "half", "sd15", "sdxl"], help="of the models"
    )
    names = [*(case.name for case in CASES), EVERY_FAMILY]
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
    parser.add_argument("--save", action="store_true", help="write the table into bench/RESULTS.md")
    options = parser.parse_args()
    pythons = {"mecha_exp": Path(sys.executable)}
    if not options.no_peers:
        pythons |= {name: environment(options.environments / name, what) for name, what in PEERS.items()}
    cases = chosen_cases(options.cases)
    repeat = (options.repeat, options.peer_repeat or options.repeat)
    rows = [["work", "floor", "mecha_exp", "of the floor", "peak memory", "sd-mecha", "mergekit"]]
    ends = time.monotonic() + 60 * (options.minutes or float("inf"))
    for case in cases:
        if time.monotonic() > ends:
            say(f"no time left for {case.title}")
            continue
        folder = options.disk / options.folder.name if case.on_disk else options.folder
        rows.append(row(case, options.size, folder, pythons, repeat))
        say(" | ".join(rows[-1]))
    runs = f"medians of {repeat[0]} (peers: {repeat[1]}, and 1 where that takes over a minute)"
    text = f"{table(rows)}\n\n{machine()}; models of size {options.size}; {runs}."
    say(text)
    if options.save:
        save_section(f"The engine beside its peers ({options.size})", text)


def chosen_cases(named: Sequence[str] | None) -> list[Case]:
    """The rows that are named, `families` being one for each family of methods; or all but the long ones."""
    if not named:
        return [case for case in CASES if case.name not in BY_NAME_ONLY]
    wanted = {*named, *(FAMILIES if EVERY_FAMILY in named else ())}
    return [case for case in CASES if case.name in wanted]


def row(case: Case, size: str, folder: Path, pythons: dict[str, Path], repeat: tuple[int, int]) -> list[str]:
    """Measure one case with every tool, taking turns; `repeat` is for us and for the peers."""
    wanted = case.size or size
    prefix = f"keys{wanted}-" if isinstance(wanted, int) else f"{wanted}-"
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.safetensors"):  # a memory disk holds the models of one size only
        if not path.name.startswith(prefix):
            path.unlink()
    inputs = (many_keys if isinstance(wanted, int) else make_models)(folder, case.inputs, wanted)
    output = folder / "output.safetensors"
    measured = {tool: Measured() for tool in case.tools if tool in pythons}
    floors = []
    for turn in range(max(repeat)):
        floors.append(floor(inputs, output, case.outputs))
        for tool, result in measured.items():
            is_long = bool(result.seconds) and result.seconds[0] > LONG_SECONDS
            if turn < repeat[tool != "mecha_exp"] and not is_long and not result.failed:
                run(pythons[tool], tool, case, output, inputs, result)
    best = statistics.median(floors)
    mine = measured["mecha_exp"]
    if not mine.seconds:
        return [case.title, f"{best:.2f} s", "failed", "-", "-", "-", "-"]
    peers = [
        f"{m.median:.1f} s, {m.median / mine.median:.0f} times, {m.peak / 1e9:.1f} GB"
        if m and m.seconds
        else "-"
        for m in (measured.get("sd-mecha"), measured.get("mergekit"))
    ]
    share = f"{mine.median / best:.2f}"
    return [case.title, f"{best:.2f} s", f"{mine.median:.2f} s", share, f"{mine.peak / 1e6:.0f} MB", *peers]


def floor(inputs: Sequence[Path], output: Path, outputs: int) -> float:
    """Reading every input once and copying the outputs."""
    started = time.perf_counter()
    with Path(os.devnull).open("wb") as nowhere:
        subprocess.run(["cat", *map(str, inputs)], stdout=nowhere, check=True)
    for number in range(outputs):
        subprocess.run(["cp", str(inputs[0]), f"{output}.{number}"], check=True)
    taken = time.perf_counter() - started
    for path in output.parent.glob(f"{output.name}.*"):
        path.unlink()
    return taken


def run(python: Path, tool: str, case: Case, output: Path, inputs: Sequence[Path], result: Measured) -> None:
    """One run in a process of its own; its seconds and its peak resident size."""
    command = [str(python), str(CASES_SCRIPT), tool, case.work or case.name, str(output), *map(str, inputs)]
    environment = dict(os.environ)
    if tool == "mecha_exp":
        environment |= {"PYTHONPATH": str(REPOSITORY), WORKERS_VARIABLE: str(case.workers or "")}
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors) as process:
            assert process.stdout is not None
            printed = process.stdout.read().decode()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            last = errors.read().decode(errors="replace").strip().splitlines()[-1:]
            say(f"{tool} failed at {case.title}: {' '.join(last)}\n    {' '.join(command)}")
            result.failed = True
        else:
            result.seconds.append(json.loads(printed.splitlines()[-1])["seconds"])
            result.peak = max(result.peak, usage.ru_maxrss * 1024)
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


def say(text: str) -> None:
    """A line for whoever waits."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
