"""A study in a storage, which one or several processes search together.

The study is the truth: it says which trials there are, who runs each, in which folder, and what it gave. A
process asks for trials, or takes over those of a process that has died, while it alone holds the study's
lock. So there are never more trials than were asked for, and two processes never run the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mecha_exp.app.search.locks import Locks, new_worker
from mecha_exp.app.search.space import Space
from mecha_exp.app.search.study import frozen_trial, outcome_of
from mecha_exp.app.search.trials import Outcome, Trial
from mecha_exp.errors import MechaError, StoreError, first_line
from mecha_exp.system.optuna_log import quiet_optuna

if TYPE_CHECKING:
    import optuna

POINT, WORKER, FOLDER = "point", "worker", "folder"
"""Attributes of a trial in a storage: its number, and the process and the folder that run it."""
_REPORTED = "mecha_exp_reported"

Ask = Callable[[Sequence[Trial], int], Sequence[Trial]]
"""Asks a sampler for a number of trials after those so far."""


@dataclass(frozen=True)
class Entry:
    """A trial of the study.

    Attributes:
        number: of its point.
        trial: its parameters, and its values where it has run.
        folder: of the sweep that runs it, or has.
        worker: the process that does.
        key: its number in the storage.
    """

    number: int
    trial: Trial
    folder: str
    worker: str
    key: int


class SharedStudy:
    """A study of Optuna's in a storage, with the locks of the processes that share it.

    Raises:
        StoreError: the storage does not answer any more; from any method.
    """

    def __init__(
        self,
        space: Space,
        study: optuna.Study,
        locks: Locks,
        url: str,
        mend: Callable[[], None] = lambda: None,
    ) -> None:
        self._space, self._study, self._locks, self._url, self._mend = space, study, locks, url, mend
        self.worker = new_worker()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Let other processes know that this one is at work."""
        with self._errors_named():
            self._locks.enter(self.worker)
        try:
            yield
        finally:
            self._locks.leave()

    def resume(self, folder: Path, total: int) -> list[Entry]:
        """The trials of an earlier start in a folder; those that have not run are this process's again."""
        with self._exclusive():
            ours = [e for e in self._entries() if e.folder == str(folder.absolute()) and e.number < total]
            for entry in ours:
                if entry.trial.running:
                    self._take(entry, folder)
            return ours

    def claim(
        self, folder: Path, total: int, count: int, ask: Ask, find: Callable[[Entry], Outcome]
    ) -> list[Entry]:
        """Trials to run: those that a dead process has left, or else new ones; none where all are taken.

        Args:
            folder: of this process's sweep.
            total: how many trials the search has.
            count: how many new ones at most.
            ask: asks the sampler.
            find: what a dead process has measured of a trial and not told.
        """
        with self._exclusive():
            entries = [entry for entry in self._entries() if entry.number < total]
            taken_over = []
            for entry in entries:
                if not entry.trial.running or self._locks.is_alive(entry.worker):
                    continue
                if (outcome := find(entry)) is not None:
                    self._finish(entry, outcome)
                    continue
                self._take(entry, folder)
                taken_over.append(entry)
            if taken_over or len(entries) >= total:
                return taken_over
            trials = [entry.trial for entry in self._entries()]
            new_trials = ask(trials, min(count, total - len(trials)))
            return [
                self._add(number, replace(trial, running=True), folder)
                for number, trial in enumerate(new_trials, len(trials))
            ]

    def tell(self, measured: Mapping[int, Outcome], folder: Path) -> None:
        """Write down what the trials of this process gave, by the numbers of their points.

        None stands for one that failed. A trial that another process has taken over is left to that one.
        """
        with self._exclusive():
            for entry in self._entries():
                if entry.number not in measured or entry.folder != str(folder.absolute()):
                    continue
                outcome = measured[entry.number]
                if entry.trial.running and entry.worker == self.worker:
                    self._finish(entry, outcome)
                elif not entry.trial.running and outcome not in (None, entry.trial.outcome):
                    self._add(entry.number, entry.trial.told(outcome), folder)

    def closes(self, folder: Path, total: int) -> bool:
        """Whether all trials have run and this process is the one that reports them."""
        with self._exclusive():
            entries = [entry for entry in self._entries() if entry.number < total]
            if len(entries) < total or any(entry.trial.running for entry in entries):
                return False
            before = self._study.user_attrs.get(_REPORTED) or {}
            ours = {"trials": total, FOLDER: str(folder.absolute()), WORKER: self.worker}
            if before.get("trials") == total and before[FOLDER] != ours[FOLDER]:
                is_done = (Path(before[FOLDER]) / "sweep.csv").exists()
                if is_done or self._locks.is_alive(before[WORKER]):
                    return False
            self._study.set_user_attr(_REPORTED, ours)
            return True

    def begin(self, find_known: Callable[[], Sequence[Trial]], folder: Path) -> None:
        """Begin a study that has no trials yet with those that are known; this process has them all."""
        with self._exclusive():
            if not self._entries():
                for number, trial in enumerate(find_known()):
                    self._add(number, replace(trial, running=True), folder)

    def entries(self) -> list[Entry]:
        """The trials of the study, each as it was told last, in the order of their numbers."""
        with self._exclusive():
            return self._entries()

    def _entries(self) -> list[Entry]:
        by_number: dict[int, Entry] = {}
        for frozen in self._study.get_trials(deepcopy=False):
            attributes = frozen.user_attrs
            if POINT in attributes:  # not one that another program has added
                number = attributes[POINT]
                place = str(attributes.get(FOLDER, "")), str(attributes.get(WORKER, ""))
                by_number[number] = Entry(number, _trial_of(frozen), *place, frozen._trial_id)
        return [by_number[number] for number in sorted(by_number)]

    def _take(self, entry: Entry, folder: Path) -> None:
        storage = self._study._storage
        for name, value in ((WORKER, self.worker), (FOLDER, str(folder.absolute()))):
            storage.set_trial_user_attr(entry.key, name, value)

    def _add(self, number: int, trial: Trial, folder: Path) -> Entry:
        place = str(folder.absolute()), self.worker
        attributes: dict[str, Any] = {POINT: number, FOLDER: place[0], WORKER: place[1]}
        frozen = frozen_trial(self._space, trial, user_attrs=attributes, system_attrs=dict(trial.state))
        key = self._study._storage.create_new_trial(self._study._study_id, frozen)
        return Entry(number, trial, *place, key)

    def _finish(self, entry: Entry, outcome: Outcome) -> None:
        ended = frozen_trial(self._space, entry.trial.told(outcome))
        storage = self._study._storage
        for step, value in ended.intermediate_values.items():
            storage.set_trial_intermediate_value(entry.key, step, value)
        storage.set_trial_state_values(entry.key, ended.state, ended.values)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        with self._errors_named(), quiet_optuna(), self._locks.exclusive():
            self._mend()
            yield

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except (MechaError, AssertionError):  # of the block itself
            raise
        except Exception as error:  # of a database, of any kind
            raise StoreError(
                f"sweep.storage={self._url} does not answer any more: {first_line(error)}. What has been "
                "measured is kept; the same command goes on."
            ) from error


def _trial_of(frozen: optuna.trial.FrozenTrial) -> Trial:
    trial = Trial(dict(frozen.params), dict(frozen.system_attrs))
    return trial.told(outcome_of(frozen)) if frozen.state.is_finished() else replace(trial, running=True)
