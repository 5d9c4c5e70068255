"""How long a person waits for the application: help, import, the demo, tracking.

python -m bench.startup             print the table
python -m bench.startup --save      and put it into bench/RESULTS.md
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from bench.report import machine, make_parser, median_and_spread, publish, seconds, table

REPOSITORY = Path(__file__).parents[1]
PYTHON = sys.executable
APP = [PYTHON, "-m", "mecha_exp"]
DEMO = [*APP, "recipe=ties", "alpha=0.3,0.5,0.7", "-m"]
HERE = {"PYTHONPATH": str(REPOSITORY)}
POINTS = 20


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--repeat", type=int, default=5, help="runs of each (default: %(default)s)")
    options = parser.parse_args()
    text = measured(options.repeat)
    publish("Waiting for the application", text, save=options.save)


def measured(repeat: int) -> str:
    """The table, with the machine below it."""
    rows = [["what", "median (range)", "bar"]]
    rows.append(["`python -m mecha_exp --help`", _repeated([*APP, "--help"], repeat), "1.5 s"])
    torch_only = _times([PYTHON, "-c", "import torch"], repeat)
    everything = "import torch, mecha_exp; mecha_exp.merge; mecha_exp.slerp; mecha_exp.serialize"
    library = _times([PYTHON, "-c", everything], repeat)
    extra = statistics.median(library) - statistics.median(torch_only)
    rows.append(["`import torch` alone", median_and_spread(torch_only), ""])
    rows.append(["`import mecha_exp` and every name used, beyond torch", f"{extra:.2f} s", "0.3 s"])
    fresh, again = _demo(repeat)
    rows.append(["the demo in a fresh folder, command to table", median_and_spread(fresh), "15 s"])
    rows.append(["the demo again (the database exists)", median_and_spread(again), ""])
    rows.append(["the demo without tracking", _repeated([*DEMO, "tracking=none"], repeat), ""])
    rows.append([f"tracking, a grid point (sweep of {POINTS})", _tracking(repeat), "0.2 s"])
    return f"{table(rows)}\n\n{machine()}; {repeat} runs of each, every one a process of its own."


def _repeated(command: list[str], repeat: int) -> str:
    return median_and_spread(_times(command, repeat))


def _times(command: list[str], repeat: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        return [seconds(command, Path(folder), HERE) for _ in range(repeat)]


def _demo(repeat: int) -> tuple[list[float], list[float]]:
    """The demo where nothing is yet, and once more in the same folder."""
    fresh, again = [], []
    for _ in range(repeat):
        with tempfile.TemporaryDirectory() as folder:
            fresh.append(seconds(DEMO, Path(folder), HERE))
            again.append(seconds(DEMO, Path(folder), HERE))
    return fresh, again


def _tracking(repeat: int) -> str:
    """What tracking adds to a grid point: the time between its end and the start of the next one."""
    alphas = ",".join(f"{i / POINTS:g}" for i in range(POINTS))
    command = [*APP, "recipe=weighted_sum", f"alpha={alphas}", "output=none", "-m"]
    return median_and_spread([_gap(command) - _gap([*command, "tracking=none"]) for _ in range(repeat)])


def _gap(command: list[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:  # a new one, or the points are there already
        seconds(command, Path(folder), HERE)
        (sweep,) = (Path(folder) / "outputs" / "multiruns").iterdir()
        runs = [json.loads((sweep / str(n) / "run.json").read_text()) for n in range(POINTS)]
    gaps = [(b["started"] - a["ended"]) / 1000 for a, b in pairwise(runs)]
    return statistics.median(gaps)


if __name__ == "__main__":
    main()
