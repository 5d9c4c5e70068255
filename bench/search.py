"""Trials a second of a search, beside one merge, one file and one evaluation for each trial.

    python -m bench.search --trials 200 --save

Both make the same merges of the bundled demo and measure them on the same images. The search runs as a user
runs it, from the command to the report. The other way is a loop in one process that has imported everything:
it asks the same sampler for each trial, keeps no record, and draws nothing.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import optuna
from optuna.distributions import FloatDistribution
from safetensors.torch import load_file

import mecha_exp
from bench.report import machine, make_parser, publish, table
from mecha_exp.evaluators.digits import digits

REPOSITORY = Path(__file__).parents[1]
HEAD = ["way", "trials", "seconds", "CPU seconds", "trials a second"]
SPACE = ("recipe=ties", "alpha=interval(0,1.5)", "k=tag(log,interval(0.01,1))")
_DISTRIBUTIONS = {"alpha": FloatDistribution(0, 1.5), "k": FloatDistribution(0.01, 1, log=True)}
QUIET = ("output=none", "tracking=none", "hydra.sweep.dir=s")


def search(folder: Path, trials: int, batch: str) -> list[tuple[str, float, float | None]]:
    """Search in a folder, then once more; returns wall and CPU seconds of both, and of the trials alone."""
    words = ["sweep=search", f"sweep.trials={trials}", f"sweep.batch={batch}", *SPACE, *QUIET]
    command = [sys.executable, "-m", "mecha_exp", *words]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    taken = []
    for name in ("search, from command to report", "the same command again"):
        before, began = cpu_of_children(), time.monotonic()
        subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
        taken.append((name, time.monotonic() - began, cpu_of_children() - before))
    return [*taken, ("search, its trials alone", seconds_of_trials(folder / "s"), None)]


def seconds_of_trials(sweep: Path) -> float:
    """The wall seconds from the start of a search's first trial to the end of its last one."""
    records = [json.loads(path.read_text()) for path in sweep.glob("*/run.json")]
    return (max(r["ended"] for r in records) - min(r["started"] for r in records)) / 1000


def one_by_one(folder: Path) -> tuple[str, float, float]:
    """Make and measure the merges of a search one after another; returns wall and CPU seconds."""
    texts = [path.read_text() for path in sorted((folder / "s").glob("*/recipe.mecha"))]
    recipes = [mecha_exp.deserialize(text) for text in texts]
    file = folder / "merged.safetensors"
    _once(recipes[0], file)  # compiles its loop
    optuna.logging.disable_default_handler()
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0), direction="maximize")
    began, cpu = time.monotonic(), time.process_time()
    for recipe in recipes:
        trial = study.ask(_DISTRIBUTIONS)
        study.tell(trial, _once(recipe, file))
    title = "one draw, one merge, one file, one evaluation each"
    return title, time.monotonic() - began, time.process_time() - cpu


def _once(recipe: mecha_exp.Node, file: Path) -> float:
    mecha_exp.merge(recipe, file)
    measured = digits(load_file(file), split="validation")
    return float(np.mean([outcomes.mean() for outcomes in measured.values.values()]))


def cpu_of_children() -> float:
    """The processor seconds of the child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--batch", default="auto")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        taken = [*search(Path(name), options.trials, options.batch), one_by_one(Path(name))]
    rows = [
        [
            way,
            str(options.trials),
            f"{wall:.1f}",
            "-" if cpu is None else f"{cpu:.1f}",
            f"{options.trials / wall:.1f}",
        ]
        for way, wall, cpu in taken
    ]
    text = f"{table([HEAD, *rows])}\n\n{machine()}; TIES on the digits of the package, by alpha and k."
    publish("Searching", text, save=options.save)


if __name__ == "__main__":
    main()
