"""`hydra/launcher=onepass`: merges the points of a sweep together, then runs each as a job.

A launcher receives all jobs of a batch at once. This one looks up stored results and merges the rest in as
few passes as possible. After each pass it runs the points as jobs, with folder, log, callbacks and return
value; there they are measured and tracked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TypeVar

from hydra.core.utils import JobReturn, JobStatus, configure_log, setup_globals
from omegaconf import DictConfig

from mecha_exp.app.batch import Merged
from mecha_exp.app.config.execution import Callbacks, run_job
from mecha_exp.app.config.jobs import Composed, Jobs, Scratch, enter
from mecha_exp.app.launchers.run import run_point
from mecha_exp.app.point import Point
from mecha_exp.app.preparation import prepare_job
from mecha_exp.app.tracking import Tracker
from mecha_exp.app.workbench import Workbench, workbench
from mecha_exp.errors import CheckpointError, ConfigError, MechaError, counted
from mecha_exp.evaluation import Scoring
from mecha_exp.lab.content_hash import contents_of
from mecha_exp.plugins import load_plugins
from mecha_exp.runs.record import RUN_FILE, Record, json_ready
from mecha_exp.runs.sweep import Tracking
from mecha_exp.terminal.bars import hashing_bar, progress_bar
from mecha_exp.terminal.console import stdout

MANY_POINTS = 256
"""The points of a sweep that is not large."""
POINTS_AT_ONCE = 1024
"""How many points of a large sweep are in memory at a time, after its first ones."""

Source = TypeVar("Source")
PointOrError = Point | MechaError
"""A point, or the error of a job that has none."""
Portion = Mapping[int, PointOrError]
"""Signed points that are in memory at a time, by their indices among the jobs."""


class OnePass:
    """Merges all points of a sweep in one pass, or in as few as memory allows.

    Args:
        config: of the sweep as a whole, with Hydra's part.
        callbacks: told of each job.
    """

    first_points: int | None = 16
    """How many points of a large sweep run before the others; None: all points run together."""

    def __init__(self, config: DictConfig, callbacks: Callbacks) -> None:
        self._config, self._callbacks = config, callbacks
        self._scratch = Scratch()

    def launch(self, jobs: Jobs) -> Sequence[JobReturn]:
        """Run every job; returns their return values in the order of the jobs."""
        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        Path(str(self._config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        bench = workbench(self._config.store, self._config.rerun)
        is_new = partial(self.is_new, jobs)
        portions = _portions(jobs, bench, self.first_points, is_new)
        finished: dict[int, JobReturn] = {}
        with Tracker(Tracking.of(self._config.tracking)) as tracker:
            unfinished = _leave_out_finished(portions, jobs, bench, finished)
            completed = dict(self.complete(jobs, unfinished, bench, tracker))
        returned = finished | completed
        return [returned[number] for number in range(len(jobs))]

    def complete(
        self, jobs: Jobs, portions: Iterable[Portion], bench: Workbench, tracker: Tracker
    ) -> Iterator[tuple[int, JobReturn]]:
        """Merge points and run them as jobs; yields what each returned, by its index among the jobs."""
        for points in portions:
            for number, result in _merge(points, bench):
                job = jobs.compose(number, self._scratch)
                yield number, self.run(job, points[number], result, tracker)

    def run(
        self, job: Composed, point: PointOrError, result: Merged | Exception | None, tracker: Tracker
    ) -> JobReturn:
        """Run a point with the result of its merge as a job."""
        task = partial(run_point, point=point, result=result, tracker=tracker)
        returned = run_job(job, task, self._callbacks)
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        returned.cfg = returned.hydra_cfg = None  # as large as all else of the point
        return returned

    def is_new(self, jobs: Jobs, index: int) -> bool:
        """Whether nothing was recorded of a job yet; true where its folder has a name of the user's."""
        return not Path(str(self._config.hydra.sweep.dir), str(jobs.numbers[index]), RUN_FILE).is_file()


def _portions(
    jobs: Jobs, bench: Workbench, first_points: int | None, is_new: Callable[[int], bool]
) -> Iterator[Portion]:
    """Yield the signed points: all together, or those of a large sweep in portions, the new ones first.

    Of a thousand points the first ones are merged and shown while the user still looks, and a sweep that goes
    on begins with what is missing. Where points are saved, all of them are needed to see whether there is
    room, and those that race are compared with each other.
    """

    def prepared(numbers: Sequence[int]) -> dict[int, PointOrError]:
        return {number: _attempt(_prepare, job) for number, job in jobs.in_turn(numbers)}

    numbers = list(range(len(jobs)))
    if first_points is None or len(jobs) <= MANY_POINTS:
        yield _sign(prepared(numbers), bench)
        return
    numbers.sort(key=lambda number: not is_new(number))
    first, others = prepared(numbers[:first_points]), numbers[first_points:]
    points = [point for point in first.values() if isinstance(point, Point)]
    if any(point.output is not None or point.scoring.race for point in points):
        first, others = first | prepared(others), []
    yield _sign(first, bench)
    for start in range(0, len(others), POINTS_AT_ONCE):
        yield _sign(prepared(others[start : start + POINTS_AT_ONCE]), bench)


