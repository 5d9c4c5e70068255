"""`hydra/launcher=processes`, `ray` and `slurm`: the points of a sweep in shares, each one pass of a worker.

The head looks points up and cuts what is missing into shares (`cut_shares`). Each is a task that does what
`onepass` does (`mecha_exp/app/launchers/share.py`); results come through the sweep's folder and the store.
The head shows them as they come, and is the only process that tracks them.
"""

from __future__ import annotations

import shutil
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from omegaconf import DictConfig

from mecha_exp.app.batch import Merged
from mecha_exp.app.config.execution import Callbacks
from mecha_exp.app.config.jobs import Composed, Jobs
from mecha_exp.app.launchers.onepass import OnePass, Portion, recall
from mecha_exp.app.launchers.share import Session, run_share
from mecha_exp.app.launchers.shared_points import SharedPoints
from mecha_exp.app.point import Point
from mecha_exp.app.tracking import Tracker
from mecha_exp.app.words.plain_data import resolved
from mecha_exp.app.workbench import Workbench
from mecha_exp.cluster import ProcessWorkers, RayWorkers, SlurmWorkers, Workers
from mecha_exp.cluster.actors import Actor
from mecha_exp.cluster.claims import Claims
from mecha_exp.cluster.ray import connect
from mecha_exp.cluster.shares import Handout
from mecha_exp.cluster.slurm import LOCAL, SLURM
from mecha_exp.cluster.workers import LostWorker
from mecha_exp.errors import ConfigError
from mecha_exp.runs.sweep import Sweep
from mecha_exp.system.cores import available_cores
from mecha_exp.terminal.bars import examples_bar

FOLDER = ".shares"
"""The folder of a sweep in which shares are handed out while it runs."""


class Shares(OnePass):
    """Merges and measures the points of a sweep in shares, on the workers of a subclass.

    Its settings (`hydra.launcher`) are how many shares are worked at, at a time, the cores and GPUs of each
    worker, and how many shares there are for each worker.

    Raises:
        ConfigError: one of them is not a number, or too small.
    """

    def __init__(self, config: DictConfig, callbacks: Callbacks) -> None:
        super().__init__(config, callbacks)
        settings = self._settings = config.hydra.launcher
        for name, least in {"workers": 1, "cores": 1, "gpus": 0, "shares": 1}.items():
            value = settings[name]
            is_left_out = value is None and name == "workers"
            is_number = isinstance(value, int) or (isinstance(value, float) and name == "gpus")
            if not is_left_out and not (is_number and least <= value < inf):
                raise ConfigError(f"hydra.launcher.{name}={value}: expected a number from {least} up.")
        self._count: int | None = settings.workers
        self._cores: int = settings.cores
        self._gpus: float = settings.gpus
        self._shares: int = settings.shares

    @abstractmethod
    def open_workers(self, folder: Path, evaluators: int) -> Workers:
        """The workers that shares run on, until they are closed.

        Args:
            folder: for the files of the workers, shared by all machines.
            evaluators: how many workers the evaluator of each share has.
        """

    def actor_maker(self) -> Callable[[], Actor] | None:
        """What the workers of an evaluator run on; None for processes of their share's machine."""
        return None

    def complete(
        self, jobs: Jobs, portions: Iterable[Portion], bench: Workbench, tracker: Tracker
    ) -> Iterator[tuple[int, JobReturn]]:
        """Run known and wrong points here, and the others in shares while the next ones are prepared."""

        def lose(index: int, error: LostWorker) -> JobReturn:
            return self.run(Composed(jobs[index]), error, None, tracker)

        shared: SharedPoints | None = None
        reserved = 0
        with ExitStack() as stack:
            for points in portions:
                missing = {n: p for n, p in points.items() if isinstance(p, Point) and _is_missing(p, bench)}
                here = {number: point for number, point in points.items() if number not in missing}
                yield from super().complete(jobs, [here], bench, tracker)
                if not missing:
                    continue
                if shared is None or reserved < _evaluators(missing.values()):
                    if shared is not None:
                        yield from shared.ended(lose)
                        stack.close()
                    reserved = _evaluators(missing.values())
                    shared = stack.enter_context(self._share(jobs, bench, tracker, reserved))
                shared.give(missing)
                yield from shared.ended(lose, so_far=True)
            if shared is not None:
                yield from shared.ended(lose)

    @contextmanager
    def _share(
        self, jobs: Jobs, bench: Workbench, tracker: Tracker, evaluators: int
    ) -> Iterator[SharedPoints]:
        """Open workers, to which points can be given."""
        folder = Path(str(self._config.hydra.sweep.dir)).absolute()
        index_of = dict(zip(jobs.numbers, range(len(jobs)), strict=True))

        def arguments_of(numbers: Sequence[int]) -> tuple[Any, ...]:
            return (jobs.part([index_of[number] for number in numbers]),)

        remaining = new = sum(self.is_new(jobs, index) for index in range(len(jobs)))

        def note(given: int) -> float:
            nonlocal remaining
            remaining = max(remaining - 1, given)
            advance(1)
            return bench.pace.note(remaining)

        with (
            self.open_workers(folder / FOLDER / "jobs", evaluators) as workers,
            examples_bar("points of all shares", new) as advance,
        ):
            claims = Claims.begin(folder / FOLDER)  # after the workers, which end those of a killed process
            self._session(bench).keep(claims.folder)
            handout, count = Handout(workers, claims, run_share, arguments_of), workers.count * self._shares
            yield SharedPoints(jobs, handout, count, Sweep.load(folder), tracker, note)
        shutil.rmtree(folder / FOLDER, ignore_errors=True)

    def _session(self, bench: Workbench) -> Session:
        store = bench.store.shared_folder if bench.store else None
        if store:
            store.mkdir(parents=True, exist_ok=True)
        return Session(self._config, store, self.actor_maker())


