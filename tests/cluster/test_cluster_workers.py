"""Tasks run on workers of each kind: they end in any order, and lost workers are replaced."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_tasks import describe, die_at_first, raise_what_cannot_be_pickled, say_and_die, sleep_and_note

from mecha_exp.cluster import LostWorker, ProcessWorkers, RayWorkers, SlurmWorkers, Workers, slurm
from mecha_exp.cluster.ray import first_line
from mecha_exp.cluster.task import Task
from mecha_exp.errors import ConfigError
from mecha_exp.system.cores import CORES, available_cores


@pytest.fixture(params=["ray", "processes", "rehearsal", "slurm"])
def workers(request, tmp_path, monkeypatch):
    """Two workers of a kind."""
    monkeypatch.chdir(tmp_path)
    kind = request.param
    if kind != "processes":
        pytest.importorskip("ray" if kind == "ray" else "submitit")
    if kind == "slurm":
        request.getfixturevalue("slurm")
    with {
        "ray": lambda: RayWorkers(2),
        "processes": lambda: ProcessWorkers(2),
        "rehearsal": lambda: SlurmWorkers(2, Path("jobs"), cluster="local"),
        "slurm": lambda: SlurmWorkers(2, Path("jobs")),
    }[kind]() as made:
        yield made


@pytest.mark.libraries
def test_workers_run_tasks_in_the_sender_s_surroundings_and_replace_lost_workers(workers: Workers, tmp_path):
    results = dict(workers.run(describe, [(number,) for number in range(5)]))

    assert str(results.pop(3)) == "three"
    assert {number: result[0] for number, result in results.items()} == {0: 0, 1: 1, 2: 4, 4: 16}
    assert {result[2:] for result in results.values()} == {(str(tmp_path), "1")}
    assert os.getpid() not in {result[1] for result in results.values()}

    replaced, gone, odd = str(tmp_path / "replaced"), str(tmp_path / "gone"), raise_what_cannot_be_pickled
    assert list(workers.run(die_at_first, [(1, replaced)])) == [(0, 1)]
    [(_, lost)] = workers.run(die_at_first, [(9, gone)], retries=0)
    assert isinstance(lost, LostWorker)
    assert str(next(workers.run(odd, [()]))[1]) == "RuntimeError: with a lock"


def test_a_process_that_is_killed_while_it_waits_costs_no_task_a_try():
    with ProcessWorkers(1) as workers:
        [(_, (_, process, *_))] = workers.run(describe, [(2,)], retries=0)
        os.kill(process, signal.SIGKILL)
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)

        [(_, (square, other, *_))] = workers.run(describe, [(4,)], retries=0)

    assert square == 16 and other != process


@pytest.mark.libraries
@pytest.mark.parametrize("cluster", ["local", "slurm"])
def test_jobs_that_a_killed_process_has_left_are_cancelled(cluster, tmp_path, monkeypatch, request):
    pytest.importorskip("submitit")
    if cluster == "slurm":
        request.getfixturevalue("slurm")
    monkeypatch.chdir(tmp_path)
    left = SlurmWorkers(1, Path("jobs"), cluster=cluster)
    left.start(sleep_and_note, [("process",)])
    while not Path("process").exists() or not Path("process").read_text():
        assert not list(left.ended(0.1))

    SlurmWorkers(1, Path("jobs"), cluster=cluster)

    [(_, result)] = left.ended(60)
    assert isinstance(result, LostWorker)
    if cluster == "slurm":  # whose processes are not children of this one
        with pytest.raises(ProcessLookupError):
            os.kill(int(Path("process").read_text()), 0)


@pytest.mark.libraries
def test_slurm_does_not_start_a_job_again(tmp_path, slurm):
    pytest.importorskip("submitit")
    more = {"slurm_additional_parameters": {"nice": 5}}
    with SlurmWorkers(1, tmp_path, parameters=more) as workers:
        workers.start(sleep_and_note, [(str(tmp_path / "process"),)])
        shown = subprocess.run(["scontrol", "show", "job"], capture_output=True, text=True).stdout

    assert "Requeue=0" in shown and "Nice=5" in shown


@pytest.mark.skipif(sys.platform == "win32", reason="Slurm runs on Unix")
def test_jobs_are_killed_where_slurm_does_not_say_which_run(tmp_path, monkeypatch):
    for name, code in {
        "squeue": "exit 1",
        "scancel": f'echo "$@" >> {shlex.quote(str(tmp_path / "log"))}',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(slurm, "_INTERRUPT_SECONDS", 0.0)
    monkeypatch.setattr(slurm, "_END_SECONDS", 0.0)

    slurm._end(["7_0", "7_1"])

    called = [line.removesuffix("7_0 7_1").strip() for line in (tmp_path / "log").read_text().splitlines()]
    assert called == ["--state=PENDING", "--signal=INT", "--signal=KILL", ""]


@pytest.mark.libraries
def test_a_cluster_of_ray_is_reached_through_its_client(tmp_path, monkeypatch, ray_cluster):
    pytest.importorskip("grpc")
    monkeypatch.chdir(tmp_path)

    with RayWorkers(2, address=ray_cluster["ray://"]) as workers:
        results = dict(workers.run(describe, [(number,) for number in range(5)]))
        replaced = list(workers.run(die_at_first, [(1, str(tmp_path / "replaced"))]))

    assert str(results.pop(3)) == "three"
    assert {number: result[0] for number, result in results.items()} == {0: 0, 1: 1, 2: 4, 4: 16}
    assert replaced == [(0, 1)]


def test_what_ray_says_is_cut_to_the_line_that_says_it():
    server = "Initialization failure from server:\nTraceback:\nRuntimeError: no room.\n"

    assert first_line(RuntimeError(server)) == "RuntimeError: no room."
    assert first_line(RuntimeError("no room.\nMore about it.")) == "no room."
    assert first_line(RuntimeError()) == "RuntimeError"


def test_a_library_that_is_not_installed_is_named_with_its_extra(tmp_path, monkeypatch):
    for name, make in {"ray": RayWorkers, "submitit": lambda: SlurmWorkers(1, tmp_path)}.items():
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(
            ConfigError, match=rf"needs {name}, which .* pip install 'mecha_exp\[launchers\]'"
        ):
            make()


def test_a_worker_that_does_not_see_the_folder_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path.copy())
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONPATH", CORES):
        monkeypatch.setenv(name, "1")
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    task = Task.of(describe, (1,), cores=1)
    monkeypatch.chdir(tmp_path)
    folder.rmdir()

    value, error = task()

    assert value is None
    assert f"does not see the folder {folder} (No such file or directory). Start the command in" in str(error)


def test_ctrl_c_reaches_the_sender_of_a_task_alone():
    with ProcessWorkers(1) as workers:
        [(_, group)] = workers.run(os.getpgid, [(0,)])

    assert group != os.getpgid(0)


def test_a_process_takes_one_task_after_the_other_until_its_sender_closes_it(tmp_path):
    with ProcessWorkers(1) as workers:
        processes = {result for _, result in workers.run(os.getpid, [(), (), ()])}

    (process,) = processes
    assert process != os.getpid()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_an_idle_process_that_was_killed_costs_a_try(tmp_path):
    with ProcessWorkers(1) as workers:
        [(_, first)] = workers.run(os.getpid, [()])
        os.kill(first, signal.SIGKILL)

        [(_, second)] = workers.run(os.getpid, [()])

    assert second != first


def test_a_lost_process_names_the_log_of_what_it_said(tmp_path):
    log = tmp_path / "jobs" / "workers.log"
    with ProcessWorkers(1, log=log) as workers:
        [(_, lost)] = workers.run(say_and_die, [("the last words",)], retries=0)

    assert f"ended with status 3 and no result. Its log: {log}" in str(lost)
    assert log.read_text() == "the last words"


def test_a_worker_s_cores_are_limited(monkeypatch):
    monkeypatch.setenv(CORES, "1")

    assert available_cores() == 1
