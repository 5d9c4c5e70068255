"""`hydra/launcher=ray`, `slurm` and `processes`: the points of a sweep in shares, each one pass of a worker.

The head looks points up and cuts what is missing into shares (`cut_shares`). Each is a task that does what
`onepass` does (`mecha_exp/app/hydra/share.py`); results come through the sweep's folder and the store. The
head shows them as they come, and is the only process that tracks them.
"""

from __future__ import annotations

import shutil
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from mecha_exp.app.batch import Merged, group_by_options
from mecha_exp.app.hydra.jobs import Jobs
from mecha_exp.app.hydra.launcher import OnePassLauncher, PointOrError, as_returned, recall
from mecha_exp.app.hydra.share import Session, run_share
from mecha_exp.app.point import Point
from mecha_exp.app.tracking import EndedRun, Tracker
from mecha_exp.app.workbench import Workbench
from mecha_exp.cluster import RayWorkers, SlurmWorkers, Workers
from mecha_exp.cluster.actors import Actor
from mecha_exp.cluster.claims import Claims
from mecha_exp.cluster.ray import connect
from mecha_exp.cluster.shares import Handout
from mecha_exp.cluster.slurm import LOCAL, SLURM
from mecha_exp.errors import ConfigError
from mecha_exp.runs.record import FAILED, Record
from mecha_exp.runs.sweep import Sweep
from mecha_exp.terminal import examples_bar, show_error, show_point

FOLDER = ".shares"
"""The folder of a sweep in which shares are handed out while it runs."""


class ShareLauncher(OnePassLauncher):
    """Merges and measures the points of a sweep in shares, on the workers of a subclass.

    Args:
        workers: how many shares are worked at, at a time.
        cores: of each worker.
        gpus: of each worker.
        shares: how many shares there are for each worker.
    """

    first_points = None

    def __init__(self, workers: int | None, cores: int, gpus: float, shares: int) -> None:
        self._count, self._cores, self._gpus, self._shares = workers, cores, gpus, shares

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what all jobs have in common."""
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        for name, least in {"workers": 1, "cores": 1, "gpus": 0, "shares": 1}.items():
            value = config.hydra.launcher[name]
            is_left_out = value is None and name == "workers"
            is_number = isinstance(value, int) or (isinstance(value, float) and name == "gpus")
            if not is_left_out and not (is_number and least <= value < inf):
                raise ConfigError(f"hydra.launcher.{name}={value}: expected a number from {least} up.")

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
        self, jobs: Jobs, points: Mapping[int, PointOrError], bench: Workbench, tracker: Tracker
    ) -> Iterator[tuple[int, JobReturn]]:
        """Run known and wrong points here and the others in shares."""
        missing = {n: p for n, p in points.items() if isinstance(p, Point) and _is_missing(p, bench)}
        here = {number: point for number, point in points.items() if number not in missing}
        yield from super().complete(jobs, here, bench, tracker)
        if missing:
            yield from self._hand_out(jobs, missing, bench, tracker)

    def _hand_out(
        self, jobs: Jobs, points: Mapping[int, Point], bench: Workbench, tracker: Tracker
    ) -> Iterator[tuple[int, JobReturn]]:
        """Run points in shares; yields them as they end."""
        folder = Path(str(self._config.hydra.sweep.dir)).absolute()
        results = _Results(Sweep.load(folder), bench, tracker, points)
        indices = {jobs.numbers[index]: index for index in points}

        def arguments_of(numbers: Sequence[int]) -> tuple[Any, ...]:
            return [jobs.overrides[indices[number]] for number in numbers], list(numbers)

        with (
            self.open_workers(folder / FOLDER / "jobs", _evaluators(points.values())) as workers,
            examples_bar("points of all shares", len(points)) as advance,
        ):
            claims = Claims.begin(folder / FOLDER)  # after the workers, which end those of a killed process
            self._session(bench).keep(claims.folder)
            shares = cut_shares(points, workers.count * self._shares)
            numbered = [[jobs.numbers[index] for index in share] for share in shares]
            for number, lost in Handout(workers, claims, run_share, arguments_of).run(numbered):
                index = indices[number]
                if lost is not None:
                    yield index, self.run(jobs[index], lost, None, tracker)
                else:
                    yield index, results.take(index, number, jobs.overrides[index])
                advance(1)
        shutil.rmtree(folder / FOLDER, ignore_errors=True)

    def _session(self, bench: Workbench) -> Session:
        store = bench.store.shared_folder if bench.store else None
        if store:
            store.mkdir(parents=True, exist_ok=True)
        return Session(
            self._context,
            self._run_point,
            self._config,
            Singleton.get_state(),
            store,
            self.actor_maker(),
        )


class RayLauncher(ShareLauncher):
    """Runs shares on Ray, and the workers of an evaluator as actors: here, or on a cluster by its address."""

    def __init__(self, address: str | None, **settings: Any) -> None:
        super().__init__(**settings)
        self._address = address

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what all jobs have in common."""
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        if not isinstance(self._address, str | None):
            raise ConfigError(
                f"hydra.launcher.address={self._address}: expected auto, host:6379 or ray://host:10001."
            )
        if self._gpus > 1 and self._gpus != int(self._gpus):
            raise ConfigError(
                f"hydra.launcher.gpus={self._gpus}: Ray gives a part of one GPU or whole ones: 0.5, 1, 2."
            )

    def complete(
        self, jobs: Jobs, points: Mapping[int, PointOrError], bench: Workbench, tracker: Tracker
    ) -> Iterator[tuple[int, JobReturn]]:
        """Run points in shares.

        Raises:
            ConfigError: they name the devices of their evaluator, which Ray chooses.
        """
        for point in points.values():
            if isinstance(point, Point) and point.scoring.devices:
                raise ConfigError(
                    f"evaluator.devices={list(point.scoring.devices)} with hydra/launcher=ray: Ray gives a "
                    "worker its GPU. Use evaluator.workers=2 hydra.launcher.gpus=0.5, for example."
                )
        yield from super().complete(jobs, points, bench, tracker)

    def open_workers(self, folder: Path, evaluators: int) -> Workers:
        """Workers of Ray, which stays connected: a search has many batches of points."""
        connect(self._address, self._count, self._cores, evaluators)
        return RayWorkers(self._count, self._cores, self._gpus, self._address, evaluators)

    def actor_maker(self) -> Callable[[], Actor]:
        """Actors of Ray, which have the GPUs."""
        return partial(Actor, self._cores, self._gpus)


