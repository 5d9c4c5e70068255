"""One merge over many machines: what each node does, by simulation, and how well a formula tells its time.

    python -m bench.cluster                               Llama 3.1 405B in bf16, three experts, 1 to 64 nodes
    python -m bench.cluster --link 12.5e9 --save          100 Gbit/s for each node; into bench/RESULTS.md
    python -m bench.cluster --on processes ray slurm      the tasks that are measured run on these

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.headers import LLAMAS, SHARD, Llama, Mixture, write_headers, write_tensors
from bench.remote import slow_server
from bench.report import as_for_users, machine, make_parser, publish, say, table
from mecha_exp import EngineOptions, plan
from mecha_exp.across.shares import Share, SharedMerge, distribute, files_of
from mecha_exp.across.task import Made, Task, make
from mecha_exp.across.workers import workers_for
from mecha_exp.checkpoint import Destination, stored_bytes
from mecha_exp.cluster import ProcessWorkers, Workers
from mecha_exp.engine import Job
from mecha_exp.engine.options import PROCESSES
from mecha_exp.graph.nodes import Node, call
from mecha_exp.recipe.text import serialize

NODES = (1, 4, 16, 64)
SMALL = Llama(layers=16, width=1024, inner=4096, heads=16, groups=4, words=8_000)
TINY = Llama(layers=16, width=16, inner=16, heads=4, groups=4, words=64)
SHARDS = 20_000_000
SLOW = 80e6
MOST_SECONDS, MOST_MEMORY = 3.0, 300_000_000
"""The bars of the planner."""


@dataclass(frozen=True)
class Rates:
    """Bytes a second, read and written together.

    Attributes:
        link: of each node.
        store: of the shared store, over all nodes.
        engine: of the arithmetic of one node.
    """

    link: float
    store: float
    engine: float

    def seconds(self, shares: Sequence[Share]) -> dict[str, float]:
        """How long a merge in shares takes by each of the rates; it takes the longest."""
        moved = [share.read + share.written for share in shares]
        return {
            "link": max(moved) / self.link,
            "store": sum(moved) / self.store,
            "arithmetic": max(moved) / self.engine,
        }


def main() -> None:
    """Measure, simulate, print, and save if asked."""
    options = _options()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        planner = table([["plan", "keys", "processor time", "peak memory", "bar"], *planned(Path(folder))])
        say(planner + "\n")
        checked, engine = check(Path(folder), options.repeats, options.on)
        say(checked + "\n")
        rates = Rates(options.link, options.store, engine * options.cores)
        simulated = table([_HEAD, *simulate(Path(folder), rates, options.cores)])
    text = _TEXT.format(
        planner=planner,
        checked=checked,
        simulated=simulated,
        link=options.link / 1e9,
        store=options.store / 1e9,
        cores=options.cores,
        engine=engine / 1e9,
        slow=SLOW / 1e6,
        small=sum(stored_bytes(*tensor) for tensor in SMALL.layout.values()) / 1e9,
        load=f"The load of the machine was {os.getloadavg()[0]:.0f}, with {os.cpu_count()} cores.",
        machine=machine(),
    )
    publish("One merge over many machines", text, save=options.save)


_HEAD = ["merge", "nodes", "files", "read", "written", "even", "buffers", "time", "bound by"]
_CHECKED_HEAD = ["bound by", "on", "tasks", "busiest moves", "by the formula", "measured", "memory of a task"]
_TEXT = """\
`python -m bench.cluster`. By simulation: Llama 3.1 405B in bf16 (811.7 GB, 1,137 keys), in files of 5 GB.
Each node has a link of {link:g} GB/s, which carries what it reads and writes, and {cores} cores that do
{engine:.2f} GB/s each, as one core of this machine was measured; the shared store gives {store:g} GB/s to all
nodes together. Files and bytes are those of the busiest node, `even` is the mean of all nodes by it, and a
process takes 250 MB beside its buffers.

{simulated}

The same formula beside tasks on this machine, of one thread each: a mean of three models of
{small:.2f} GB in files of 20 MB. Where the arithmetic binds, the rate is that of the one task, and the time
is processor time of the busiest task, which other work on the machine changes little. Where a store binds, a
server in another process sends {slow:g} MB/s to all tasks together, and the time is wall time of the slowest
task after its start. {load}

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
    limits = rates.seconds(shares)
    return [
        str(len(busiest.files)),
        f"{busiest.read / 1e9:,.0f} GB",
        f"{busiest.written / 1e9:,.0f} GB",
        f"{sum(moved) / len(moved) / max(moved):.0%}",
        f"{memory / 1e6:,.0f} MB",
        f"{max(limits.values()) / 60:,.1f} min",
        max(limits, key=limits.__getitem__),
    ]


