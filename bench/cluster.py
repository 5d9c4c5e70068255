"""One merge over many machines: what each node does, by simulation, and how well a formula tells its time.

    python -m bench.cluster                         Llama 3.1 405B in bf16, three experts, 1 to 64 nodes
    python -m bench.cluster --link 12.5e9 --save    100 Gbit/s for each node; into bench/RESULTS.md

The simulation plans the merge from headers of the real shape and distributes its files as `engine.across`
does. A node takes the longest of three: its bytes by the rate of its link, all bytes by the rate of the
shared store, its bytes by the rate of the arithmetic. The same formula, with rates measured here, is compared
with two and four tasks on this machine that merge a small model. The planner is measured on headers, too.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.engine import say
from bench.headers import LLAMAS, SHARD, Llama, Mixture, write_headers, write_tensors
from bench.report import as_for_users, machine, save_section, table
from mecha_exp import EngineOptions, merge, plan
from mecha_exp.across.shares import Share, distribute, files_of
from mecha_exp.checkpoint import Destination, stored_bytes
from mecha_exp.engine import Job
from mecha_exp.graph.nodes import Node, call
from mecha_exp.recipe.text import serialize

NODES = (1, 4, 16, 64)
SMALL = Llama(layers=12, width=1024, inner=4096, heads=16, groups=4, words=32_000)
TINY = Llama(layers=12, width=64, inner=64, heads=4, groups=4, words=64)
SHARDS = 50_000_000
MOST_SECONDS, MOST_MEMORY = 3.0, 300_000_000
"""The bars of the planner."""


@dataclass(frozen=True)
class Rates:
    """Bytes a second, read and written together.

    Attributes:
        link: of each node.
        store: of the shared store, over all nodes.
        engine: of the arithmetic of one node.
        start: seconds that are no transfer: start of the processes, plan, commit.
    """

    link: float
    store: float
    engine: float
    start: float

    def seconds(self, shares: Sequence[Share], at_once: int | None = None) -> float:
        """The time of a merge in shares, so many of them at a time; None for all."""
        moved = [share.read + share.written for share in shares]
        step = at_once or len(moved)
        slowest = sum(max(moved[first : first + step]) for first in range(0, len(moved), step))
        return self.start + max(slowest / self.link, sum(moved) / self.store, slowest / self.engine)


def main() -> None:
    """Measure, simulate, print, and save if asked."""
    options = _options()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        planner = table([["plan", "keys", "processor time", "peak memory", "bar"], *planned(Path(folder))])
        say(planner + "\n")
        checked, engine, start = check(Path(folder), options.repeats)
        say(checked + "\n")
        rates = Rates(options.link, options.store, engine * options.cores, start)
        simulated = table([_HEAD, *simulate(Path(folder), rates, options.cores)])
    text = _TEXT.format(
        planner=planner,
        checked=checked,
        simulated=simulated,
        link=options.link / 1e9,
        store=options.store / 1e9,
        cores=options.cores,
        engine=engine / 1e9,
        start=start,
        small=sum(stored_bytes(*tensor) for tensor in SMALL.layout.values()) / 1e9,
        load=f"The load of the machine was {os.getloadavg()[0]:.0f}, with {os.cpu_count()} cores.",
        machine=machine(),
    )
    if options.save:
        save_section("One merge over many machines", text)
    say(text)


_HEAD = ["merge", "nodes", "files", "read", "written", "even", "buffers", "time", "bound by"]
_TEXT = """\
`python -m bench.cluster`. By simulation: Llama 3.1 405B in bf16 (811.7 GB, 1,137 keys), in files of 5 GB.
Each node has a link of {link:g} GB/s, which carries what it reads and writes, and {cores} cores that do
{engine:.2f} GB/s each, as one core of this machine was measured; the shared store gives {store:g} GB/s to all
nodes together. Files and bytes are those of the busiest node, `even` is the mean of all nodes by it, and a
process takes 250 MB beside its buffers.

{simulated}

The same formula beside tasks on this machine, each a process of one thread: a mean of three models of
{small:.2f} GB in files of 50 MB. The start ({start:.1f} s for one task: processes, plan, commit) is that of
models of 1 MB in as many tasks. {load}

{checked}

The verb `plan` on headers of the real shape, TIES of a base and three experts. Ten thousand keys are those of
26 of the 48 layers of Qwen3-30B-A3B.

{planner}

