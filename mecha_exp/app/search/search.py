"""A search as the batches of a sweep: asks for trials, has them run, reads their values from the records."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from mecha_exp.app.config.jobs import Batch
from mecha_exp.app.search.samplers import Sampler
from mecha_exp.app.search.shared_study import Entry, SharedStudy
from mecha_exp.app.search.space import Parameters, Space
from mecha_exp.app.search.study import next_trials
from mecha_exp.app.search.study_file import open_study_file
from mecha_exp.app.search.trials import (
    AT_RANDOM,
    ENQUEUED,
    KNOWN,
    TRIALS_FILE,
    Outcome,
    Trial,
    read_trials,
    write_trials,
)
from mecha_exp.errors import ConfigError, counted
from mecha_exp.evaluation.racing import Dropped
from mecha_exp.lab.points import Setting
from mecha_exp.runs.record import RACE, RUN_FILE, Record
from mecha_exp.runs.sweep import Sweep

_MODELS = ("model", "model.safetensors", "*.mecha-*")
"""The large files in the folder of a run, which stay where they are."""


@dataclass(frozen=True)
class Search:
    """A search that has been checked.

    Attributes:
        space: what is searched.
        sampler: what chooses the trials.
        trials: how many there are in all.
        batch: how many are asked for at a time.
        objectives: the metrics that decide, each with its direction.
        enqueued: the parameters of the first trials.
        words: makes the overrides of a point from what it sets.
        shared: the study in the storage that was asked for; None for one in the sweep's folder.
        title: the name of the study.
        find_known: finds the results that the search begins with.
    """

    space: Space
    sampler: Sampler
    trials: int
    batch: int
    objectives: Mapping[str, str]
    enqueued: Sequence[Parameters]
    words: Callable[[Setting], list[str]]
    shared: SharedStudy | None
    title: str
    find_known: Callable[[], list[Trial]] = list

    @property
    def notes(self) -> Sequence[str]:
        """Empty: there is nothing to say before the search runs."""
        return ()

    def check_folder(self, folder: Path) -> None:
        """Check that a folder has no search of another space or sampler.

        Raises:
            ConfigError: it has.
        """
        if read_trials(folder, self.space, self.sampler) and self.shared is not None:
            raise ConfigError(
                f"{folder / TRIALS_FILE} has the trials of a search without sweep.storage. Choose another "
                "folder with hydra.sweep.dir=..., or delete that file."
            )

    def at_work(self) -> AbstractContextManager[None]:
        """Let the other processes of a shared study know that this one searches, or reports."""
        return nullcontext() if self.shared is None else self.shared.at_work()

    def batches(self, folder: Path) -> Iterator[Batch]:
        """Yield the points of the search in batches; one has run in `folder` when the next is requested.

        The trials that an earlier start has asked for come first. Those of them that have run are found.

        Raises:
            StoreError: the storage of a shared study does not answer any more.
        """
        return self._batches(folder) if self.shared is None else self._shared_batches(folder, self.shared)

    def _batches(self, folder: Path) -> Iterator[Batch]:
        trials = read_trials(folder, self.space, self.sampler)
        if not trials and (trials := self.find_known()):
            write_trials(folder, self.space, self.sampler, trials)
        total = self._note_total(trials, folder)
        trials = trials[:total]
        if trials:
            yield self._batch(trials, 0)
            trials = self._measured(trials, folder, 0)
        stored = open_study_file(folder, self.title, self.space, [*self.objectives.values()])
        stored.write(trials)
        while (start := len(trials)) < total:
            new_trials = self._ask(trials, min(self.batch, total - start))
            write_trials(folder, self.space, self.sampler, [*trials, *new_trials])
            yield self._batch(new_trials, start)
            trials = [*trials, *self._measured(new_trials, folder, start)]
            stored.write(trials)

    def _shared_batches(self, folder: Path, study: SharedStudy) -> Iterator[Batch]:
        study.begin(self.find_known, folder)
        total = self._note_total([entry.trial for entry in study.entries()], folder)
        entries = study.resume(folder, total)
        while True:
            for run in _in_runs(entries):
                yield self._batch([entry.trial for entry in run], run[0].number)
            measured = {e.number: self._outcome(folder / str(e.number)) for e in entries}
            if measured:
                study.tell(measured, folder)
            entries = study.claim(folder, total, self.batch, self._ask, self._untold)
            if not entries:
                return

    def _note_total(self, trials: Sequence[Trial], folder: Path) -> int:
        """The number of points with the known ones, which is written into the sweep's file."""
        known = sum(KNOWN in trial.state for trial in trials)
        total = int(min(self.trials + known, self.space.size))
        sweep = Sweep.load(folder)
        sweep.points = total
        sweep.save(folder)
        return total

    def _ask(self, trials: Sequence[Trial], count: int) -> list[Trial]:
        directions = [*self.objectives.values()]
        known = sum(KNOWN in trial.state for trial in trials)
        return next_trials(self.space, self.sampler, directions, trials, count, self.enqueued, known)

    def _batch(self, trials: Sequence[Trial], first: int) -> Batch:
        return Batch([self.words(self.space.setting(trial.parameters)) for trial in trials], first)

    def _measured(self, trials: Sequence[Trial], folder: Path, first: int) -> list[Trial]:
        """The trials with what the records of their points say."""
        return [trial.told(self._outcome(folder / str(first + i))) for i, trial in enumerate(trials)]

    def _outcome(self, folder: Path) -> Outcome:
        record = Record.find(folder)
        if record is None:
            return None
        reached = record.dropped
        names = self.objectives if reached is None else [f"{RACE}{record.metric}"]
        values = tuple(record.metrics.get(name, math.nan) for name in names)
        if not record.finished or not all(map(math.isfinite, values)):
            return None
        return values if reached is None else Dropped(reached, *values)

    def _untold(self, entry: Entry) -> Outcome:
        """The outcome that a process measured before it died; None where its folder cannot be seen."""
        folder = Path(entry.folder) / str(entry.number)
        return self._outcome(folder) if self._is_of(entry, folder) else None

    def _is_of(self, entry: Entry, folder: Path) -> bool:
        """Whether a folder has the record of a trial."""
        try:
            overrides = {word.lstrip("+") for word in Record.load(folder).overrides}
        except ConfigError:
            return False
        setting = self.space.setting(entry.trial.parameters)
        return all(f"{key.lstrip('+')}={text}" in overrides for key, text in setting.items())

    def note_origins(self, sweep: Sweep, folder: Path) -> None:
        """Note in a sweep which trials were drawn at random, and with which ones the search began."""
        if self.shared is not None:
            states = {e.number: e.trial.state for e in self.shared.entries()}
        else:
            states = {n: trial.state for n, trial in enumerate(read_trials(folder, self.space, self.sampler))}
        sweep.at_random = [n for n, state in states.items() if AT_RANDOM in state]
        sweep.given = [n for n, state in states.items() if KNOWN in state or ENQUEUED in state]

    def collect(self, folder: Path) -> str | None:
        """Copy the runs of other processes into a sweep's folder, once all trials of a shared study have run.

        One process does that, the last one. Saved models stay where they are.

        Returns:
            None where the folder has all trials now; else a sentence on what it lacks, and why.
        """
        if self.shared is None:
            return None
        points = Sweep.load(folder).points
        entries = [entry for entry in self.shared.entries() if entry.number < points]
        others = [entry for entry in entries if entry.folder != str(folder.absolute())]
        total = (
            f"{len(entries) - len(others)} of {counted(points, 'trial')} of the study '{self.title}' ran here"
        )
        if not self.shared.closes(folder, points):
            return f"{total}. The process that ends last has the table of all of them."
        for entry in others:
            if self._is_of(entry, run := Path(entry.folder) / str(entry.number)):
                ignored = shutil.ignore_patterns(*_MODELS)
                shutil.copytree(run, folder / run.name, ignore=ignored, dirs_exist_ok=True)
        missing = [e for e in others if not (folder / str(e.number) / RUN_FILE).is_file()]
        if not missing:
            return None
        places = ", ".join(dict.fromkeys(entry.folder for entry in missing))
        return f"{total}, and {len(missing)} in folders that cannot be seen from here: {places}."


def _in_runs(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Trials in runs whose numbers follow each other."""
    run: list[Entry] = []
    for entry in entries:
        if run and entry.number != run[-1].number + 1:
            yield run
            run = []
        run.append(entry)
    if run:
        yield run