def check(folder: Path, repeats: int, clusters: Sequence[str]) -> tuple[str, float]:
    """The formula beside 1, 2 and 4 tasks on this machine: a table, and the bytes a second of a core.

    What a processor does is compared in processor time, which other work on the machine does not change; what
    a store gives in wall time, with a store so slow that a processor hardly counts.
    """
    models = [write_tensors(folder / f"small-{name}", SMALL, seed) for seed, name in enumerate("abc")]
    tiny = [write_tensors(folder / f"tiny-{name}", TINY, seed) for seed, name in enumerate("abc")]
    fixed = statistics.median(
        task.processor for _ in range(repeats) for task in _tasks(folder, tiny, PROCESSES, 1, 4_000)
    )
    kinds = [(cluster, count) for cluster in clusters for count in (1, 2, 4)]
    runs = {kind: [_tasks(folder, models, *kind) for _ in range(repeats)] for kind in kinds}
    (alone,) = min(runs[kinds[0]], key=lambda tasks: tasks[0].processor)
    engine = (alone.read + alone.written) / (alone.processor - fixed)
    rows = [_CHECKED_HEAD]
    for kind, tasks in runs.items():
        busiest = max(task.read + task.written for task in tasks[0])
        seconds = [max(task.processor for task in run) for run in tasks]
        rows.append(_checked("arithmetic", kind, busiest, fixed + busiest / engine, seconds, tasks[0]))
    with slow_server(folder, SLOW, 0.0) as url:
        addresses = [f"{url}/{path.name}/model.safetensors" for path in models]
        for kind in kinds:
            tasks = _tasks(folder, addresses, *kind)
            busiest, all_read = max(task.read + task.written for task in tasks), sum(t.read for t in tasks)
            seconds = [max(task.seconds for task in tasks)]
            rows.append(_checked("store", kind, busiest, all_read / SLOW, seconds, tasks))
    return table(rows), engine


def _checked(
    bound: str,
    kind: tuple[str, int],
    busiest: int,
    formula: float,
    measured: Sequence[float],
    tasks: Sequence[Made],
) -> list[str]:
    median = statistics.median(measured)
    spread = f"{median:.2f} s ({min(measured):.2f} to {max(measured):.2f})"
    peak = f"{max(task.peak for task in tasks) / 1e6:.0f} MB"
    times = f"{spread}, {median / formula:.2f} times"
    return [bound, kind[0], str(kind[1]), f"{busiest / 1e9:.2f} GB", f"{formula:.2f} s", times, peak]


def _tasks(
    folder: Path, models: Sequence[Path | str], cluster: str, count: int, shard_size: int = SHARDS
) -> list[Made]:
    """What each task of a merge does, all at a time, each with one thread."""
    job = Job(_mean(models), folder / "merged", shard_size=shard_size)
    with plan([job], EngineOptions(workers=1, across=count, cluster=cluster)) as made:
        whole = SharedMerge.of(made, count)
        arguments = [(Task.of(whole, share.number, ()),) for share in whole.shares]
        with _workers(made.options, count, folder / "jobs") as workers:
            tasks = [result for _, result in workers.run(make, arguments)]
    shutil.rmtree(whole.staged)
    for task in tasks:
        if isinstance(task, Exception):
            raise task
    return tasks


def _workers(options: EngineOptions, count: int, folder: Path) -> Workers:
    """As many workers as there are tasks, also where this machine has fewer cores."""
    return ProcessWorkers(count) if options.cluster == PROCESSES else workers_for(options, count, folder)


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
    parser = make_parser(__doc__)
    parser.add_argument("--link", type=float, default=3.125e9, help="bytes a second of a node (25 Gbit/s)")
    parser.add_argument("--store", type=float, default=40e9, help="bytes a second of the shared store")
    parser.add_argument("--cores", type=int, default=16, help="of each node")
    parser.add_argument("--repeats", type=int, default=5, help="of what is measured")
    clusters = "processes, ray or slurm (by SLURM_CONF): where tasks are measured"
    parser.add_argument("--on", nargs="+", default=[PROCESSES], help=clusters)
    parser.add_argument("--folder", type=Path, help="for the small models (default: that of the system)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