class SlurmLauncher(ShareLauncher):
    """Runs shares as the elements of an array job of Slurm, or as processes of this machine."""

    def __init__(self, cluster: str, parameters: Mapping[str, Any] | None, **settings: Any) -> None:
        super().__init__(**settings)
        self._cluster, self._parameters = cluster, parameters or {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what all jobs have in common."""
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
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


class _Results:
    """Takes over the records that workers have written: shows and tracks them.

    Args:
        sweep: the sweep of the points.
        bench: the workbench, which knows the pace.
        tracker: logs the runs.
        points: the points, by their indices among the jobs.
    """

    def __init__(self, sweep: Sweep, bench: Workbench, tracker: Tracker, points: Mapping[int, Point]) -> None:
        self._sweep, self._bench, self._tracker, self._points = sweep, bench, tracker, points
        self._remaining = len(points)
        self._replaced = {index: _run_id_in(point.folder) for index, point in points.items()}

    def take(self, index: int, number: int, overrides: Sequence[str]) -> JobReturn:
        """Show and track a point that a worker has run; returns what its job would have returned."""
        folder = self._points[index].folder
        record = Record.load(folder)
        self._remaining -= 1
        seconds_left = self._bench.pace.note(self._remaining)
        if record.status == FAILED and record.error:
            show_error(f"{record.name}: {record.error.strip().splitlines()[-1]}")
        show_point(record, number + 1, self._sweep.points, seconds_left=seconds_left)
        if self._sweep.parent_run is not None:
            self._tracker.add(EndedRun(folder, record, self._sweep.parent_run, self._replaced[index]))
        return as_returned(overrides, record)


def _run_id_in(folder: Path) -> str | None:
    """The MLflow run of the record that is in a folder already."""
    try:
        return Record.load(folder).run_id
    except ConfigError:
        return None


def _evaluators(points: Iterable[Point]) -> int:
    """How many workers of evaluators a share has: where points ask for different pools, those of all."""
    pools = {(point.scoring.plugins, point.scoring.workers) for point in points}
    return sum(workers for _, workers in pools)


def _is_missing(point: Point, bench: Workbench) -> bool:
    """Whether something of a point has yet to be merged or measured."""
    result = recall(point, bench)
    return result is None or (isinstance(result, Merged) and not bench.measurements.are_stored(point))


def cut_shares(points: Mapping[int, Point], count: int) -> list[list[int]]:
    """Cut points into about so many shares that are alike: of points that share passes and models.

    Points with one signature are in one share, which merges them once.

    Args:
        points: signed points, by number.
        count: how many shares there are, unless there are fewer points or more kinds of passes.
    """
    alike: dict[str, list[int]] = {}
    for number, point in points.items():
        alike.setdefault(point.digest, []).append(number)
    firsts = {points[numbers[0]]: numbers for numbers in alike.values()}
    shares: list[list[int]] = []
    for group in group_by_options(list(firsts)):
        ordered = sorted(group, key=lambda point: [str(path) for path in point.files.values()])
        pieces = min(len(ordered), max(1, round(count * len(ordered) / len(firsts))))
        cuts = [len(ordered) * piece // pieces for piece in range(pieces + 1)]
        for start, stop in pairwise(cuts):
            shares.append([number for point in ordered[start:stop] for number in firsts[point]])
    return sorted(shares)
