"""Looks up the results of points, merges and measures what is missing, and stores it.

point = workbench.sign(point)     compute its signature, find its evaluators
workbench.recall(point)           its result from the store, if that can be trusted
workbench.merge(points)           merge the others, in as few passes as possible
workbench.measurements            the evaluators' numbers, from the store where it has them
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

from torch import Tensor

from mecha_exp.app import provenance
from mecha_exp.app.batch import NOT_FINITE, Merged, Progress, merge_points
from mecha_exp.app.measurements import Measurements
from mecha_exp.app.point import Point
from mecha_exp.checkpoint.remote import is_address
from mecha_exp.engine import Plan, plan
from mecha_exp.errors import ConfigError, MechaError, MergeError, StoreError, did_you_mean
from mecha_exp.evaluation import Scoring
from mecha_exp.lab.bucket import open_store
from mecha_exp.lab.content_hash import content_of, size_of
from mecha_exp.lab.store import ResultStore
from mecha_exp.lab.stored_results import ModelFile, StoredMerge
from mecha_exp.system.cores import available_cores
from mecha_exp.terminal.pace import Pace

log = logging.getLogger(__name__)

RERUN = ("never", "failed", "evaluate", "always")
"""The choices of `rerun`: nothing, points that failed, these and all measurements, everything."""


def workbench(store: str | None, rerun: str) -> Workbench:
    """The workbench of this process for a store in the current folder.

    Raises:
        ConfigError: an unknown `rerun`.
        StoreError: the store was written by a newer version.
    """
    if store not in (None, "") and not is_address(str(store)):
        store = str(Path(str(store)).absolute())  # of a number, too, which is a folder's name to YAML
    return _workbench(store, rerun)


@functools.cache
def _workbench(store: str | None, rerun: str) -> Workbench:
    if rerun not in RERUN:
        raise ConfigError(f"rerun={rerun}: there is no such choice.{did_you_mean(str(rerun), RERUN)}")
    return Workbench(open_store(store) if store else None, rerun)


class Workbench:
    """Finds and makes the results of points; with `store` None nothing is stored."""

    def __init__(self, store: ResultStore | None, rerun: str) -> None:
        self.store = store
        self._rerun = rerun
        self._scorings: dict[tuple[object, ...], Scoring] = {}
        self.measurements = Measurements(store, self._write, is_fresh=self.measures_again)
        self.pace = Pace()
        self._said: set[str] = set()
        self._is_warned = False
        self._warning = Lock()

    @property
    def redoes_everything(self) -> bool:
        """Whether stored results are ignored."""
        return self._rerun == "always"

    @property
    def measures_again(self) -> bool:
        """Whether stored measurements are ignored."""
        return self._rerun in ("evaluate", "always")

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to recall."""
        return self.store is None or self.redoes_everything or not self.store.points()

    def sign(self, point: Point) -> Point:
        """A copy of a point that has its evaluators and its signature.

        Raises:
            MechaError: an input is missing, or an evaluator cannot measure the model.
        """
        signed = replace(point, scoring=self.scoring(point))
        _ = signed.signature  # reads the inputs whose hashes are not cached
        return signed

    def scoring(self, point: Point, planned: Plan | None = None) -> Scoring:
        """The evaluators of a point. Points with equal inputs and methods have keys of equal shapes.

        Args:
            point: the point.
            planned: its plan; without it the point is planned here, unless one like it was met before.

        Raises:
            MechaError: an input is missing, or an evaluator cannot measure the model.
        """
        method = getattr(point.recipe, "method", None)
        settings = repr((point.config["evaluator"], point.config.get("plugins"), point.options.on_missing))
        kind = (method, settings, *point.files.values())
        if kind not in self._scorings:
            with nullcontext(planned) if planned else plan([point.job({})], point.options) as its_plan:
                self._scorings[kind] = point.read_scoring(its_plan)
        return self._scorings[kind]

    def recall(self, point: Point) -> Merged | None:
        """The stored result of a signed point, with the model if it is needed; None if it must be merged.

        Raises:
            MergeError: the point failed before and is not to be tried again.
        """
        if self.store is None or self.redoes_everything:
            return None
        failure = self.store.failure(point.digest, point.scoring.keys.values())
        if failure is not None and self._rerun == "never":
            raise MergeError(f"{failure}\n(It failed before. rerun=failed tries it again.)")
        stored = self.store.get(point.digest)
        if stored is None or (point.wants_statistics and not stored.statistics):
            return None
        if point.saved is None and self.measurements.are_stored(point):
            return _recalled(stored, point, None)
        if stored.model is None or not stored.model.is_intact():
            return None
        path = Path(stored.model.path)
        if point.names_its_output and path != point.saved:
            return None
        if point.adapter is None:
            return _recalled(stored, point, path)
        is_measured = self.measurements.are_stored(point)
        return _recalled(stored, point, None if is_measured else point.adapter.model(path))

    def merge(
        self, points: Sequence[Point], progress: Progress
    ) -> Iterator[tuple[Point, Merged | Exception]]:
        """Merge signed points in as few passes as possible; yields each result as soon as it is there.

        The model of a result is released when the next result is requested.
        """
        self.measurements.begin_workers(points)
        for outcomes in merge_points(points, progress):
            with _thread_pool() as pool:  # models are hashed and stored while others are being measured
                finished = [
                    (point, pool.submit(self._finish, point, result)) for point, result in outcomes.items()
                ]
                if any(point.scoring.race for point in outcomes):
                    self.measurements.race({point: future.result() for point, future in finished})
                for number, (point, future) in enumerate(finished, 1):
                    result = future.result()
                    for following, coming in finished[number : number + 1]:
                        if coming.done() and not coming.exception():
                            self.measurements.expect(following, coming.result())
                    yield point, result
                    if isinstance(result, Merged):
                        result.release()

    def fetch(self, points: Iterable[Point]) -> None:
        """Load the stored results of signed points in one go."""
        if self.store is not None:
            self.store.fetch(point.digest for point in points)

    def flush(self) -> None:
        """Wait until the store has everything."""
        if self.store is not None:
            self._write(self.store.flush)

    def begin(self) -> None:
        """Forget what earlier commands of this process measured: files may have changed since."""
        self._scorings.clear()
        self._said.clear()
        self.measurements.begin()
        self.pace = Pace()

    def is_news(self, warning: str) -> bool:
        """Whether a warning is to be said: about inputs once for all points, about outputs for each."""
        is_known = warning in self._said and not warning.endswith(NOT_FINITE)
        self._said.add(warning)
        return not is_known

    def note_failure(self, point: Point, error: str, evaluation: str = "") -> None:
        """Store that a point or one of its evaluations failed, unless that is why it was not tried."""
        if self.store is None:
            return
        if self._rerun == "never" and self.store.failure(point.digest, point.scoring.keys.values()):
            return
        self._write(self.store.put_failure, point.digest, error, evaluation)

    def clear_failure(self, point: Point) -> None:
        """Forget that a point failed: its merge, or one of its evaluations."""
        if self.store:
            self._write(self.store.clear_failure, point.digest, point.scoring.keys.values())

    def _finish(self, point: Point, result: Merged | Exception) -> Merged | Exception:
        """Begin to measure a result, hash its model, and store it."""
        if isinstance(result, Exception):
            return result
        try:
            _write_adapter(point, result)
        except MechaError as error:
            return error
        self.measurements.start(point, result)
        if path := point.saved:
            result.file = ModelFile(str(path), content_of(path), size_of(path))
        elif self.store and (earlier := self.store.get(point.digest)):
            result.file = earlier.model
        result.tags = provenance.environment()
        if self.store:
            self._write(self.store.put, _to_store(point, result))
        return result

    def _write(self, put: Callable[..., None], *values: Any, **more: Any) -> None:
        """Write to the store. If that fails, the result is still good: warn once and go on."""
        try:
            put(*values, **more)
        except StoreError as error:
            with self._warning:
                log.log(logging.DEBUG if self._is_warned else logging.WARNING, "%s", error)
                self._is_warned = True


