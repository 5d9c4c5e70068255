"""Measuring sweeps: where the seconds of a hundred points go, what two workers gain and tracking costs.

    python -m bench.measuring --only parts --points 10     a quick look
    python -m bench.measuring --save                       the whole table, into bench/RESULTS.md

The parts are those of a sweep of `forward` over a small network, tracked, in this process; a part's time is
without that of parts within it. Workers measure points that take three seconds each. What tracking costs is
that of the bundled digits network. Runs that are compared are processes of their own and take turns.
"""

from __future__ import annotations

import csv
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from bench.report import machine, make_parser, save_section, say, table
from bench.sweeps import Run, judged, run, seconds

PLACES = {
    "building networks": ("evaluators.common.networks:_load", "evaluators.common.loading:Loader.load"),
    "swapping tensors": (
        "evaluators.common.networks:_Slot._put",
        "evaluators.common.networks:_Slot._release",
    ),
    "measuring": ("evaluation.scoring:measured_by",),
    "merging": ("app.batch:run_plan", "app.batch:plan"),
    "tracking": ("app.tracking:Tracker.flush", "app.sweep.summary:close_run", "tracking:Store.__init__"),
    "tables, figures, page": ("app.sweep.summary:write_all", "app.sweep.summary:concluded_results"),
}
"""The functions whose time is that of a part."""
NET = """
import torch

def make():
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
"""
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
    parser.add_argument("--only", choices=["parts", "workers", "tracking"], help="a part of the table")
    parser.add_argument("--points", type=int, default=100, help="of the parts (default: %(default)s)")
    parser.add_argument("--tracked", type=int, default=300, help="points that are tracked (default: 300)")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each (default: %(default)s)")
    options = parser.parse_args()
    chosen = (
        ("workers", lambda: workers(options.repeat)),
        ("tracking", lambda: tracked(options.tracked, options.repeat)),
        ("parts", lambda: parts(options.points)),  # the last: it changes functions of this process
    )
    rows = [["work", "time", "processor time", "bar"]]
    for measured in chain.from_iterable(part() for name, part in chosen if options.only in (None, name)):
        rows.append(measured)
        say(" | ".join(measured))
    text = f"{table(rows)}\n\n{machine()}; medians of {options.repeat}, the parts once."
    if options.save:
        save_section("Measuring sweeps" + (f": {options.only}" if options.only else ""), text)
    say(text)


class Clock:
    """Seconds by part, each without the parts within it."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = defaultdict(float)
        self.processor: dict[str, float] = defaultdict(float)
        self._running = ["the rest"]
        self._since = (time.perf_counter(), time.process_time())

    def turn(self) -> None:
        """Give the time since the last turn to the part that runs."""
        before, self._since = self._since, (time.perf_counter(), time.process_time())
        self.wall[self._running[-1]] += self._since[0] - before[0]
        self.processor[self._running[-1]] += self._since[1] - before[1]

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose time is given to a part."""

        @wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            self.turn()
            self._running.append(part)
            try:
                return function(*arguments, **named)
            finally:
                self.turn()
                self._running.pop()

        return call


def parts(points: int) -> Iterator[list[str]]:
    """The seconds of each part of a sweep that measures a network and is tracked."""
    from mecha_exp.cli import main as start

    clock = Clock()
    for part, places in PLACES.items():
        for place in places:
            module, _, path = place.partition(":")
            *owners, name = path.split(".")
            owner: Any = import_module(f"mecha_exp.{module}")
            for each in owners:
                owner = getattr(owner, each)
            setattr(owner, name, clock.timed(part, getattr(owner, name)))
    alphas = ",".join(f"{number / points:g}" for number in range(1, points + 1))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        _write_inputs(Path(folder))
        sys.argv = ["mecha_exp", *_inputs(), f"alpha={alphas}", *_forward(), "output=none", "-m"]
        clock.turn()
        clock.wall.clear()
        clock.processor.clear()
        status = start()
        clock.turn()
        os.chdir("/")
    if status:
        sys.exit("the sweep failed: see above.")
    total = (sum(clock.wall.values()), sum(clock.processor.values()))
    for part in (*PLACES, "the rest"):
        yield [f"{points} points: {part}", f"{clock.wall[part]:.2f} s", f"{clock.processor[part]:.2f} s", ""]
    yield [f"{points} points: all", f"{total[0]:.2f} s", f"{total[1]:.2f} s", ""]


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
    """Two networks, their factory and a batch."""
    (folder / "net.py").write_text(NET)
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        layers = (torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
        save_file(torch.nn.Sequential(*layers).state_dict(), folder / f"{name}.safetensors")
    np.savez(folder / "batch.npz", input=np.random.default_rng(0).normal(size=(512, 64)))


def _inputs() -> list[str]:
    return ["recipe=weighted_sum", "models.base=a.safetensors", "models.experts=[b.safetensors]"]


def _forward() -> list[str]:
    settings = ("data=batch.npz", "module=net.py:make", "device=cpu", "batch_size=64")
    return ["evaluator=forward", *(f"evaluator.{setting}" for setting in settings)]


def _times_read(folder: Path) -> float:
    """How often a sweep has read its inputs, by the bytes that its passes read."""
    with (folder / "swept/sweep.csv").open() as file:
        read = sum(float(row["io/bytes_read"] or 0) for row in csv.DictReader(file))
    stored = sum((folder / f"{name}.safetensors").stat().st_size for name in "ab")
    return read / stored


if __name__ == "__main__":
    main()
