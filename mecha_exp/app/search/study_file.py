"""The study in a file of the sweep's folder, written behind the search, for `optuna-dashboard` and others."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mecha_exp.app.search.shared_study import POINT
from mecha_exp.app.search.space import Space
from mecha_exp.app.search.study import frozen_trial, outcome_of
from mecha_exp.app.search.trials import Trial
from mecha_exp.system.optuna_log import quiet_optuna

if TYPE_CHECKING:
    import optuna

log = logging.getLogger(__name__)

STUDY_FILE = "study.log"
"""The study in the sweep's folder, a journal of Optuna's."""


class StudyFile:
    """A study which receives each trial when it has run.

    Nothing is read from it, so a search does not depend on it: an error while it is written is a warning.
    """

    def __init__(self, space: Space, study: optuna.Study) -> None:
        self._space, self._study = space, study
        trials = study.get_trials(deepcopy=False)
        self._written = {(trial.user_attrs.get(POINT), outcome_of(trial)) for trial in trials}
        self._is_broken = False

    def write(self, trials: Sequence[Trial]) -> None:
        """Add the trials that are not in it."""
        try:
            with quiet_optuna():
                for number, trial in enumerate(trials):
                    if (number, trial.outcome) not in self._written and not self._is_broken:
                        self._study.add_trial(frozen_trial(self._space, trial, user_attrs={POINT: number}))
                        self._written.add((number, trial.outcome))
        except Exception as error:  # of a file system, of any kind
            self._is_broken = True
            log.warning("the study is not written any more: %s", error)


def open_study_file(folder: Path, name: str, space: Space, directions: Sequence[str]) -> StudyFile:
    """Open or make the study file in a sweep's folder, which this process alone uses.

    A file that a kill has left in the middle of a line is made anew, and its lock goes.
    """
    path = folder / STUDY_FILE
    path.with_name(f"{STUDY_FILE}.lock").unlink(missing_ok=True)
    try:
        return _open(path, name, space, directions)
    except Exception:  # the file was cut by a kill
        path.unlink(missing_ok=True)
        return _open(path, name, space, directions)


def _open(path: Path, name: str, space: Space, directions: Sequence[str]) -> StudyFile:
    import optuna
    from optuna.storages.journal import JournalFileBackend

    with quiet_optuna():
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(path)))
        study = optuna.create_study(
            storage=storage, study_name=name, directions=directions, load_if_exists=True
        )
        if [d.name.lower() for d in study.directions] != list(directions):
            raise ValueError("the study in the file is for other directions")
        return StudyFile(space, study)