def _write_adapter(point: Point, result: Merged) -> None:
    """Write the adapter of a point that has one; what is measured is then the base with it."""
    if point.adapter is None:
        return
    assert isinstance(result.model, Mapping)
    result.metrics |= point.adapter.write(result.model)
    result.model = point.adapter.model(point.adapter.path) if point.scoring.evaluations else None


def _recalled(stored: StoredMerge, point: Point, model: Path | Mapping[str, Tensor] | None) -> Merged:
    """A stored merge as the result of a point, whose inputs may have other file names now."""
    stored = stored.renamed(list(point.names.values()))
    return Merged(
        stored.metrics, stored.statistics, stored.warnings, model, stored.model, stored.tags, is_recalled=True
    )


def _to_store(point: Point, merged: Merged) -> StoredMerge:
    return StoredMerge(
        point.digest,
        point.signature.parts,
        list(point.names.values()),
        merged.metrics,
        merged.statistics,
        list(merged.warnings),
        dict(merged.tags),
        merged.file,
        str(point.folder),
        time.time_ns() // 1_000_000,
    )


@contextmanager
def _thread_pool() -> Iterator[ThreadPoolExecutor]:
    """A pool that cancels its pending work when it is left."""
    pool = ThreadPoolExecutor(available_cores())
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
