"""A sweep whose measurements are noted, started in a process of its own, which tests kill."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

EVALUATOR = '''
import os, signal, time
from pathlib import Path
from mecha_exp import evaluator

@evaluator("noted", metric="spread", direction="minimize")
def noted(state_dict, *, seconds: float = 0.0, fatal: float = 0.0):
    """The spread of the first tensor, which is noted; near a fatal spread the first worker dies."""
    spread = float(next(iter(state_dict.values())).double().std())
    time.sleep(seconds)
    if abs(spread - fatal) < 1e-9 and not Path("died").exists():
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    with open("notes", "a") as file:
        file.write(f"{spread!r}\\n")
    return {"spread": spread}
'''

POINTS = 8
SWEEP = (
    "recipe=weighted_sum", "alpha=" + ",".join(f"0.{n}" for n in range(1, POINTS + 1)), "output=none", "-m",
    "plugins=[noted.py]", "evaluator.name=noted", "hydra.sweep.dir=sweep",
)  # fmt: skip


def records(folder: Path, sweep: str = "sweep") -> list[dict]:
    return [json.loads((folder / sweep / str(n) / "run.json").read_text()) for n in range(POINTS)]


def assert_measured_once(folder: Path, killed: int = 0) -> None:
    """Each point was measured once. A killed worker may have died before it stored its last number."""
    noted = Counter((folder / "notes").read_text().split())
    counts = [noted[repr(record["metrics"]["spread"])] for record in records(folder)]
    assert min(counts) == 1
    assert sum(counts) <= POINTS + killed


def started(folder: Path, *words: str) -> subprocess.Popen:
    """A command in a process of its own, whose words go into the file `output`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)])}
    with (folder / "output").open("w") as output:
        command = [sys.executable, "-m", "mecha_exp", *words]
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)


def await_records(folder: Path, head: subprocess.Popen, count: int = 2) -> None:
    """Wait until so many points have run."""
    deadline = time.monotonic() + 300
    while len(list((folder / "sweep").glob("*/run.json"))) < count:
        assert head.poll() is None and time.monotonic() < deadline, (folder / "output").read_text()
        time.sleep(0.05)
