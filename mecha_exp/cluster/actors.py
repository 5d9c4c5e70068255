"""Actors of Ray: processes that make one call after another, on any machine of the cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mecha_exp.cluster.ray import first_line, ray_library
from mecha_exp.cluster.task import Outcome, Task
from mecha_exp.cluster.workers import LostWorker
from mecha_exp.errors import ClusterError


class Actor:
    """A process that makes calls one after another, and keeps what they have loaded.

    It starts with the first call, as soon as the cluster has room for it, and ends with the process that
    made it. One thread calls at a time; any may close it.

    Args:
        cores: of the process.
        gpus: of the process; with a fraction, several share one GPU.

    Attributes:
        is_ready: whether the process is there and has made a call.
    """

    def __init__(self, cores: int = 1, gpus: float = 0) -> None:
        self._cores, self._gpus = cores, gpus
        self._process: Any = None
        self.is_ready = False

    def call(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        arrays: Mapping[str, Any],
        seconds: float | None = None,
    ) -> Any:
        """Return what `function(*arguments, arrays)` returns in the process.

        Args:
            function: of a module.
            arguments: of the call.
            arrays: NumPy arrays. They go through Ray's object store, which copies them once; the process
                maps them from there where it runs on the same machine.
            seconds: that the call may take, from now on; None is unlimited.

        Raises:
            TimeoutError: the call took longer, and its process was ended.
            LostWorker: the process ended before the call did.
            ClusterError: the object store has no room.
            Exception: what the function raised.
        """
        ray = ray_library()
        try:
            process = self._started()
            call = process.make.remote(Task.of(function, arguments, self._cores), ray.put(dict(arrays)))
            if not ray.wait([call], timeout=seconds)[0]:
                self.close()
                raise TimeoutError
            value, error = ray.get(call)
        except ray.exceptions.RayActorError as lost:
            self.close()
            raise LostWorker(f"an actor of Ray was lost: {first_line(lost)}") from None
        except ray.exceptions.RayError as failure:
            raise ClusterError(f"Ray did not make a call on an actor: {first_line(failure)}") from None
        if error is not None:
            raise error
        self.is_ready = True
        return value

    def close(self) -> None:
        """End the process, also in the middle of a call of another thread, which raises. Idempotent."""
        process, self._process, self.is_ready = self._process, None, False
        if process is not None:
            ray_library().kill(process)

    def _started(self) -> Any:
        if self._process is None:
            start = ray_library().remote(num_cpus=self._cores, num_gpus=self._gpus)(_Process).remote
            self._process = start()
        return self._process


class _Process:
    """What runs in the process of an actor."""

    def make(self, task: Task, arrays: Mapping[str, Any]) -> Outcome:
        """Make a call with arrays, which Ray maps."""
        return task(arrays)
