"""Looks up the results of points, merges and measures what is missing, and stores it.

point = workbench.sign(point)     compute its signature, find its evaluators
workbench.recall(point)           its result from the store, if that can be trusted
workbench.merge(points)           merge the others, in as few passes as possible
workbench.measure(point, merged)  the evaluators' numbers, from the store where it has them
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

from mecha_exp.app import provenance
from mecha_exp.app.batch import Merged, Progress, merge_points
from mecha_exp.app.point import Point
from mecha_exp.engine import Plan, plan
from mecha_exp.errors import ConfigError, MechaError, MergeError, StoreError, did_you_mean
from mecha_exp.evaluation import Evaluation, Scoring
from mecha_exp.evaluation.scoring import load_state_dict
from mecha_exp.lab.content_hash import content_of, size_of
from mecha_exp.lab.store import ModelFile, ResultStore, StoredMerge
from mecha_exp.system.machine import available_cores

log = logging.getLogger(__name__)

RERUN = ("never", "failed", "always")
"""Which points are merged again: none, those that failed, all."""


def workbench(store: str | None, rerun: str) -> Workbench:
    """The workbench of this process for a store in the current folder.

    Raises:
        ConfigError: an unknown `rerun`.
        StoreError: the store was written by a newer version.
    """
    return _workbench(Path(store).absolute() if store else None, rerun)


@functools.cache
def _workbench(store: Path | None, rerun: str) -> Workbench:
    if rerun not in RERUN:
        raise ConfigError(f"rerun={rerun}: there is no such choice.{did_you_mean(str(rerun), RERUN)}")
    return Workbench(ResultStore(store) if store else None, rerun)


class Workbench:
    """Finds and makes the results of points; with `store` None nothing is stored."""

    def __init__(self, store: ResultStore | None, rerun: str) -> None:
        self.store = store
        self._rerun = rerun
        self._scorings: dict[tuple[object, ...], Scoring] = {}
        self._inputs: dict[tuple[str, str], dict[str, float]] = {}
        self._is_warned = False
        self._warning = Lock()

    @property
    def redoes_everything(self) -> bool:
        """Whether stored results are ignored."""
        return self._rerun == "always"

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
                shapes = {key: shape for key, (_, shape) in its_plan.layouts[0].items()}
            self._scorings[kind] = point.read_scoring(shapes)
        return self._scorings[kind]

    def recall(self, point: Point) -> Merged | None:
        """The stored result of a signed point, with the model if it is needed; None if it must be merged.

        Raises:
            MergeError: the point failed before and is not to be tried again.
        """
        if self.store is None or self.redoes_everything:
            return None
        failure = self.store.failure(point.digest)
        if failure is not None and self._rerun == "never":
            raise MergeError(f"{failure}\n(It failed before. rerun=failed tries it again.)")
        stored = self.store.get(point.digest)
        if stored is None or (point.wants_statistics and not stored.statistics):
            return None
        if point.output is None and self._is_measured(point):
            return _recalled(stored, point, None)
        if stored.model is None or not stored.model.is_intact():
            return None
        path = Path(stored.model.path)
        if point.names_its_output and path != point.output:
            return None
        return _recalled(stored, point, path)

    def merge(
        self, points: Sequence[Point], progress: Progress
    ) -> Iterator[tuple[Point, Merged | Exception]]:
        """Merge signed points in as few passes as possible; yields each result as soon as it is there.

        The model of a result is released when the next result is requested.
        """
        for outcomes in merge_points(points, progress):
            with _thread_pool() as pool:  # models are hashed and stored while others are being measured
                finished = [
                    (point, pool.submit(self._finish, point, result)) for point, result in outcomes.items()
                ]
                for point, future in finished:
                    result = future.result()
                    yield point, result
                    if isinstance(result, Merged):
                        result.release()

    def measure(self, point: Point, merged: Merged) -> dict[str, float]:
        """The numbers of all evaluators, from the store where it has them.

        Raises:
            EvaluationError: an evaluator failed.
        """
        measured: dict[str, float] = {}
        model = merged.model
        for evaluation in point.scoring.evaluations:
            numbers = self._measurement(evaluation.key, point.digest)
            if numbers is None:
                if model is None:
                    raise MergeError("the model was not kept, so it cannot be measured. Use rerun=always.")
                model = model if point.scoring.timeout is not None else load_state_dict(model)
                numbers = _without_prefix(evaluation, point.scoring.measure_one(evaluation, model))
                if self.store:
                    self._write(self.store.put_evaluation, evaluation.key, numbers, point.digest)
            measured.update({evaluation.prefix + name: value for name, value in numbers.items()})
        return measured

    def measure_inputs(self, point: Point) -> dict[str, dict[str, float]]:
        """The evaluators' numbers of each input model, by its name; empty where it cannot be measured."""
        return {
            point.names[node]: self._measure_input(point, path)
            for node, path in point.files.items()
            if node.merge_space == "weight" and point.scoring.evaluations
        }

    def note_failure(self, point: Point, error: str) -> None:
        """Store that a point failed, unless it was not tried because it had failed before."""
        if self.store and not (self._rerun == "never" and self.store.failure(point.digest)):
            self._write(self.store.put_failure, point.digest, error)

    def clear_failure(self, point: Point) -> None:
        """Forget that a point failed."""
        if self.store:
            self.store.clear_failure(point.digest)

    def _finish(self, point: Point, result: Merged | Exception) -> Merged | Exception:
        """Hash the model of a result, and store the result."""
        if isinstance(result, Exception):
            return result
        if path := point.output:
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

    def _is_measured(self, point: Point) -> bool:
        return all(self._measurement(e.key, point.digest) is not None for e in point.scoring.evaluations)

    def _measurement(self, evaluation: str, digest: str) -> dict[str, float] | None:
        if self.store is None or self.redoes_everything:
            return None
        return self.store.evaluation(evaluation, digest)

    def _measure_input(self, point: Point, path: Path) -> dict[str, float]:
        measured: dict[str, float] = {}
        content = point.contents[path]
        for evaluation in point.scoring.evaluations:
            key = (evaluation.key, content)
            if key not in self._inputs:
                numbers = self.store.evaluation(evaluation.key, content=content) if self.store else None
                self._inputs[key] = (
                    self._measure_anew(point, evaluation, path) if numbers is None else numbers
                )
            measured.update({evaluation.prefix + n: v for n, v in self._inputs[key].items()})
        return measured

    def _measure_anew(self, point: Point, evaluation: Evaluation, path: Path) -> dict[str, float]:
        try:
            numbers = _without_prefix(evaluation, point.scoring.measure_one(evaluation, path))
        except MechaError as error:
            log.warning("the input %s cannot be measured for comparison: %s", path, error)
            return {}
        if self.store:
            self._write(self.store.put_evaluation, evaluation.key, numbers, content=point.contents[path])
        return numbers


def _recalled(stored: StoredMerge, point: Point, model: Path | None) -> Merged:
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


def _without_prefix(evaluation: Evaluation, numbers: dict[str, float]) -> dict[str, float]:
    return {name.removeprefix(evaluation.prefix): value for name, value in numbers.items()}


@contextmanager
def _thread_pool() -> Iterator[ThreadPoolExecutor]:
    """A pool that cancels its pending work when it is left."""
    pool = ThreadPoolExecutor(available_cores())
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
