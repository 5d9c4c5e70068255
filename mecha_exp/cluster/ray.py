"""Workers of Ray: processes of this machine, or of a cluster that runs already."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mecha_exp.cluster.task import Outcome, Task, environment_of, variables
from mecha_exp.cluster.workers import LostWorker, Workers, require
from mecha_exp.errors import ClusterError
from mecha_exp.system.cores import available_cores

Resources = Mapping[str, float]
"""Amounts by the names that Ray gives them, such as `CPU` and `GPU`."""
_SLACK = 1e-6
"""Less than the smallest part of a GPU that Ray gives, and more than sums of fractions are wrong by."""


def connect(address: str | None, count: int | None, cores: int, actors: int = 0) -> bool:
    """Connect this process to a cluster, or start Ray on this machine; see `RayWorkers`.

    Returns:
        whether it was not connected before.
    """
    ray = ray_library()
    if ray.is_initialized():
        return False
    of_each = cores * (1 + actors)
    cpus = of_each * (count or max(1, available_cores() // of_each))
    here = {} if address else {"num_cpus": cpus, "include_dashboard": False}
    settings = {"log_to_driver": False, "logging_level": "error", **here}
    try:
        # A runtime_env with the variables would do, but Ray then starts workers by a shell, without quotes
        # around the path of Python. On other machines each task sets them (see `Task`).
        with variables(environment_of(cores)):
            ray.init(address or "local", **settings)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = f"the Ray cluster {address} does not answer" if address else "Ray does not start"
        raise ClusterError(f"{where}: {first_line(error)}") from None
    return True


class RayWorkers(Workers):
    """Runs tasks on Ray; a process may run several, one after another.

    Ray 2.60, https://docs.ray.io.

    Args:
        count: how many tasks run at a time; None for as many as the cluster has cores for.
        cores: of each task, which Ray counts and does not bind.
        gpus: of each task; with a fraction, several share one GPU.
        actors: how many actors each task starts, of as many cores. They have the GPUs then, each so many.
        address: of a cluster (`auto` for the one of this machine, `ray://host:10001`, `host:6379`); None
            starts workers on this machine, which end with this process.

    Raises:
        ConfigError: Ray is not installed.
        ClusterError: the cluster does not answer, or has no place for such a task.
    """

    def __init__(
        self,
        count: int | None = None,
        cores: int = 1,
        gpus: float = 0,
        address: str | None = None,
        actors: int = 0,
    ) -> None:
        self._is_ours = connect(address, count, cores, actors)
        self._ray = ray_library()
        task, actor = {"CPU": cores, "GPU": 0 if actors else gpus}, {"CPU": cores, "GPU": gpus}
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        places = places_on(nodes, [*[actor] * actors, task])
        if not places:
            self.close()
            where = f"the Ray cluster {address}" if address else "Ray on this machine"
            with_actors = f" and {actors} actors, each with {_words(actor)}" if actors else ""
            raise ClusterError(
                f"{where} has no place for a task with {_words(task)}{with_actors}. "
                f"There: {_machines(nodes)}. Ask for less."
            )
        # Tasks may wait for a place. One that has started waits for its actors, which have to find theirs.
        super().__init__(min(count or places, places) if actors else count or places, cores)
        self._call = self._ray.remote(num_cpus=cores, num_gpus=task["GPU"], max_retries=0)(_call)
        self._running: dict[Any, int] = {}

    def close(self) -> None:
        """Cancel what runs, and end Ray if it was started here."""
        for reference in getattr(self, "_running", ()):
            self._ray.cancel(reference, force=True)
        self._running, self._waiting = {}, {}
        if self._is_ours:
            self._ray.shutdown()
            self._is_ours = False

    def _fill(self) -> None:
        for number, task in self._take(self.count - len(self._running)):
            self._running[self._call.remote(task)] = number

    def _ended(self, seconds: float) -> Iterator[tuple[int, Outcome | LostWorker]]:
        done, _ = self._ray.wait(list(self._running), timeout=seconds) if self._running else ([], [])
        for reference in done:
            number = self._running.pop(reference)
            try:
                outcome = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                outcome = LostWorker(f"a worker of Ray was lost: {first_line(error)}")
            self._fill()
            yield number, outcome


def places_on(nodes: Sequence[Resources], together: Sequence[Resources]) -> int:
    """How often processes fit on nodes together, each on the first node that has room for it.

    Nodes with few GPUs come first, as in Ray, which keeps the others for what needs GPUs. All parts of GPUs
    are equal.
    """
    free = [dict(node) for node in sorted(nodes, key=lambda node: node.get("GPU", 0))]
    taken = [{**needed, "GPU": _gpus_taken(needed.get("GPU", 0))} for needed in together]
    places = 0
    while all(_take(free, needed) for needed in taken):
        places += 1
    return places


def _gpus_taken(gpus: float) -> float:
    """The GPUs that a process takes: with 0.4 a half, since Ray does not cut a part out of two GPUs."""
    return 1 / int(1 / gpus + _SLACK) if 0 < gpus < 1 else gpus


def _take(free: list[dict[str, float]], needed: Resources) -> bool:
    """Take what a process needs from the first node that has it; returns whether there is one."""
    for node in free:
        if all(node.get(name, 0) + _SLACK >= amount for name, amount in needed.items()):
            node |= {name: node.get(name, 0) - amount for name, amount in needed.items()}
            return True
    return False


def _machines(nodes: Sequence[Resources]) -> str:
    counts = Counter(_words({name: node.get(name, 0) for name in ("CPU", "GPU")}) for node in nodes)
    return "; ".join(
        f"{count} machine{'s' if count > 1 else ''} with {words}" for words, count in counts.items()
    )


def _words(amounts: Resources) -> str:
    """Amounts as they are shown: `4 CPU, 0.5 GPU`."""
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items())


def ray_library() -> Any:
    """Ray, if it is installed."""
    return require("ray", "running tasks on Ray")


def _call(task: Task) -> Outcome:
    return task()


def first_line(error: Exception) -> str:
    """The first line of what an error says, or the last one where the first only announces it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1] if lines[0].endswith(":") else lines[0]
