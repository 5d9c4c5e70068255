"""Measuring sweeps: what two workers gain and tracking costs.

    python -m bench.measuring --only tracking --tracked 10     a quick look
    python -m bench.measuring --save                           the whole table, into bench/RESULTS.md

Workers measure points that take three seconds each. What tracking costs is that of the bundled digits
network. Runs that are compared are processes of their own and take turns.
"""

from __future__ import annotations

import csv
import statistics
import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.report import machine, make_parser, save_section, say, table
from bench.sweeps import Run, judged, run, seconds

SLOW = """
import time

from mecha_exp import evaluator

@evaluator("bench_slow", metric="norm")
def slow(state_dict):
    time.sleep(SECONDS)
    return {"norm": sum(float(tensor.double().norm()) for tensor in state_dict.values())}
"""
SECONDS = 3
"""How long a slow point takes, so that the start of the program hardly counts."""


def main() -> None:
    """Measure, print, and save if asked."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", choices=["workers", "tracking"], help="a part of the table")
    parser.add_argument("--tracked", type=int, default=300, help="points that are tracked (default: 300)")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each (default: %(default)s)")
    options = parser.parse_args()
    chosen = (
        ("workers", lambda: workers(options.repeat)),
        ("tracking", lambda: tracked(options.tracked, options.repeat)),
    )
    rows = [["work", "time", "processor time", "bar"]]
    for measured in chain.from_iterable(part() for name, part in chosen if options.only in (None, name)):
        rows.append(measured)
        say(" | ".join(measured))
    text = f"{table(rows)}\n\n{machine()}; medians of {options.repeat}."
    if options.save:
        save_section("Measuring sweeps" + (f": {options.only}" if options.only else ""), text)
    say(text)


def workers(repeat: int) -> Iterator[list[str]]:
    """Eight points of three seconds each, one after another and on two workers."""
    serial, parallel, read = [], [], []
    for _ in range(repeat):
        for workers, runs in ((0, serial), (2, parallel)):
            with tempfile.TemporaryDirectory() as folder:
                _write_inputs(Path(folder))
                (Path(folder) / "slow.py").write_text(SLOW.replace("SECONDS", str(SECONDS)))
                more = [
                    "plugins=[slow.py]",
                    "evaluator.name=bench_slow",
                    f"evaluator.workers={workers}",
                ]
                alphas = ",".join(f"{number / 10:g}" for number in range(1, 9))
                command = [*_inputs(), f"alpha={alphas}", *more, "output=none", "tracking=none", "-m"]
                runs.append(run([*command, "hydra.sweep.dir=swept"], Path(folder)))
                read.append(_times_read(Path(folder)))
    yield _row(f"8 points of {SECONDS} s, one after another", serial, f"inputs read {read[0]:.2f} times")
    ratio = seconds(parallel) / seconds(serial)
    bar = f"{judged(ratio <= 0.6)}: {ratio:.2f} of it, at most 0.6; inputs read {read[1]:.2f} times"
    yield _row("the same on two workers", parallel, bar)


def tracked(points: int, repeat: int) -> Iterator[list[str]]:
    """Points of the digits demo without tracking and with it."""
    alphas = ",".join(f"{number / points:g}" for number in range(1, points + 1))
    without, with_it = [], []
    for _ in range(repeat):
        for more, runs in ((["tracking=none"], without), ([], with_it)):
            with tempfile.TemporaryDirectory() as folder:
                command = ["recipe=ties", f"alpha={alphas}", "output=none", *more, "-m"]
                runs.append(run(command, Path(folder)))
    yield _row(f"{points} points of the digits demo, not tracked", without, "")
    before, after = (statistics.median(each.processor for each in runs) for runs in (without, with_it))
    cost = 100 * (after / before - 1)
    bar = f"{judged(cost < 15)}: {cost:.1f} % more processor time, less than 15 %"
    yield _row("the same, tracked", with_it, bar)


def _row(what: str, runs: list[Run], bar: str) -> list[str]:
    processor = statistics.median(each.processor for each in runs)
    return [what, f"{seconds(runs):.2f} s", f"{processor:.2f} s", bar]


def _write_inputs(folder: Path) -> None:
    """Two networks."""
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        layers = (torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
        save_file(torch.nn.Sequential(*layers).state_dict(), folder / f"{name}.safetensors")


def _inputs() -> list[str]:
    return ["recipe=weighted_sum", "models.base=a.safetensors", "models.experts=[b.safetensors]"]


def _times_read(folder: Path) -> float:
    """How often a sweep has read its inputs, by the bytes that its passes read."""
    with (folder / "swept/sweep.csv").open() as file:
        read = sum(float(row["io/bytes_read"] or 0) for row in csv.DictReader(file))
    stored = sum((folder / f"{name}.safetensors").stat().st_size for name in "ab")
    return read / stored


if __name__ == "__main__":
    main()
