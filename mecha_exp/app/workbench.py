"""What is known of a point is looked up, what is missing is made and measured, and both are kept.

workbench.enter(point)     its signature, and what measures it
workbench.recall(entry)    the result that is known, if there is one that can be trusted
workbench.make(entries)    the others, in as few passes as they fit
workbench.measure(...)     the evaluators' numbers, those that are known among them
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from mecha_exp.app import provenance
from mecha_exp.app.batch import Made, Progress, Wanted, make
from mecha_exp.app.point import Point
from mecha_exp.engine import Plan, plan
from mecha_exp.engine.provenance import KEY, Origin
from mecha_exp.errors import ConfigError, MechaError, MergeError, StoreError, did_you_mean
from mecha_exp.evaluation import Evaluation, Scoring
from mecha_exp.evaluation.scoring import load_state_dict
from mecha_exp.lab.content_hash import content_of, contents_of, size_of
from mecha_exp.lab.signature import Signature
from mecha_exp.lab.store import ModelFile, ResultStore, StoredMerge
from mecha_exp.system.machine import available_cores

log = logging.getLogger(__name__)

RERUN = ("never", "failed", "always")
"""What is done again: nothing, points that failed, everything."""


@dataclass(frozen=True)
class Entry:
    """A point that is about to be made or found.

    Attributes:
        point: what it is.
        folder: of its run.
        signature: of its result.
        scoring: what measures it.
        contents: the SHA-256 of each of its files.
    """

    point: Point
    folder: Path
    signature: Signature
    scoring: Scoring
    contents: Mapping[Path, str]

    @functools.cached_property
    def digest(self) -> str:
        """The signature's hash."""
        return self.signature.digest

    @property
    def origin(self) -> Origin:
        """What the model's file says of where it comes from."""
        point = self.point
        origin = Origin.of(point.recipe, point.options, point.dtype)
        return replace(
            origin,
            inputs=self.signature.inputs,
            output=point.output_settings,
            methods=self.signature.methods,
        )


@dataclass(frozen=True)
class Result:
    """The merge of a point.

    Attributes:
        kept: what is known of it.
        model: where it can be loaded from; None where there is no model any more, or none is needed.
        found: whether it was known before.
    """

    kept: StoredMerge
    model: Path | Mapping[str, torch.Tensor] | None
    found: bool


