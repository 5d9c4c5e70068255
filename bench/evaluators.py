"""Times what workers of an evaluator cost for each point beside the evaluator: processes, and actors of Ray.

    python -m bench.evaluators --megabytes 1 100 --repeats 5

The evaluator sleeps for 0.3 s and reads each tensor once. Two workers measure models from memory, and have
started before. Kinds of workers take turns, so that what else the machine does meets all of them. A point
costs the time that a worker had for it, less what the evaluator says that it took; medians of the turns.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from bench.report import table
from mecha_exp.cluster import RayWorkers
from mecha_exp.cluster.actors import Actor
from mecha_exp.evaluation import Scoring, read_scoring
from mecha_exp.evaluation.isolation.pool import pools_on
from mecha_exp.plugins import load_plugins

WORKERS = 2
EVALUATOR = """
import time
from mecha_exp import evaluator

@evaluator("bench_slow", metric="seconds")
def slow(state_dict, *, seconds: float = 0.3):
    began = time.perf_counter()
    time.sleep(seconds)
    total = sum(float(tensor.sum()) for tensor in state_dict.values())
    return {"seconds": time.perf_counter() - began, "total": total}
"""


def cost(scoring: Scoring, model: dict[str, torch.Tensor], points: int) -> float:
    """The milliseconds of a worker for a point, beside its evaluator."""
    evaluation = scoring.evaluations[0]
    begin = time.perf_counter()
    started = [scoring.start(evaluation, model) for _ in range(points)]
    measured = sum(future.result().metrics["seconds"] for future in started)
    return 1000 * ((time.perf_counter() - begin) * WORKERS - measured) / points


def turns(plugin: str, megabytes: int, points: int, repeats: int) -> dict[str, float]:
    """The cost of a point by each kind of workers."""
    model = {f"layers.{n}": torch.randn(megabytes * 250_000 // 10) for n in range(10)}
    settings = {"name": "bench_slow", "workers": WORKERS}
    scoring = read_scoring(settings, {"layers.0": (1,)}, [plugin])
    costs: dict[str, list[float]] = {"processes": [], "actors": []}
    places: dict[str, Callable[[], Actor] | None] = {"processes": None, "actors": partial(Actor, 1)}
    for _ in range(repeats):
        for kind, make in places.items():
            with pools_on(make):
                cost(scoring, model, WORKERS)  # starts them
                costs[kind].append(cost(scoring, model, points))
    return {kind: statistics.median(of_kind) for kind, of_kind in costs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", nargs="+", type=int, default=[1, 100])
    parser.add_argument("--points", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    lines = [["model", "processes, ms a point", "actors, ms a point"]]
    with tempfile.TemporaryDirectory() as folder, RayWorkers(WORKERS):
        plugin = Path(folder, "bench_slow.py")
        plugin.write_text(EVALUATOR)
        load_plugins([str(plugin)])
        for megabytes in options.megabytes:
            costs = turns(str(plugin), megabytes, options.points, options.repeats)
            lines.append([f"{megabytes} MB", *(f"{costs[kind]:.1f}" for kind in ("processes", "actors"))])
    sys.stdout.write(table(lines) + "\n")


if __name__ == "__main__":
    main()
