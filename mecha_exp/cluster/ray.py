"""Workers of Ray: processes of this machine, or of a cluster that runs already."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mecha_exp.cluster.task import Outcome, Task, environment_of, variables
from mecha_exp.cluster.workers import LostWorker, Workers, require
from mecha_exp.errors import ClusterError
from mecha_exp.system.cores import available_cores


def connect(address: str | None, count: int | None, cores: int) -> bool:
    """Connect this process to a cluster, or start Ray on this machine; see `RayWorkers`.

    Returns:
        whether it was not connected before.
    """
    ray = _ray()
    if ray.is_initialized():
        return False
    cpus = cores * (count or max(1, available_cores() // cores))
    here = {} if address else {"num_cpus": cpus, "include_dashboard": False}
    settings = {"log_to_driver": False, "logging_level": "error", **here}
    try:
        # A runtime_env with the variables would do, but Ray then starts workers by a shell, without quotes
        # around the path of Python. On other machines each task sets them (see `Task`).
        with variables(environment_of(cores)):
            ray.init(address or "local", **settings)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = f"the Ray cluster {address} does not answer" if address else "Ray does not start"
        raise ClusterError(f"{where}: {_first_line(error)}") from None
    return True


class RayWorkers(Workers):
    """Runs tasks on Ray; a process may run several, one after another.

    Ray 2.60, https://docs.ray.io.

    Args:
        count: how many tasks run at a time; None for as many as the cluster has cores for.
        cores: of each task, which Ray counts and does not bind.
        gpus: of each task; with a fraction, several share one GPU.
        address: of a cluster (`auto` for the one of this machine, `ray://host:10001`, `host:6379`); None
            starts workers on this machine, which end with this process.

    Raises:
        ConfigError: Ray is not installed.
        ClusterError: the cluster does not answer, or has no place for such a task.
    """

    def __init__(
        self, count: int | None = None, cores: int = 1, gpus: float = 0, address: str | None = None
    ) -> None:
        self._is_ours = connect(address, count, cores)
        self._ray = _ray()
        there = self._ray.cluster_resources()
        needed = {"CPU": cores, "GPU": gpus}
        self._check(there, needed, address)
        places = min(int(there[name] / amount) for name, amount in needed.items() if amount)
        super().__init__(count or places, cores)
        self._call = self._ray.remote(num_cpus=cores, num_gpus=gpus, max_retries=0)(_call)
        self._waiting: dict[int, Task] = {}
        self._running: dict[Any, int] = {}

    def _check(self, there: dict[str, float], needed: dict[str, float], address: str | None) -> None:
        lacking = [name for name, amount in needed.items() if amount > there.get(name, 0)]
        if lacking:
            where = f"the Ray cluster {address}" if address else "Ray on this machine"
            wanted = ", ".join(f"{needed[n]:g} {n} (there: {there.get(n, 0):g})" for n in lacking)
            self.close()
            raise ClusterError(f"{where} has no place for a task with {wanted}. Ask for less.")

    def close(self) -> None:
        """Cancel what runs, and end Ray if it was started here."""
        for reference in getattr(self, "_running", ()):
            self._ray.cancel(reference, force=True)
        self._running, self._waiting = {}, {}
        if self._is_ours:
            self._ray.shutdown()
            self._is_ours = False

    def _start(self, tasks: dict[int, Task]) -> None:
        self._waiting |= tasks
        self._fill()

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self.count:
            number = next(iter(self._waiting))
            self._running[self._call.remote(self._waiting.pop(number))] = number

    def _ended(self, seconds: float) -> Iterator[tuple[int, Outcome | LostWorker]]:
        done, _ = self._ray.wait(list(self._running), timeout=seconds) if self._running else ([], [])
        for reference in done:
            number = self._running.pop(reference)
            try:
                outcome = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                outcome = LostWorker(f"a worker of Ray was lost: {_first_line(error)}")
            self._fill()
            yield number, outcome


def _ray() -> Any:
    return require("ray", "running tasks on Ray")


def _call(task: Task) -> Outcome:
    return task()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