{machine}."""


def simulate(folder: Path, rates: Rates, cores: int) -> Iterator[list[str]]:
    """What the busiest node does, for each recipe and number of nodes."""
    paths = [str(write_headers(folder / f"405B-{name}", LLAMAS["405B"])) for name in ("base", *"abc")]
    for name, recipe in {"mean of 3": _mean(paths[1:]), "TIES of 3 and a base": _ties(paths)}.items():
        with plan([Job(recipe, {})], EngineOptions(workers=cores)) as made:
            files = files_of(made, Destination(Path("merged"), made.layouts[0], SHARD))
            memory = made.memory
        for nodes in NODES:
            shares = distribute(files, nodes)
            yield [name, str(nodes), *_row(shares, rates, memory)]


def _row(shares: Sequence[Share], rates: Rates, memory: int) -> list[str]:
    busiest = max(shares, key=lambda share: share.read + share.written)
    moved = [share.read + share.written for share in shares]
    limits = {
        "link": max(moved) / rates.link,
        "store": sum(moved) / rates.store,
        "arithmetic": max(moved) / rates.engine,
    }
    return [
        str(len(busiest.files)),
        f"{busiest.read / 1e9:,.0f} GB",
        f"{busiest.written / 1e9:,.0f} GB",
        f"{sum(moved) / len(moved) / max(moved):.0%}",
        f"{memory / 1e6:,.0f} MB",
        f"{rates.seconds(shares) / 60:,.1f} min",
        max(limits, key=limits.__getitem__),
    ]


def check(folder: Path, repeats: int) -> tuple[str, float, float]:
    """The formula beside 1, 2 and 4 tasks of one core: a table, the bytes a second of a core, the start."""
    models = [write_tensors(folder / f"small-{name}", SMALL, seed) for seed, name in enumerate("abc")]
    tiny = [write_tensors(folder / f"tiny-{name}", TINY, seed) for seed, name in enumerate("abc")]
    starts, times = {}, {}
    for tasks in (1, 2, 4):
        starts[tasks] = [_measured(folder, tiny, tasks, 20_000) for _ in range(repeats)]
        times[tasks] = [_measured(folder, models, tasks, SHARDS) for _ in range(repeats)]
    rows = [
        ["tasks", "at a time", "moved by the busiest", "by the formula", "measured", "measured by formula"]
    ]
    start = {tasks: statistics.median(seconds) for tasks, seconds in starts.items()}
    with plan([Job(_mean(models), {})]) as made:
        files = files_of(made, Destination(Path("merged"), made.layouts[0], SHARDS))
    whole = sum(file.read + file.written for file in files)
    engine = whole / (statistics.median(times[1]) - start[1])
    for tasks, seconds in times.items():
        shares, at_once = distribute(files, tasks), min(tasks, 2)
        formula = Rates(1e15, 1e15, engine, start[tasks]).seconds(shares, at_once)
        busiest = max(share.read + share.written for share in shares)
        median = statistics.median(seconds)
        spread = f"{median:.1f} s ({min(seconds):.1f} to {max(seconds):.1f})"
        word = "its rate is taken from here" if tasks == 1 else f"{median / formula:.2f}"
        rows.append([str(tasks), str(at_once), f"{busiest / 1e9:.2f} GB", f"{formula:.1f} s", spread, word])
    return table(rows), engine, start[1]


def _measured(folder: Path, models: Sequence[Path], tasks: int, shard_size: int) -> float:
    output = folder / "merged"
    options = EngineOptions(workers=1, across=tasks)
    started = time.perf_counter()
    merge(_mean(models), output, options, shard_size=shard_size, card=False)
    elapsed = time.perf_counter() - started
    shutil.rmtree(output)
    return elapsed


def planned(folder: Path) -> Iterator[list[str]]:
    """What the verb `plan` takes on headers of real shapes."""
    shapes = {
        "Llama 3.1 70B": LLAMAS["70B"],
        "Llama 3.1 405B": LLAMAS["405B"],
        "10,000 keys": Mixture(layers=26),
        "Qwen3-30B-A3B": Mixture(),
    }
    for name, shape in shapes.items():
        paths = [write_headers(folder / f"{name}-{number}", shape) for number in range(4)]
        recipe = folder / "recipe.mecha"
        recipe.write_text(serialize(_ties(paths)))
        _plan(recipe)  # which hashes and compiles what is kept
        seconds, memory = _plan(recipe)
        met = "met" if seconds < MOST_SECONDS and memory < MOST_MEMORY else "missed"
        yield [name, f"{len(shape.layout):,}", f"{seconds:.1f} s", f"{memory / 1e6:.0f} MB", met]


def _plan(recipe: Path) -> tuple[float, int]:
    """Processor seconds, and bytes of memory at most, of the verb in a process of its own."""
    code = (
        "import resource as r, subprocess as s, sys; s.run(sys.argv[1:], check=True, stdout=s.DEVNULL); "
        "used = r.getrusage(r.RUSAGE_CHILDREN); print(used.ru_utime + used.ru_stime, used.ru_maxrss)"
    )
    command = [sys.executable, "-c", code, sys.executable, "-m", "mecha_exp", "plan", str(recipe)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=as_for_users())
    seconds, memory = done.stdout.split()
    return float(seconds), int(memory) * 1024


def _mean(paths: Sequence[str | Path]) -> Node:
    return call("n_average", *map(str, paths))


def _ties(paths: Sequence[str | Path]) -> Node:
    return call("ties", *map(str, paths), density=0.2)


def _options() -> argparse.Namespace:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m bench.cluster", description=__doc__, formatter_class=layout)
    parser.add_argument("--link", type=float, default=3.125e9, help="bytes a second of a node (25 Gbit/s)")
    parser.add_argument("--store", type=float, default=40e9, help="bytes a second of the shared store")
    parser.add_argument("--cores", type=int, default=16, help="of each node")
    parser.add_argument("--repeats", type=int, default=5, help="of what is measured")
    parser.add_argument("--folder", type=Path, help="for the small models (default: that of the system)")
    parser.add_argument("--save", action="store_true", help="write the tables into bench/RESULTS.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
