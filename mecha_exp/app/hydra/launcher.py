"""`hydra/launcher=onepass`: merges the points of a sweep together, then runs each as one of Hydra's jobs.

A launcher receives all jobs at once. This one composes them, looks up stored results and merges the rest in
as few passes as possible. After each pass Hydra runs its points as jobs, with folder, log, callbacks and
return value; there they are measured and tracked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hydra.core.utils import JobReturn, JobStatus, configure_log, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from mecha_exp.app.batch import Merged
from mecha_exp.app.hydra.jobs import compose_jobs, enter
from mecha_exp.app.point import Point, prepare, resolve
from mecha_exp.app.workbench import Workbench, workbench
from mecha_exp.errors import CheckpointError, ConfigError, MechaError
from mecha_exp.lab.content_hash import contents_of
from mecha_exp.plugins import load_plugins
from mecha_exp.runs.record import Record
from mecha_exp.terminal import hashing_bar, progress_bar, stdout

Source = TypeVar("Source")
PointOrError = Point | MechaError
"""A point, or the error of a job that has none."""


class OnePassLauncher(Launcher):
    """Merges all points of a sweep in one pass, or in as few as memory allows."""

    _config: DictConfig
    _context: HydraContext
    _run_point: Callable[..., Any]  # `app.run.run_point`

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what all jobs have in common."""
        self._context, self._run_point, self._config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run every job; returns their return values in the order of the jobs."""
        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        Path(str(self._config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        bench = workbench(self._config.store, self._config.rerun)
        loader = self._context.config_loader
        configs = list(compose_jobs(loader, self._config, job_overrides, initial_job_idx))
        points = _sign(configs, bench)
        returned: dict[int, JobReturn] = {}
        for number, point in enumerate(points):
            if isinstance(point, Point) and (record := _finished_record(point, bench)):
                returned[number] = _as_returned(configs[number], record)
        if returned:
            stdout.print(f"{len(returned)} of {len(points)} points are there already")
        waiting = {number: point for number, point in enumerate(points) if number not in returned}
        for number, result in _merge(waiting, bench):
            returned[number] = self._run(configs[number], points[number], result)
        return [returned[number] for number in range(len(points))]

    def _run(self, config: DictConfig, point: PointOrError, result: Merged | Exception) -> JobReturn:
        returned = run_job(
            task_function=partial(self._run_point, point=point, result=result),
            config=config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
            hydra_context=self._context,
        )
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        return returned


def _sign(configs: Sequence[DictConfig], bench: Workbench) -> list[PointOrError]:
    """Build the recipe of every job and sign its point, reading each input once."""
    points = [_attempt(_prepare, config) for config in configs]
    files = [path for point in points if isinstance(point, Point) for path in point.files.values()]
    try:
        with hashing_bar(files) as advance:
            contents_of(files, advance)
    except CheckpointError:
        pass  # each point that needs the file reports it
    return [_attempt(bench.sign, point) if isinstance(point, Point) else point for point in points]


def _prepare(config: DictConfig) -> Point:
    folder = enter(config)
    load_plugins(config.get("plugins") or ())
    point = prepare(resolve(config), folder)
    _ = point.files  # raises if one is missing
    return point


def _attempt(make: Callable[[Source], Point], source: Source) -> PointOrError:
    try:
        return make(source)
    except MechaError as error:
        return error


def _finished_record(point: Point, bench: Workbench) -> Record | None:
    """The record in a point's folder, if there is nothing left to do in it."""
    if bench.measures_again:
        return None
    try:
        record = Record.load(point.folder)
    except ConfigError:  # there is none yet, or it is incomplete
        return None
    is_same = (record.signature, record.evaluations) == (point.digest, point.scoring.keys)
    has_model = point.output is None or record.has_model
    return record if record.finished and is_same and has_model else None


def _as_returned(config: DictConfig, record: Record) -> JobReturn:
    """The return value of the job that wrote a record."""
    returned = JobReturn(overrides=list(config.hydra.overrides.task), status=JobStatus.COMPLETED)
    returned.return_value = record.metrics.get(record.metric or "")
    return returned


def _merge(points: Mapping[int, PointOrError], bench: Workbench) -> Iterator[tuple[int, Merged | Exception]]:
    """Yield the result of each point, by its number, as soon as it is there; stored results come first."""
    missing: dict[str, tuple[int, Point]] = {}
    repeated: list[tuple[int, Point]] = []
    for number, point in points.items():
        if not isinstance(point, Point):
            yield number, point
        elif result := _recall(point, bench):
            yield number, result
        elif missing.setdefault(point.digest, (number, point)) != (number, point):
            repeated.append((number, point))
    for point, result in bench.merge([point for _, point in missing.values()], progress_bar):
        yield missing[point.digest][0], result
    for number, point in repeated:  # the same merge as another point, stored by now unless there is no store
        if result := _recall(point, bench):
            yield number, result
        else:
            yield from ((number, result) for _, result in bench.merge([point], progress_bar))


def _recall(point: Point, bench: Workbench) -> Merged | Exception | None:
    try:
        return bench.recall(point)
    except MechaError as error:
        return error
