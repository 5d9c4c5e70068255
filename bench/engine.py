"""The engine beside its peers: seconds, peak memory, and how far from the floor.

    python -m bench.engine --size small --repeat 1          a quick look
    python -m bench.engine --save                           the whole table, into bench/RESULTS.md

The floor of a case is the time to read every input once (`cat` to nowhere) and to copy one output. Each run
is a process of its own, tools take turns, imports do not count, and nothing is flushed to disk. Each peer is
installed into an environment of its own. A case that takes a peer over a minute is run once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.models import make_models
from bench.report import machine, save_section, table

REPOSITORY = Path(__file__).parents[1]
CASES_SCRIPT = Path(__file__).with_name("cases.py")
PEERS = {"sd-mecha": "sd-mecha==1.1.8", "mergekit": "mergekit==0.1.5"}
LONG_SECONDS = 60


@dataclass(frozen=True)
class Case:
    """One row: a name of `cases.py`, how many inputs it has and of which size, and who can run it."""

    name: str
    title: str
    inputs: int
    size: str | None = None  # None is the size asked for
    outputs: int = 1
    tools: tuple[str, ...] = ("mecha_exp", "sd-mecha", "mergekit")


WITHOUT_MERGEKIT = ("mecha_exp", "sd-mecha")
CASES = [
    Case("weighted_sum", "weighted sum of 2", 2),
    Case("add_difference", "add difference of 3", 3),
    Case("slerp", "SLERP of 2", 2, tools=WITHOUT_MERGEKIT),
    Case("perpendicular", "perpendicular of 2", 2, tools=WITHOUT_MERGEKIT),
    Case("ties", "TIES, 3 experts, k=0.2", 4),
    Case("dare_ties", "DARE-TIES, 3 experts", 4),
    Case("n_average", "n_average of 10 (0.5 GB each)", 10, "half"),
    Case("ties_sweep", "TIES, 8 alphas, 0.5 GB models", 4, "half", outputs=8, tools=("mecha_exp",)),
]


@dataclass
class Measured:
    """The runs of one tool on one case."""

    seconds: list[float] = field(default_factory=list)
    peak: int = 0

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
    parser.add_argument("--case", nargs="*", choices=[case.name for case in CASES], help="only these")
    parser.add_argument("--repeat", type=int, default=5, help="runs of each (default: %(default)s)")
    parser.add_argument("--peer-repeat", type=int, help="runs of each peer (default: as many)")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/mecha_exp_bench"), help="of the models")
    parser.add_argument("--environments", type=Path, default=Path(".bench"), help="of the peers")
    parser.add_argument("--no-peers", action="store_true", help="mecha_exp and the floor only")
    parser.add_argument("--save", action="store_true", help="write the table into bench/RESULTS.md")
    options = parser.parse_args()
    pythons = {"mecha_exp": Path(sys.executable)}
    if not options.no_peers:
        pythons |= {name: environment(options.environments / name, what) for name, what in PEERS.items()}
    cases = [case for case in CASES if not options.case or case.name in options.case]
    rows = [["work", "floor", "mecha_exp", "of the floor", "peak memory", "sd-mecha", "mergekit"]]
    for case in cases:
        repeat = (options.repeat, options.peer_repeat or options.repeat)
        rows.append(row(case, options.size, options.folder, pythons, repeat))
        say(" | ".join(rows[-1]))
    runs = f"medians of {options.repeat} (peers: {options.peer_repeat or options.repeat})"
    text = f"{table(rows)}\n\n{machine()}; models of size {options.size}; {runs}."
    say(text)
    if options.save:
        save_section(f"The engine beside its peers ({options.size})", text)


def row(case: Case, size: str, folder: Path, pythons: dict[str, Path], repeat: tuple[int, int]) -> list[str]:
    """Measure one case with every tool, taking turns; `repeat` is for us and for the peers."""
    wanted = case.size or size
    for path in folder.glob("*.safetensors"):  # a memory disk holds the models of one size only
        if not path.name.startswith(f"{wanted}-"):
            path.unlink()
    inputs = make_models(folder, case.inputs, wanted)
    output = folder / "output.safetensors"
    measured = {tool: Measured() for tool in case.tools if tool in pythons}
    floors = []
    for turn in range(max(repeat)):
        floors.append(floor(inputs, output, case.outputs))
        for tool, result in measured.items():
            is_long = bool(result.seconds) and result.seconds[0] > LONG_SECONDS
            if turn < repeat[tool != "mecha_exp"] and not is_long:
                run(pythons[tool], tool, case.name, output, inputs, result)
    best = statistics.median(floors)
    mine = measured["mecha_exp"]
    peers = [
        f"{m.median:.1f} s, {m.median / mine.median:.0f} times, {m.peak / 1e9:.1f} GB" if m else "-"
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


def run(python: Path, tool: str, case: str, output: Path, inputs: Sequence[Path], result: Measured) -> None:
    """One run in a process of its own; its seconds and its peak resident size."""
    command = [str(python), str(CASES_SCRIPT), tool, case, str(output), *map(str, inputs)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)} if tool == "mecha_exp" else dict(os.environ)
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        printed = process.stdout.read().decode()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{tool} failed at {case}; run it by hand: {' '.join(command)}")
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