def workbench(store: str | None, rerun: str) -> Workbench:
    """The workbench of this process, for a store in the current folder.

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
    """Finds and makes results; `store` None remembers nothing."""

    def __init__(self, store: ResultStore | None, rerun: str) -> None:
        self.store = store
        self._rerun = rerun
        self._scorings: dict[tuple[object, ...], Scoring] = {}
        self._inputs: dict[tuple[str, str], dict[str, float]] = {}
        self._is_warned = False
        self._warning = Lock()

    @property
    def redoes_everything(self) -> bool:
        """Whether what is known does not count."""
        return self._rerun == "always"

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to recall."""
        return self.store is None or self.redoes_everything or not self.store.places()

    def enter(self, point: Point, folder: Path, contents: Mapping[Path, str] | None = None) -> Entry:
        """Find out what identifies a point, and what measures it.

        Args:
            point: what it is.
            folder: of its run.
            contents: the SHA-256 of each of its files; else they are read, where they are not remembered.

        Raises:
            MechaError: an input that is not there, an evaluator that cannot measure it.
        """
        contents = contents_of(point.files.values()) if contents is None else contents
        return Entry(point, folder, point.signature(contents), self.scoring(point), contents)

    def scoring(self, point: Point, planned: Plan | None = None) -> Scoring:
        """What measures a point. Points with the same inputs and methods have keys of the same shapes.

        Args:
            point: what it is.
            planned: its merge; else that is planned here, where no point like it was met before.

        Raises:
            MechaError: an input that is not there, an evaluator that cannot measure it.
        """
        method = getattr(point.recipe, "method", None)
        settings = repr((point.config["evaluator"], point.config.get("plugins"), point.options.on_missing))
        place = (method, settings, *point.files.values())
        if place not in self._scorings:
            with nullcontext(planned) if planned else plan([point.job({})], point.options) as known:
                shapes = {key: shape for key, (_, shape) in known.layouts[0].items()}
            self._scorings[place] = point.scoring(shapes)
        return self._scorings[place]

    def recall(self, entry: Entry) -> Result | None:
        """The result that is known, with the model where it is needed; None where it must be made.

        Raises:
            MergeError: the point failed before, and that is not to be tried again.
        """
        if self.store is None or self.redoes_everything:
            return None
        failure = self.store.failure(entry.digest)
        if failure is not None and self._rerun == "never":
            raise MergeError(f"{failure}\n(It failed before. rerun=failed tries it again.)")
        kept = self.store.find(entry.digest)
        kept = kept.renamed(list(entry.point.names.values())) if kept else None
        if kept is None or (entry.point.wants_statistics and not kept.statistics):
            return None
        wanted = entry.point.output
        if wanted is None and self._is_measured(entry):
            return Result(kept, None, True)
        if kept.model is None or not kept.model.is_intact():
            return None
        path = Path(kept.model.path)
        if entry.point.names_its_output and path != wanted:
            return None
        return Result(kept, path, True)

    def make(self, entries: Sequence[Entry], progress: Progress) -> Iterator[tuple[int, Result | Exception]]:
        """Merge points in as few passes as they fit; each by its place, as soon as it is there.

        A model in memory is the caller's: drop it before asking for the next result.
        """
        wanted = [
            Wanted(entry.point, bool(entry.scoring.evaluations), {KEY: entry.origin.text()})
            for entry in entries
        ]
        for outcome in make(wanted, progress):
            with _pool() as pool:  # models are hashed, and known, while those before them are being measured
                results = {
                    place: pool.submit(self._result, entries[place], outcome.pop(place))
                    for place in list(outcome)
                }
                for place in list(results):
                    yield place, results.pop(place).result()

    def measure(self, entry: Entry, result: Result) -> dict[str, float]:
        """Every evaluator's numbers, those that are known from the store.

        Raises:
            EvaluationError: an evaluator failed.
        """
        measured: dict[str, float] = {}
        model = result.model
        for evaluation in entry.scoring.evaluations:
            known = self._known(evaluation.key, entry.digest)
            if known is None:
                if model is None:
                    raise MergeError("the model was not kept, so it cannot be measured. Use rerun=always.")
                model = model if entry.scoring.timeout is not None else load_state_dict(model)
                full = entry.scoring.measure_one(evaluation, model)
                known = {name.removeprefix(evaluation.prefix): value for name, value in full.items()}
                if self.store:
                    self._remember(self.store.keep_evaluation, evaluation.key, known, entry.digest)
            measured.update({evaluation.prefix + name: value for name, value in known.items()})
        return measured

    def measure_inputs(self, entry: Entry) -> dict[str, dict[str, float]]:
        """The same numbers of each input that is a model, by its name; none where it cannot be measured."""
        found = {}
        for node, path in entry.point.files.items():
            if node.merge_space == "weight" and entry.scoring.evaluations:
                found[entry.point.names[node]] = self._measure_input(entry, path)
        return found

    def note_failure(self, entry: Entry, error: str) -> None:
        """Remember that a point failed, if that is not why it was not tried."""
        if self.store and not (self._rerun == "never" and self.store.failure(entry.digest)):
            self._remember(self.store.fail, entry.digest, error)

    def forgive(self, entry: Entry) -> None:
        """Forget that a point failed."""
        if self.store:
            self.store.forgive(entry.digest)

    def _result(self, entry: Entry, made: Made | Exception) -> Result | Exception:
        """What a point came to, written into the store."""
        if isinstance(made, Exception):
            return made
        output = entry.point.output
        file = ModelFile(str(output), content_of(output), size_of(output)) if output else None
        before = self.store.find(entry.digest) if self.store else None
        kept = StoredMerge(
            entry.digest,
            entry.signature.parts,
            list(entry.point.names.values()),
            made.metrics,
            made.statistics,
            list(made.warnings),
            provenance.environment(),
            file or (before.model if before else None),
            str(entry.folder),
            time.time_ns() // 1_000_000,
        )
        if self.store:
            self._remember(self.store.keep, kept)
        return Result(kept, output or made.state_dict, False)

    def _remember(self, write: Callable[..., None], *values: Any, **more: Any) -> None:
        """Write into the store; where that fails the result is good all the same, and it is said once."""
        try:
            write(*values, **more)
        except StoreError as error:
            with self._warning:
                log.log(logging.DEBUG if self._is_warned else logging.WARNING, "%s", error)
                self._is_warned = True

    def _is_measured(self, entry: Entry) -> bool:
        return all(self._known(e.key, entry.digest) is not None for e in entry.scoring.evaluations)

    def _known(self, evaluation: str, digest: str) -> dict[str, float] | None:
        return (
            self.store.evaluation(evaluation, digest) if self.store and not self.redoes_everything else None
        )

    def _measure_input(self, entry: Entry, path: Path) -> dict[str, float]:
        measured: dict[str, float] = {}
        content = entry.contents[path]
        for evaluation in entry.scoring.evaluations:
            place = (evaluation.key, content)
            if place not in self._inputs:
                known = self.store.evaluation(evaluation.key, content=content) if self.store else None
                self._inputs[place] = self._measure_new(entry, evaluation, path) if known is None else known
            measured.update({evaluation.prefix + n: v for n, v in self._inputs[place].items()})
        return measured

    def _measure_new(self, entry: Entry, evaluation: Evaluation, path: Path) -> dict[str, float]:
        try:
            full = entry.scoring.measure_one(evaluation, path)
        except MechaError as error:
            log.warning("the input %s cannot be measured for comparison: %s", path, error)
            return {}
        measured = {name.removeprefix(evaluation.prefix): value for name, value in full.items()}
        if self.store:
            content = entry.contents[path]
            self._remember(self.store.keep_evaluation, evaluation.key, measured, content=content)
        return measured


@contextmanager
def _pool() -> Iterator[ThreadPoolExecutor]:
    """Threads that end, with what nobody has begun left undone, when nobody waits for them any more."""
    pool = ThreadPoolExecutor(available_cores())
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
