"""The study as a file or in a database, written behind the search, for `optuna-dashboard` and others."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mecha_exp.app.search.samplers import quiet_optuna
from mecha_exp.app.search.space import Space
from mecha_exp.app.search.study import frozen_trial
from mecha_exp.app.search.trials import Trial
from mecha_exp.errors import ConfigError

if TYPE_CHECKING:
    import optuna

log = logging.getLogger(__name__)

STUDY_FILE = "study.log"
"""The study in the sweep's folder, a journal of Optuna's."""
_SPACE, _POINT = "mecha_exp_space", "point"


class StoredStudy:
    """A study in a storage of Optuna's, which receives each trial when it has run.

    Nothing is read from it, so a search does not depend on it: an error while it is written is a warning.
    """

    def __init__(self, space: Space, study: optuna.Study) -> None:
        self._space, self._study = space, study
        with quiet_optuna():
            trials = study.get_trials(deepcopy=False)
        self._written = {(t.user_attrs.get(_POINT), tuple(t.values) if t.values else None) for t in trials}
        self._is_broken = False

    def write(self, trials: Sequence[Trial]) -> None:
        """Add the trials that are not in it."""
        try:
            with quiet_optuna():
                for number, trial in enumerate(trials):
                    if (number, trial.values) not in self._written and not self._is_broken:
                        self._study.add_trial(frozen_trial(self._space, trial, user_attrs={_POINT: number}))
                        self._written.add((number, trial.values))
        except Exception as error:  # of a database, of any kind
            self._is_broken = True
            log.warning("the study is not written any more: %s", error)


def open_storage(url: str, name: str, space: Space, directions: Sequence[str]) -> StoredStudy:
    """Open or make the study of a name in a database, or in a journal file.

    Args:
        url: of a database, as SQLAlchemy has them, or the path of a journal file.
        name: of the study.
        space: what is searched.
        directions: `maximize` or `minimize`, for each objective.

    Raises:
        ConfigError: it cannot be reached, or has another study of that name.
    """
    return _open(lambda: _storage(url), url, name, space, directions)


def open_study_file(folder: Path, name: str, space: Space, directions: Sequence[str]) -> StoredStudy:
    """Open or make the study file in a sweep's folder, which this process alone uses.

    A file that a kill has left in the middle of a line is made anew, and its lock goes.
    """
    path = folder / STUDY_FILE
    path.with_name(f"{STUDY_FILE}.lock").unlink(missing_ok=True)
    try:
        return _open(lambda: _storage(str(path)), str(path), name, space, directions)
    except ConfigError:
        path.unlink(missing_ok=True)
        return _open(lambda: _storage(str(path)), str(path), name, space, directions)


def _open(
    make: Callable[[], optuna.storages.BaseStorage],
    url: str,
    name: str,
    space: Space,
    directions: Sequence[str],
) -> StoredStudy:
    import optuna

    try:
        with quiet_optuna():
            study = optuna.create_study(
                storage=make(), study_name=name, directions=directions, load_if_exists=True
            )
            trials, described = study.get_trials(deepcopy=False), study.user_attrs.get(_SPACE)
            if described is None and not trials:
                described = json.dumps(space.description)
                study.set_user_attr(_SPACE, described)
            stored = [d.name.lower() for d in study.directions]
    except Exception as error:  # of a database, of any kind
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"sweep.storage={url} cannot be reached: {reason}") from None
    if described != json.dumps(space.description) or stored != list(directions):
        raise ConfigError(
            f"sweep.storage={url}: its study '{name}' searches another space, or for another direction. Give "
            "this search another name with name=..., or choose another storage."
        )
    return StoredStudy(space, study)


def _storage(url: str) -> optuna.storages.BaseStorage:
    import optuna
    from optuna.storages.journal import JournalFileBackend

    if "://" in url:
        return optuna.storages.RDBStorage(url)
    if not Path(url).absolute().parent.is_dir():
        raise OSError(f"there is no folder {Path(url).absolute().parent}")
    return optuna.storages.JournalStorage(JournalFileBackend(url))
