"""Measure several models at the same time, each in a process or an actor of its own, on its own device."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Condition, Lock

import torch

from mecha_exp.cluster.actors import Actor
from mecha_exp.errors import ConfigError, EvaluationError, Problems
from mecha_exp.evaluation.isolation.actor import EvaluationActor
from mecha_exp.evaluation.isolation.process import EvaluationProcess, LostProcessError
from mecha_exp.evaluation.isolation.request import Request
from mecha_exp.evaluation.measurement import Measurement
from mecha_exp.numbers import is_whole
from mecha_exp.system.cores import available_cores

log = logging.getLogger(__name__)

CPU, CUDA = "cpu", "cuda"


Worker = EvaluationProcess | EvaluationActor

MOST_WORKERS = 1024
"""Processes that measure at the same time, at most."""

_pools: dict[tuple[Sequence[str], int, Sequence[str]], EvaluationPool] = {}
_actors: list[Callable[[], Actor]] = []  # how actors are made, if new pools have some
_opening = Lock()


def evaluation_pool(plugins: Sequence[str], workers: int, devices: Sequence[str]) -> EvaluationPool:
    """The pool of this process for these settings; its workers start when they are needed."""
    with _opening:
        key = (plugins, workers, devices)
        if key not in _pools:
            _pools[key] = EvaluationPool(_workers(plugins, workers, devices))
        return _pools[key]


def close_pools() -> None:
    """End all workers, also in the middle of a measurement; a process that waits for them cannot exit."""
    with _opening:
        for pool in _pools.values():
            pool.close()
        _pools.clear()


@contextmanager
def pools_on(make_actor: Callable[[], Actor] | None) -> Iterator[None]:
    """Run the workers of pools on actors for the length of a block, unless that is None; then end them."""
    _actors[:] = [make_actor] if make_actor else []
    try:
        yield
    finally:
        _actors.clear()
        close_pools()


def _workers(plugins: Sequence[str], count: int, devices: Sequence[str]) -> list[Worker]:
    if _actors:
        return [EvaluationActor(plugins, _actors[0]()) for _ in range(count)]
    return [
        EvaluationProcess(plugins, _environment(count, devices[i % len(devices)] if devices else None))
        for i in range(count)
    ]


class EvaluationPool:
    """Workers that measure models side by side, each one after another.

    A worker that hangs or dies is replaced, and its model is tried once more.

    Args:
        workers: processes of this machine, or actors of Ray.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._threads = ThreadPoolExecutor(len(workers), "evaluation")
        self._unfinished: set[Future[Measurement]] = set()
        self._is_closed = False
        self._workers, self._idle = workers, list(workers)
        self._awaited = 0
        self._change = Condition()

    def begin(self, models: int) -> None:
        """Start the workers that so many models will need, without waiting for them."""
        with self._change:
            for worker in self._idle[-models:]:
                worker.begin()

    def submit(self, request: Request, is_wanted: Callable[[], bool] = lambda: True) -> Future[Measurement]:
        """Measure a model as soon as a worker is idle; the future raises an EvaluationError.

        A model that is not wanted any more when its turn comes is not measured.
        """
        future = self._threads.submit(self._measure_wanted, request, is_wanted)
        self._unfinished.add(future)
        future.add_done_callback(self._unfinished.discard)
        return future

    def measure(self, request: Request) -> Measurement:
        """Measure a model now, before those that were submitted and have not begun.

        Raises:
            EvaluationError: the evaluator failed, or was lost twice.
        """
        with self._idle_worker(is_awaited=True) as worker:
            return self._score(worker, request)

    def close(self) -> None:
        """End the workers; measurements that were not done raise."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        while unfinished := list(self._unfinished):  # one may just have started a process
            for worker in self._workers:
                worker.interrupt()
            wait(unfinished, timeout=0.1)
        for worker in self._workers:
            worker.close()

    def _measure_wanted(self, request: Request, is_wanted: Callable[[], bool]) -> Measurement:
        with self._idle_worker(is_awaited=False) as worker:
            if not is_wanted():
                del request  # the error, which is kept, would keep the model
                raise EvaluationError("another process measures it.")
            return self._score(worker, request)

    @contextmanager
    def _idle_worker(self, *, is_awaited: bool) -> Iterator[Worker]:
        """Wait for a worker that is idle; those who wait for a measurement itself have the next one."""
        with self._change:
            self._awaited += is_awaited
            try:
                self._change.wait_for(lambda: self._idle and (is_awaited or not self._awaited))
            finally:
                self._awaited -= is_awaited
                self._change.notify_all()
            worker = self._idle.pop()
        try:
            yield worker
        finally:
            with self._change:
                self._idle.append(worker)
                self._change.notify_all()

    def _score(self, worker: Worker, request: Request) -> Measurement:
        try:
            return worker.score(request)
        except LostProcessError as error:
            if self._is_closed:
                raise
            name = request.context.name if request.context else request.evaluator
            log.warning("%s: %s It is tried once more.", name, error)
            return worker.score(request)


def read_workers(workers: object, devices: object, problems: Problems) -> tuple[int, tuple[str, ...]]:
    """The number of workers and their devices that a configuration asks for; 0 measures without workers."""
    names = [devices] if isinstance(devices, str) else devices or ()
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        problems.add(f"evaluator.devices: expected names such as [cuda:0,cuda:1], got {devices!r}.")
        names = ()
    for name in names:
        if problem := _device_problem(name):
            problems.add(problem)
    if workers is None:
        return len(names), tuple(names)
    if not is_whole(workers, least=0) or workers > MOST_WORKERS:
        problems.add(
            f"evaluator.workers: expected a number of processes from 0 to {MOST_WORKERS}, or null for none, "
            f"got {workers!r}."
        )
        return 0, ()
    if names and workers < len(names):
        problems.add(
            f"evaluator.workers={workers}: too few for {len(names)} devices. Leave it out: there is one "
            "worker a device then."
        )
    return workers, tuple(names)


def _device_problem(name: str) -> ConfigError | None:
    kind, _, index = name.partition(":")
    if kind not in (CPU, CUDA) or (index and not index.isdecimal()):
        return ConfigError(f"evaluator.devices={name}: unknown device. Use cpu, or cuda:0, cuda:1, ...")
    count = torch.cuda.device_count()
    if kind == CUDA and int(index or 0) >= count:
        there = f"{count} GPU{'s' if count > 1 else ''}" if count else "no GPU"
        return ConfigError(f"evaluator.devices={name}: torch sees {there} here. Use cpu, or leave it out.")
    return None


def _environment(workers: int, device: str | None) -> dict[str, str]:
    """The environment of a worker: its share of the cores, and the one GPU that it sees."""
    threads = str(max(1, available_cores() // workers))
    environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    if device is not None:
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        index = int(device.partition(":")[2] or 0)
        is_cpu = device.partition(":")[0] == CPU
        environment["CUDA_VISIBLE_DEVICES"] = "" if is_cpu else visible[index] if visible else str(index)
    return environment
