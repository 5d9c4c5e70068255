"""Times a sweep of 96 points in one pass and in shares, and counts the bytes of models that it reads.

    python -m bench.shares                         onepass, processes and ray, three turns
    python -m bench.shares --repeats 1 onepass slurm
    python -m bench.shares --measuring 0.5         with an evaluator that takes half a second a point

Each run is a command in a fresh folder with a fresh store, untracked. Launchers take turns, so that what else
the machine does meets all of them. Seconds are medians; the ratio is the median of those of each turn.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from bench.report import seconds, table

ALPHAS = ",".join(f"{0.05 * n:.2f}" for n in range(1, 25))
SWEEP = ("recipe=ties", f"alpha={ALPHAS}", "k=0.1,0.2,0.3,0.4", "output=none", "tracking=none", "-m")
EVALUATOR = '''
import time

from mecha_exp import evaluator


@evaluator("patient", metric="size")
def patient(state_dict, *, seconds: float):
    """The norm of the model, after so many seconds."""
    time.sleep(seconds)
    return {"size": sum(float(tensor.double().norm()) for tensor in state_dict.values())}
'''
REPOSITORY = Path(__file__).parents[1]
LAUNCHERS = ("onepass", "processes", "ray")


def run(launcher: str, workers: int, measuring: float | None) -> tuple[float, float]:
    """Run the sweep; returns its seconds and the megabytes of models that its passes read."""
    words = [f"hydra/launcher={launcher}", "hydra.sweep.dir=sweep"]
    words += [f"hydra.launcher.workers={workers}"] if launcher != "onepass" else []
    with tempfile.TemporaryDirectory() as folder:
        if measuring is not None:
            Path(folder, "patient.py").write_text(EVALUATOR)
            words += ["plugins=[patient.py]", "evaluator.name=patient", f"evaluator.seconds={measuring}"]
        command = [sys.executable, "-m", "mecha_exp", *SWEEP, *words]
        took = seconds(command, Path(folder), {"PYTHONPATH": str(REPOSITORY)})
        records = [json.loads(path.read_text()) for path in Path(folder, "sweep").glob("*/run.json")]
    return took, sum(record["metrics"]["io/bytes_read"] for record in records) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = "the first one is what the others are compared with"
    parser.add_argument("launchers", nargs="*", default=LAUNCHERS, help=which)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--measuring", type=float, help="seconds of a point (default: the demo's evaluator)")
    options = parser.parse_args()
    runs = [
        {name: run(name, options.workers, options.measuring) for name in options.launchers}
        for _ in range(options.repeats)
    ]
    first = options.launchers[0]
    lines = [["launcher", "seconds", f"times {first}", "megabytes read"]]
    for name in options.launchers:
        took = statistics.median(one[name][0] for one in runs)
        ratio = statistics.median(one[name][0] / one[first][0] for one in runs)
        lines.append([f"`{name}`", f"{took:.1f}", f"{ratio:.2f}", f"{runs[0][name][1]:.1f}"])
    sys.stdout.write(table(lines) + "\n")


if __name__ == "__main__":
    main()
