"""`hydra/launcher=onepass`: the points of a sweep are merged together, then each is one of Hydra's jobs.

A launcher is given all jobs at once. This one composes them, looks up what is known, merges the rest in as
few passes as they fit, and after each pass lets Hydra run its points as jobs, with folder, log, callbacks and
return value, where they are measured and tracked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus, configure_log, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from mecha_exp.app.hydra.jobs import compose_jobs, enter
from mecha_exp.app.point import Point, prepare, resolve
from mecha_exp.app.run import Prepared
from mecha_exp.app.workbench import Entry, Result, Workbench, workbench
from mecha_exp.errors import CheckpointError, ConfigError, MechaError
from mecha_exp.lab.content_hash import contents_of
from mecha_exp.plugins import load_plugins
from mecha_exp.runs.record import Record
from mecha_exp.terminal import hashing_bar, progress_bar, stdout


class OnePassLauncher(Launcher):
    """Merges all points of a sweep in one pass, or in as few as memory allows."""

    _config: DictConfig
    _context: HydraContext
    _run_point: Callable[..., Any]  # of a configuration, and of what was prepared for it

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Remember what every job has in common."""
        self._context, self._run_point, self._config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run every job; returns what each gave, in their order."""
        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        Path(str(self._config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        bench = workbench(self._config.store, self._config.rerun)
        loader = self._context.config_loader
        jobs = [_Job(c) for c in compose_jobs(loader, self._config, job_overrides, initial_job_idx)]
        _prepare(jobs, bench)
        returned: dict[int, JobReturn] = {}
        for number, job in enumerate(jobs):
            if (done := job.returned_before(bench)) is not None:
                returned[number] = done
        if returned:
            stdout.print(f"{len(returned)} of {len(jobs)} points are there already")
        waiting = [number for number in range(len(jobs)) if number not in returned]
        for number, prepared in _make(jobs, waiting, bench):
            returned[number] = self._run(jobs[number], prepared)
            del prepared  # it may hold a model, for which the next wave needs the memory
        return [returned[number] for number in range(len(jobs))]

    def _run(self, job: _Job, prepared: Prepared) -> JobReturn:
        returned = run_job(
            task_function=partial(self._run_point, prepared=prepared),
            config=job.config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
            hydra_context=self._context,
        )
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        return returned


class _Job:
    """One of Hydra's jobs on its way from overrides to a result."""

    def __init__(self, config: DictConfig) -> None:
        self.config = config
        self.point: Point | None = None
        self.entry: Entry | None = None
        self.error: MechaError | None = None

    @property
    def digest(self) -> str:
        """Of its signature."""
        return self.entry.digest if self.entry else ""

    def prepare(self) -> list[Path]:
        """Build the recipe; returns its files."""
        self._folder = enter(self.config)
        try:
            load_plugins(self.config.get("plugins") or ())
            self.point = prepare(resolve(self.config), self._folder)
            return list(self.point.files.values())
        except MechaError as error:
            self.error = error
            return []

    def enter(self, bench: Workbench) -> None:
        """Find its signature."""
        if self.error is None and self.point is not None:
            try:
                self.entry = bench.enter(self.point, self._folder)
            except MechaError as error:
                self.error = error

    def returned_before(self, bench: Workbench) -> JobReturn | None:
        """What the job returned when its folder was written, if there is nothing left to do in it."""
        if self.entry is None or bench.redoes_everything:
            return None
        try:
            record = Record.load(self._folder)
        except ConfigError:  # there is none yet, or half of one
            return None
        measured = [evaluation.key for evaluation in self.entry.scoring.evaluations]
        if not record.finished or (record.signature, record.evaluations) != (self.entry.digest, measured):
            return None
        if self.entry.point.output is not None and not record.has_model:
            return None
        returned = JobReturn(overrides=list(self.config.hydra.overrides.task), status=JobStatus.COMPLETED)
        returned.return_value = record.metrics.get(record.metric or "")
        return returned


def _prepare(jobs: Sequence[_Job], bench: Workbench) -> None:
    """Build the recipes and find the signatures, reading each input once."""
    files = [path for job in jobs for path in job.prepare()]
    try:
        with hashing_bar(files) as advance:
            contents_of(files, advance)
    except CheckpointError:
        pass  # each point that needs the file says so
    for job in jobs:
        job.enter(bench)


def _make(jobs: Sequence[_Job], numbers: Sequence[int], bench: Workbench) -> Iterator[tuple[int, Prepared]]:
    """Each job with its result, as soon as it is there; those that are known come first."""
    missing: dict[str, int] = {}
    repeated: list[int] = []
    for number in numbers:
        prepared = _recall(jobs[number], bench)
        if prepared is not None:
            yield number, prepared
        elif missing.setdefault(jobs[number].digest, number) != number:
            repeated.append(number)
    yield from _merge(jobs, list(missing.values()), bench)
    for number in repeated:  # the same merge as another one, which is known by now
        prepared = _recall(jobs[number], bench)
        if prepared is not None:
            yield number, prepared
        else:  # nothing is remembered
            yield from _merge(jobs, [number], bench)


def _merge(jobs: Sequence[_Job], numbers: Sequence[int], bench: Workbench) -> Iterator[tuple[int, Prepared]]:
    entries = [entry for number in numbers if (entry := jobs[number].entry) is not None]

    def prepared(made: tuple[int, Result | Exception]) -> tuple[int, Prepared]:
        place, result = made
        return numbers[place], Prepared(entries[place], result)

    # no variable may hold a model while the next wave is made
    yield from map(prepared, bench.make(entries, progress_bar))


def _recall(job: _Job, bench: Workbench) -> Prepared | None:
    if job.entry is None:
        return Prepared(None, job.error or ConfigError("there is no such point."))
    try:
        found = bench.recall(job.entry)
    except MechaError as error:
        return Prepared(job.entry, error)
    return Prepared(job.entry, found) if found else None
