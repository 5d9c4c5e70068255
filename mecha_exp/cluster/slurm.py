"""Workers as jobs: an array job of Slurm, or processes of this machine as a rehearsal of it, by submitit."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping
from math import inf
from pathlib import Path
from typing import Any

from mecha_exp.cluster.task import Outcome, environment_of, variables
from mecha_exp.cluster.workers import LostWorker, Workers, require
from mecha_exp.errors import ClusterError

LOCAL, SLURM = "local", "slurm"
_RUNNING = "RUNNING"
"""The state of a local job, as submitit calls it."""
_POLL_SECONDS = 0.1
_ASK_SECONDS = 2.0
"""How often Slurm is asked for its jobs."""
_GRACE_SECONDS = 3.0
"""How long the result of a job that has ended may take to be seen through a shared folder."""
_COMMAND_SECONDS = 60.0
"""How long one of Slurm's commands may take."""
_INTERRUPT_SECONDS, _END_SECONDS = 5.0, 30.0
"""How long jobs that are interrupted, and then killed, may take to end."""


class SlurmWorkers(Workers):
    """Runs each task as a job; tasks that are started together are one array job.

    A job of Slurm has ended if its result is in the folder. One that `squeue` does not list any more and that
    left no result was lost. `sacct`, which submitit asks, needs accounting that not every cluster has.
    submitit 1.5, https://github.com/facebookincubator/submitit.

    Args:
        count: how many tasks run at a time.
        folder: for scripts, results and logs, shared by all machines. Jobs in it that a killed process has
            left are cancelled first.
        cores, gpus: of each task.
        cluster: `slurm`, or `local` for processes of this machine.
        parameters: more of submitit's for Slurm, such as `{"slurm_partition": "gpu", "timeout_min": 60}`.

    Raises:
        ConfigError: submitit is not installed.
        ClusterError: there is no Slurm on this machine, or submitit does not know a parameter.
    """

    def __init__(
        self,
        count: int,
        folder: Path,
        cores: int = 1,
        gpus: int = 0,
        cluster: str = SLURM,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(count, cores)
        submitit = require("submitit", "running tasks as jobs")
        if cluster == SLURM and shutil.which("sbatch") is None:
            raise ClusterError(
                "Slurm's sbatch is not on the path of this machine. Start the command on a login node of the "
                "cluster, or rehearse it here with processes of this machine."
            )
        self._folder, self._is_local = folder.absolute(), cluster == LOCAL
        self._cancel_left()
        self._jobs: dict[int, Any] = {}
        self._gone_since: dict[int, float] = {}
        self._asked_at = float("-inf")
        self._executor = submitit.AutoExecutor(self._folder, cluster=cluster)
        try:
            self._executor.update_parameters(**self._settings(gpus, dict(parameters or {})))
        except (NameError, TypeError, ValueError) as error:
            raise ClusterError(f"submitit does not take these parameters: {error}") from None

    def _settings(self, gpus: int, more: dict[str, Any]) -> dict[str, Any]:
        settings: dict[str, Any] = {"timeout_min": 24 * 60, "name": "mecha_exp", "cpus_per_task": self.cores}
        if gpus:
            settings["gpus_per_node"] = gpus
        if not self._is_local:
            settings["slurm_array_parallelism"] = self.count
            # A job that Slurm starts again would meet what its first run has taken; lost ones are made again.
            more["slurm_additional_parameters"] = {
                "no-requeue": True,
                **(more.get("slurm_additional_parameters") or {}),
            }
        return settings | more

    def close(self) -> None:
        """Cancel the jobs that still run."""
        jobs, self._jobs, self._waiting = list(self._jobs.values()), {}, {}
        self._cancel([job.job_id for job in jobs])
        until = time.monotonic() + _END_SECONDS  # they were killed
        while self._is_local and any(job.state == _RUNNING for job in jobs) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)

    def _fill(self) -> None:
        """Submit what waits: all of it to Slurm, which has a queue, or as many as have a core here."""
        free = self.count - len(self._jobs) if self._is_local else len(self._waiting)
        taken = dict(self._take(free))
        if not taken:
            return
        try:
            with variables(environment_of(self.cores)):  # which jobs inherit
                jobs = self._executor.submit_array(list(taken.values()))
        except Exception as error:  # submitit has no common class for what Slurm refuses
            raise ClusterError(f"the jobs could not be submitted: {error}") from None
        self._jobs |= dict(zip(taken, jobs, strict=True))
        self._asked_at = time.monotonic()

    def _ended(self, seconds: float) -> Iterator[tuple[int, Outcome | LostWorker]]:
        until = time.monotonic() + seconds
        while self._jobs:
            there = {number: outcome for number in self._jobs if (outcome := self._outcome(number))}
            for number in there:
                del self._jobs[number]
            self._fill()
            yield from there.items()
            if there or time.monotonic() >= until:
                return
            self._note_gone()
            time.sleep(_POLL_SECONDS)

    def _outcome(self, number: int) -> Outcome | LostWorker | None:
        """The outcome of a job; None while it waits or runs."""
        job = self._jobs[number]
        if self._is_local and job.state == _RUNNING:
            return None
        try:
            status, value = pickle.loads(job.paths.result_pickle.read_bytes())
        except (FileNotFoundError, EOFError):
            if not self._is_local and time.monotonic() < self._gone_since.get(number, inf) + _GRACE_SECONDS:
                return None
            return LostWorker(f"job {job.job_id} ended without a result. Its log: {job.paths.stderr}")
        return value if status == "success" else LostWorker(f"job {job.job_id} failed: {value}")

    def _note_gone(self) -> None:
        """Note which jobs of Slurm have ended, whether they left a result or not."""
        if self._is_local or time.monotonic() - self._asked_at < _ASK_SECONDS:
            return
        self._asked_at = time.monotonic()
        if (queued := _queued()) is not None:  # else Slurm does not answer at the moment
            gone = [number for number, job in self._jobs.items() if job.job_id not in queued]
            self._gone_since = {n: self._gone_since.get(n, self._asked_at) for n in gone}

    def _cancel_left(self) -> None:
        """Cancel the jobs in the folder that a killed process has left without a result."""
        submitted = {path.name.split("_submitted")[0] for path in self._folder.glob("*_submitted.pkl")}
        ended = {path.name.removesuffix("_0_result.pkl") for path in self._folder.glob("*_0_result.pkl")}
        self._cancel(sorted(submitted - ended))

    def _cancel(self, jobs: list[str]) -> None:
        if jobs and not self._is_local:
            _end(jobs)
        for process in _processes_of(jobs, self._folder) if jobs and self._is_local else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def _end(jobs: Collection[str]) -> None:
    """End jobs of Slurm, and wait for that.

    Those that run are interrupted first, so that they free their locks: of a job that was killed on another
    machine nothing tells whether it is gone. submitit's jobs take no notice of SIGTERM, which is usual.
    """
    until_killed, until_gone = _INTERRUPT_SECONDS, _END_SECONDS
    steps = {"--state=PENDING": 0.0, "--signal=INT": until_killed, "--signal=KILL": 0.0, "": until_gone}
    for option, seconds in steps.items():
        command = ["scancel", *filter(None, [option]), *jobs]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, check=False, capture_output=True, timeout=_COMMAND_SECONDS)
        until = time.monotonic() + seconds
        while (queued := _queued()) is None or not queued.isdisjoint(jobs):  # None: they may still run
            if time.monotonic() >= until:
                break
            time.sleep(_POLL_SECONDS)
        else:
            return


def _queued() -> set[str] | None:
    """The user's jobs that wait or run, elements of arrays one by one; None if Slurm does not answer."""
    command = ["squeue", "--noheader", "--array", "--format=%i", f"--user={os.getuid()}"]
    try:
        answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMMAND_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return None
    return set(answer.stdout.split())


def _processes_of(jobs: Collection[str], folder: Path) -> list[int]:
    """The processes of submitit's local jobs in a folder: controllers, which name jobs, and children."""
    ps = ["ps", "-A", "-ww", "-o", "pid=,ppid=,command="]  # else lines end at the width of a terminal
    listed = subprocess.run(ps, capture_output=True, text=True, timeout=_COMMAND_SECONDS)
    rows = [row for line in listed.stdout.splitlines() if len(row := line.split(maxsplit=2)) == 3]
    controllers = {pid for pid, _, c in rows if pid in jobs and "submitit" in c and str(folder) in c}
    children = [int(pid) for pid, parent, _ in rows if parent in controllers]
    return [*children, *map(int, controllers)]