class ProcessShares(Shares):
    """Runs shares in processes of this machine."""

    def __init__(self, config: DictConfig, callbacks: Callbacks) -> None:
        super().__init__(config, callbacks)
        if self._gpus:
            raise ConfigError(
                f"hydra.launcher.gpus={self._gpus} with hydra/launcher=processes: its processes share the "
                "GPUs of this machine. Name them with evaluator.devices=[cuda:0,cuda:1], or use "
                "hydra/launcher=ray."
            )

    def open_workers(self, folder: Path, evaluators: int) -> Workers:
        """Processes, which end with this one."""
        return ProcessWorkers(self._count or available_cores(), self._cores, folder / "workers.log")


class RayShares(Shares):
    """Runs shares on Ray, and the workers of an evaluator as actors: here, or on a cluster by its address."""

    def __init__(self, config: DictConfig, callbacks: Callbacks) -> None:
        super().__init__(config, callbacks)
        self._address: str | None = self._settings.address
        if not isinstance(self._address, str | None):
            raise ConfigError(
                f"hydra.launcher.address={self._address}: expected auto, host:6379 or ray://host:10001."
            )
        if self._gpus > 1 and self._gpus != int(self._gpus):
            raise ConfigError(
                f"hydra.launcher.gpus={self._gpus}: Ray gives a part of one GPU or whole ones: 0.5, 1, 2."
            )

    def complete(
        self, jobs: Jobs, portions: Iterable[Portion], bench: Workbench, tracker: Tracker
    ) -> Iterator[tuple[int, JobReturn]]:
        """Run points in shares.

        Raises:
            ConfigError: they name the devices of their evaluator, which Ray chooses.
        """
        yield from super().complete(jobs, map(_without_devices, portions), bench, tracker)

    def open_workers(self, folder: Path, evaluators: int) -> Workers:
        """Workers of Ray, which stays connected: a search has many batches of points."""
        connect(self._address, self._count, self._cores, evaluators)
        return RayWorkers(self._count, self._cores, self._gpus, self._address, evaluators)

    def actor_maker(self) -> Callable[[], Actor]:
        """Actors of Ray, which have the GPUs."""
        return partial(Actor, self._cores, self._gpus)


class SlurmShares(Shares):
    """Runs shares as the elements of an array job of Slurm, or as processes of this machine."""

    def __init__(self, config: DictConfig, callbacks: Callbacks) -> None:
        super().__init__(config, callbacks)
        self._cluster = str(self._settings.cluster)
        self._parameters = resolved(self._settings.parameters) or {}
        if self._cluster == SLURM:
            self.first_points = None  # one array job, of which Slurm runs so many elements at a time
        if self._cluster not in (LOCAL, SLURM):
            raise ConfigError(f"hydra.launcher.cluster={self._cluster}: expected {SLURM} or {LOCAL}.")
        if not isinstance(self._parameters, Mapping):
            raise ConfigError(
                f"hydra.launcher.parameters={self._parameters}: expected names with values, as in "
                "+hydra.launcher.parameters.slurm_partition=cpu."
            )
        if self._gpus != int(self._gpus) or self._count is None:
            raise ConfigError(
                f"hydra.launcher.gpus={self._gpus} and workers={self._count}: jobs need whole GPUs and a "
                "number of workers. hydra/launcher=ray shares GPUs and counts cores."
            )

    def open_workers(self, folder: Path, evaluators: int) -> Workers:
        """Jobs by submitit."""
        assert self._count is not None
        gpus, more = int(self._gpus), self._parameters
        return SlurmWorkers(self._count, folder, self._cores, gpus, self._cluster, more)


def _evaluators(points: Iterable[Point]) -> int:
    """How many workers of evaluators a share has: where points ask for different pools, those of all."""
    pools = {(point.scoring.plugins, point.scoring.workers) for point in points}
    return sum(workers for _, workers in pools)


def _is_missing(point: Point, bench: Workbench) -> bool:
    """Whether something of a point has yet to be merged or measured."""
    result = recall(point, bench)
    return result is None or (isinstance(result, Merged) and not bench.measurements.are_stored(point))


def _without_devices(points: Portion) -> Portion:
    """Points whose evaluators leave it to Ray which devices they get.

    Raises:
        ConfigError: one of them names its devices.
    """
    for point in points.values():
        if isinstance(point, Point) and point.scoring.devices:
            raise ConfigError(
                f"evaluator.devices={list(point.scoring.devices)} with hydra/launcher=ray: Ray gives a "
                "worker its GPU. Use evaluator.workers=2 hydra.launcher.gpus=0.5, for example."
            )
    return points
