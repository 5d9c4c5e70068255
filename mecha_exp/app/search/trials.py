"""The trials of a search, and the file in its folder that keeps them before they are run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mecha_exp.app.search.samplers import Sampler
from mecha_exp.app.search.space import Parameters, Space
from mecha_exp.documents import DocumentError, read_json, typed
from mecha_exp.errors import ConfigError
from mecha_exp.evaluation.racing import Dropped
from mecha_exp.system.atomic_write import atomic_write_text

TRIALS_FILE = "trials.json"
"""The file of a sweep's folder with the trials that were asked for; what they gave is in their records."""
AT_RANDOM, KNOWN, ENQUEUED = "at_random", "known", "enqueued"
"""Entries of a trial's state: it was drawn at random, known before the search, or given to begin with."""

Values = tuple[float, ...]
"""The values of the objectives, in their order."""
Outcome = Values | Dropped | None
"""The outcome of a trial: values, or what it had when it was dropped; None if it failed."""


@dataclass(frozen=True)
class Trial:
    """A trial that was asked for.

    Attributes:
        parameters: its values by key.
        state: what Optuna's sampler keeps of it, such as the distribution of CMA-ES.
        values: of the objectives; None before it has run, and where it failed or was dropped.
        running: whether a process is to run it, or does.
        dropped: what it was measured on before it was dropped; None of one that was not.
    """

    parameters: Parameters
    state: Mapping[str, Any] = field(default_factory=dict)
    values: Values | None = None
    running: bool = False
    dropped: Dropped | None = None

    @property
    def outcome(self) -> Outcome:
        """The values of the trial, also of one that was dropped; None if it failed or has not run."""
        return self.values if self.dropped is None else self.dropped

    def told(self, outcome: Outcome) -> Trial:
        """The trial after it has run."""
        if isinstance(outcome, Dropped):
            return replace(self, values=None, running=False, dropped=outcome)
        return replace(self, values=outcome, running=False, dropped=None)


@dataclass(frozen=True)
class _Entry:
    parameters: dict[str, Any]
    state: dict[str, Any]


@dataclass(frozen=True)
class _Content:
    """The content of the file; earlier versions did not name the sampler."""

    space: Any
    trials: list[_Entry]
    sampler: str = ""


def read_trials(folder: Path, space: Space, sampler: Sampler) -> list[Trial]:
    """The trials that earlier starts have asked for, without values; none where there is no file.

    Raises:
        ConfigError: they are of another space or sampler, or the file is damaged.
    """
    path = folder / TRIALS_FILE
    if not path.exists():
        return []
    try:
        content = typed(read_json(path), _Content)
    except (OSError, DocumentError) as error:
        raise ConfigError(f"{path} is damaged: {error}. Delete it to search anew.") from None
    chosen_by = content.sampler or str(sampler)
    if content.space != space.description:
        raise ConfigError(
            f"{path} has the trials of another space. Choose another folder with hydra.sweep.dir=..., or "
            "delete that file."
        )
    if chosen_by != str(sampler):
        raise ConfigError(
            f"{path} has the trials of {chosen_by}, and this search is by {sampler}. Choose another folder "
            "with hydra.sweep.dir=..., or delete that file."
        )
    return [Trial(entry.parameters, entry.state) for entry in content.trials]


def write_trials(folder: Path, space: Space, sampler: Sampler, trials: Sequence[Trial]) -> None:
    """Write all trials, atomically and before the last ones are run: a start after a kill repeats those."""
    entries = [{"parameters": trial.parameters, "state": trial.state} for trial in trials]
    content = {"space": space.description, "sampler": str(sampler), "trials": entries}
    atomic_write_text(folder / TRIALS_FILE, json.dumps(content))
