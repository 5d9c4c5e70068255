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


def started(folder: Path, *words: str) -> subprocess.Popen:
    """A command in a process of its own, whose words go into the file `output`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)])}
    with (folder / "output").open("w") as output:
        command = [sys.executable, "-m", "mecha_exp", *words]
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)


def await_records(folder: Path, head: subprocess.Popen, count: int = 2) -> None:
    """Wait until so many points have run."""
    deadline = time.monotonic() + 120
    while len(list((folder / "sweep").glob("*/run.json"))) < count:
        assert head.poll() is None and time.monotonic() < deadline, (folder / "output").read_text()
        time.sleep(0.05)


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
    words = (*SWEEP, *launcher, "evaluator.seconds=0.5", "tracking=none")
    head = started(folder, *words)
    await_records(folder, head)
    os.kill(head.pid, signal.SIGKILL)
    head.wait()

    again = started(folder, *words)

    assert again.wait(timeout=300) == 0, (folder / "output").read_text()
    assert [r["status"] for r in records(folder)] == ["FINISHED"] * POINTS
    assert_measured_once(folder)


def test_a_node_of_a_ray_cluster_that_is_lost_is_done_without(folder):
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    (folder / "noted.py").write_text(EVALUATOR)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        lost = cluster.add_node(num_cpus=1)
        address = f"hydra.launcher.address={cluster.address}"
        head = started(
            folder, *SWEEP, "hydra/launcher=ray", address, "evaluator.seconds=0.5", "tracking=none"
        )
        await_records(folder, head)
        cluster.remove_node(lost, allow_graceful=False)

        assert head.wait(timeout=300) == 0, (folder / "output").read_text()
        assert [r["status"] for r in records(folder)] == ["FINISHED"] * POINTS
    finally:
        cluster.shutdown()


def test_the_batches_of_a_search_are_shares(app, folder, no_figures):
    pytest.importorskip("ray")
    (folder / "noted.py").write_text(EVALUATOR)
    words = ("recipe=weighted_sum", "alpha=interval(0,1)", "sweep=search", "sweep.trials=6", "sweep.batch=3")
    more = ("output=none", "plugins=[noted.py]", "evaluator.name=noted", "hydra/launcher=ray")

    outcome = app(*words, *more, "hydra.launcher.workers=2", "hydra.sweep.dir=sweep")

    assert outcome.status == 0, outcome.err
    assert len(list((folder / "sweep").glob("*/run.json"))) == 6
