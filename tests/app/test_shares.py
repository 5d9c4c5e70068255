"""Sweeps in shares end complete, with nothing measured twice, whichever process is killed in the middle."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from test_launchers import LIBRARIES, result

REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.libraries

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


@pytest.fixture(params=LIBRARIES)
def launcher(request, folder, no_figures) -> tuple[str, ...]:
    """Words for a launcher of two workers on this machine."""
    pytest.importorskip(LIBRARIES[request.param])
    if request.param == "slurm":
        request.getfixturevalue("slurm")
    (folder / "noted.py").write_text(EVALUATOR)
    return f"hydra/launcher={request.param}", "hydra.launcher.workers=2"


def records(folder: Path, sweep: str = "sweep") -> list[dict]:
    return [json.loads((folder / sweep / str(n) / "run.json").read_text()) for n in range(POINTS)]


def assert_measured_once(folder: Path) -> None:
    measured = Counter((folder / "notes").read_text().split())
    assert {measured[repr(r["metrics"]["spread"])] for r in records(folder)} == {1}


def test_a_share_of_a_killed_worker_is_run_by_another(launcher, app, folder):
    alone = app(*SWEEP[:-1], "hydra.sweep.dir=alone", "store=alone-store")
    (folder / "notes").unlink()
    fatal = records(folder, "alone")[3]["metrics"]["spread"]

    outcome = app(*SWEEP, *launcher, f"evaluator.fatal={fatal!r}")

    assert (alone.status, outcome.status) == (0, 0)
    assert (folder / "died").exists()
    for ours, theirs in zip(records(folder, "alone"), records(folder), strict=True):
        assert {**result(ours), "evaluations": 0} == {**result(theirs), "evaluations": 0}
    assert_measured_once(folder)
    assert not (folder / "sweep" / ".shares").exists()


def test_the_same_command_goes_on_after_its_process_was_killed(launcher, folder):
    words = [*SWEEP, *launcher, "evaluator.seconds=0.5", "tracking=none"]
    command = [sys.executable, "-m", "mecha_exp", *words]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    head = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(list((folder / "sweep").glob("*/run.json"))) < 2:
        assert head.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(head.pid, signal.SIGKILL)
    head.wait()

    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    assert again.returncode == 0, again.stderr
    assert [r["status"] for r in records(folder)] == ["FINISHED"] * POINTS
    assert_measured_once(folder)