def _leave_out_finished(
    portions: Iterable[Portion], jobs: Jobs, bench: Workbench, finished: dict[int, JobReturn]
) -> Iterator[Portion]:
    """Yield portions without the points that have nothing left to do, whose returns go into `finished`."""
    looked_up = 0
    for points in portions:
        unfinished = {}
        for number, point in points.items():
            if isinstance(point, Point) and (record := _finished_record(point, bench)):
                finished[number] = as_returned(jobs.overrides[number], record)
            else:
                unfinished[number] = point
        looked_up += len(points)
        if finished and looked_up == len(jobs):
            stdout.print(
                f"{len(finished)} of {counted(len(jobs), 'point')} "
                f"{'is' if len(finished) == 1 else 'are'} there already"
            )
        bench.pace.begin()
        yield unfinished


def _sign(points: Mapping[int, PointOrError], bench: Workbench) -> dict[int, PointOrError]:
    """Sign points, reading each input once."""
    files = [path for point in points.values() if isinstance(point, Point) for path in point.files.values()]
    try:
        with hashing_bar(files) as advance:
            contents_of(files, advance)
    except CheckpointError:
        pass  # each point that needs the file reports it
    return {
        number: _attempt(bench.sign, point) if isinstance(point, Point) else point
        for number, point in points.items()
    }


def _prepare(job: Composed) -> Point:
    folder = enter(job.config)
    load_plugins(job.written.get("plugins") or ())
    point = prepare_job(job.config, folder, job.written)
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
    has_model = point.saved is None or record.has_model
    race = point.scoring.race
    is_whole = record.dropped is None or (race is not None and record.race == json_ready(asdict(race), repr))
    is_done = record.finished and is_same and has_model and is_whole
    return record if is_done and _is_judged_alike(record, point.scoring) else None


def _is_judged_alike(record: Record, scoring: Scoring) -> bool:
    """Whether points are chosen by the numbers that a record names."""
    judged_by = (record.metric, record.direction, record.objectives)
    return not scoring.evaluations or judged_by == (
        scoring.metric,
        scoring.direction,
        dict(scoring.objectives),
    )


def as_returned(overrides: Sequence[str], record: Record) -> JobReturn:
    """The return value of the job that wrote a record."""
    returned = JobReturn(overrides=list(overrides), status=JobStatus.COMPLETED)
    returned.return_value = record.metrics.get(record.metric or "")
    return returned


def _merge(points: Mapping[int, PointOrError], bench: Workbench) -> Iterator[tuple[int, Merged | Exception]]:
    """Yield the result of each point, by its number, as soon as it is there; stored results come first."""
    missing: dict[str, tuple[int, Point]] = {}
    repeated: list[tuple[int, Point]] = []
    bench.fetch(point for point in points.values() if isinstance(point, Point))
    recalled = {number: recall(point, bench) for number, point in points.items()}
    for number, point in points.items():
        if isinstance(point, Point) and isinstance(result := recalled[number], Merged):
            bench.measurements.start(point, result)
    bench.measurements.race(_stored_results(points, recalled))
    for number, point in points.items():
        if (result := recalled[number]) is not None:
            yield number, result
            continue
        assert isinstance(point, Point)  # an error is recalled as itself
        if missing.setdefault(point.digest, (number, point)) != (number, point):
            repeated.append((number, point))
    for point, result in bench.merge([point for _, point in missing.values()], progress_bar):
        yield missing[point.digest][0], result
    for number, point in repeated:  # the same merge as another point, stored by now unless there is no store
        if result := recall(point, bench):
            yield number, result
        else:
            yield from ((number, result) for _, result in bench.merge([point], progress_bar))


def _stored_results(
    points: Mapping[int, PointOrError], recalled: Mapping[int, Merged | Exception | None]
) -> dict[Point, Merged | Exception]:
    """The stored results by point; of points with one signature only the first has one."""
    by_digest: dict[str, tuple[Point, Merged | Exception]] = {}
    for number, point in points.items():
        if isinstance(point, Point) and (result := recalled[number]) is not None:
            by_digest.setdefault(point.digest, (point, result))
    return dict(by_digest.values())


def recall(point: PointOrError, bench: Workbench) -> Merged | Exception | None:
    if not isinstance(point, Point):
        return point
    try:
        return bench.recall(point)
    except MechaError as error:
        return error
