"""Points that are handed out in shares, and the records that workers have written of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from hydra.core.utils import JobReturn

from mecha_exp.app.batch import group_by_options
from mecha_exp.app.config.jobs import Jobs
from mecha_exp.app.launchers.onepass import as_returned
from mecha_exp.app.point import Point
from mecha_exp.app.tracking import EndedRun, Tracker
from mecha_exp.cluster.shares import Handout
from mecha_exp.cluster.workers import LostWorker
from mecha_exp.errors import ConfigError
from mecha_exp.runs.record import FAILED, Record
from mecha_exp.runs.sweep import Sweep
from mecha_exp.terminal.console import show_error
from mecha_exp.terminal.pace import show_point


@dataclass(frozen=True)
class _Given:
    """A point that workers have.

    Attributes:
        index: of its job.
        folder: of the point.
        replaced: the MLflow run of the record that was in the folder before.
    """

    index: int
    folder: Path
    replaced: str | None


class SharedPoints:
    """Points of a sweep on workers: hands them out, then shows and tracks what comes back.

    Args:
        jobs: all jobs of the sweep.
        handout: hands out the numbers of points.
        count: how many shares are made of the points of one call of `give`.
        sweep: the sweep.
        tracker: logs the runs.
        note: called when a point has ended, with the number of points that workers still have; returns the
            seconds that the rest of the sweep will take.
    """

    def __init__(
        self,
        jobs: Jobs,
        handout: Handout,
        count: int,
        sweep: Sweep,
        tracker: Tracker,
        note: Callable[[int], float],
    ) -> None:
        self._jobs, self._handout, self._count = jobs, handout, count
        self._sweep, self._tracker, self._note = sweep, tracker, note
        self._given: dict[int, _Given] = {}

    def give(self, points: Mapping[int, Point]) -> None:
        """Hand out points, by the indices of their jobs."""
        numbers = self._jobs.numbers
        for index, point in points.items():
            self._given[numbers[index]] = _Given(index, point.folder, _run_id_in(point.folder))
        shares = cut_shares(points, self._count)
        self._handout.give([[numbers[index] for index in share] for share in shares])

    def ended(
        self, lose: Callable[[int, LostWorker], JobReturn], *, so_far: bool = False
    ) -> Iterator[tuple[int, JobReturn]]:
        """Yield what the jobs of points return, by their indices, as they end.

        Args:
            lose: runs the job of a point that has cost too many workers.
            so_far: whether to stop at those that have not ended yet, rather than wait for them.
        """
        for number, lost in self._handout.ended(so_far=so_far):
            given = self._given.pop(number)
            seconds_left = self._note(len(self._given))
            if lost is not None:
                yield given.index, lose(given.index, lost)
            else:
                yield given.index, self._take(number, given, seconds_left)

    def _take(self, number: int, given: _Given, seconds_left: float) -> JobReturn:
        """Show and track a point that a worker has run; returns what its job would have returned."""
        record = Record.load(given.folder)
        if record.status == FAILED and record.error:
            show_error(f"{record.name}: {record.error.strip().splitlines()[-1]}")
        show_point(record, number + 1, self._sweep.points, seconds_left=seconds_left)
        if self._sweep.parent_run is not None:
            self._tracker.add(EndedRun(given.folder, record, self._sweep.parent_run, given.replaced))
        return as_returned(self._jobs.overrides[given.index], record)


def _run_id_in(folder: Path) -> str | None:
    """The MLflow run of the record that is in a folder already."""
    try:
        return Record.load(folder).run_id
    except ConfigError:
        return None


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
