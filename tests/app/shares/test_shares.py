"""Sweeps in shares end complete, with nothing measured twice, whichever process is killed in the middle."""

import os
import signal

import pytest
from noted_sweep import EVALUATOR, POINTS, SWEEP, assert_measured_once, await_records, records, started
from sweep_folders import LIBRARIES, result

from mecha_exp.app.launchers import onepass as launcher_module
from mecha_exp.cluster.shares import Handout

pytestmark = pytest.mark.libraries


@pytest.fixture(params=LIBRARIES)
def launcher(request, folder) -> tuple[str, ...]:
    """Words for a launcher on this machine: two processes, or four workers of Slurm or Ray."""
    pytest.importorskip(LIBRARIES[request.param])
    if request.param != "processes":
        request.getfixturevalue("slurm" if request.param == "slurm" else "fresh_ray")
    (folder / "noted.py").write_text(EVALUATOR)
    workers = 2 if request.param == "processes" else 4
    return f"hydra/launcher={request.param}", f"hydra.launcher.workers={workers}"


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
    assert_measured_once(folder, killed=4)


def test_a_large_sweep_in_shares_goes_on_with_what_is_missing(app, folder, monkeypatch):
    places = {"MANY_POINTS": 4, "POINTS_AT_ONCE": 3, "OnePass.first_points": 2}
    for name, count in places.items():
        monkeypatch.setattr(f"mecha_exp.app.launchers.onepass.{name}", count)
    command = ("alpha=0.1,0.2,0.3,0.4,0.5,0.6", "output=none", "evaluator=none", "tracking=none", "-m")
    app(*command, "hydra.sweep.dir=sweep")
    for number in (3, 5):
        (folder / "sweep" / str(number) / "run.json").unlink()
    steps: list[object] = []
    prepare, give = launcher_module._prepare, Handout.give

    def prepare_noted(config):
        steps.append(config.config.hydra.job.num)
        return prepare(config)

    def give_noted(handout, shares):
        steps.append(("given", sorted(number for share in shares for number in share)))
        give(handout, shares)

    monkeypatch.setattr(launcher_module, "_prepare", prepare_noted)
    monkeypatch.setattr(Handout, "give", give_noted)
    outcome = app(*command, "hydra.sweep.dir=sweep", "hydra/launcher=processes", "rerun=always")

    assert outcome.status == 0
    assert steps == [3, 5, ("given", [3, 5]), 0, 1, 2, ("given", [0, 1, 2]), 4, ("given", [4])]
    assert len([*(folder / "sweep").glob("*/run.json")]) == 6


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


@pytest.mark.parametrize("kind", ["auto", "host:port", "ray://"])
def test_a_head_that_is_killed_while_it_uses_a_ray_cluster_goes_on_there(
    kind, folder, monkeypatch, ray_cluster
):
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster["host:port"])
    (folder / "noted.py").write_text(EVALUATOR)
    address = f"hydra.launcher.address={ray_cluster[kind]}"
    words = (*SWEEP, "hydra/launcher=ray", address, "evaluator.seconds=0.5", "tracking=none")
    head = started(folder, *words)
    await_records(folder, head)
    os.kill(head.pid, signal.SIGKILL)
    head.wait()

    again = started(folder, *words)

    assert again.wait(timeout=300) == 0, (folder / "output").read_text()
    assert [r["status"] for r in records(folder)] == ["FINISHED"] * POINTS
    assert_measured_once(folder, killed=2)
    assert not (folder / "sweep" / ".shares").exists()


def test_the_table_of_a_sweep_in_shares_is_shown_while_it_runs(launcher, app, folder):
    words = (*SWEEP, *launcher, "evaluator.seconds=1", "tracking=none")
    head = started(folder, *words)
    await_records(folder, head, 3)

    while_running = app("table", "sweep")
    was_running = head.poll() is None
    assert head.wait(timeout=300) == 0, (folder / "output").read_text()
    complete = app("table", "sweep")

    def rows(outcome) -> dict[str, str]:
        lines = (line.split() for line in outcome.out.splitlines() if line.startswith(" 0."))
        return {alpha: spread for alpha, spread, *_ in lines}

    assert was_running
    assert (while_running.status, complete.status) == (0, 0)
    assert 3 <= len(rows(while_running)) < len(rows(complete)) == POINTS
    assert rows(while_running).items() < rows(complete).items()


def test_the_batches_of_a_search_are_shares(app, folder, fresh_ray):
    (folder / "noted.py").write_text(EVALUATOR)
    words = ("recipe=weighted_sum", "alpha=interval(0,1)", "sweep=search", "sweep.trials=6", "sweep.batch=3")
    more = ("output=none", "plugins=[noted.py]", "evaluator.name=noted", "hydra/launcher=ray")

    outcome = app(*words, *more, "hydra.launcher.workers=2", "hydra.sweep.dir=sweep")

    assert outcome.status == 0, outcome.err
    assert len(list((folder / "sweep").glob("*/run.json"))) == 6
