"""Find runs and sweeps by folder, signature, MLflow id, name, or conditions on what they recorded."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mecha_exp.errors import ConfigError
from mecha_exp.numbers import is_number
from mecha_exp.paths import OUTPUTS
from mecha_exp.runs.environment import differs_from_here
from mecha_exp.runs.record import RUN_FILE, Record, read_recipe
from mecha_exp.runs.sweep import SWEEP_FILE, Sweep
from mecha_exp.runs.values import as_text, parse_value

SHORT = 12
"""The number of characters of a signature that are shown; `MIN_PREFIX` of them are enough to name a run."""
MIN_PREFIX = 4
_GATHERED = tuple(OUTPUTS / name for name in ("multiruns", "runs"))
"""The folders whose sub-folders can be named without a path."""
_COMPARISONS = ("!=", ">=", "<=", "=", ">", "<")


@dataclass(frozen=True)
class Run:
    """A run on disk.

    Attributes:
        folder: of the run.
        record: of `run.json` in that folder.
    """

    folder: Path
    record: Record

    @property
    def signature(self) -> str:
        """The hash of everything that decides the result's bytes; empty if the run failed early."""
        return self.record.tags.get("signature", "")

    @property
    def measured(self) -> float | None:
        """The value of the run's main metric, or None."""
        return self.record.metrics.get(self.record.metric or "")

    @property
    def made_with(self) -> tuple[str, ...]:
        """What a finished run was made with that is otherwise here; see `differs_from_here`."""
        return differs_from_here(self.record.tags) if self.record.finished else ()

    @property
    def recipe(self) -> str:
        """The text of its recipe; see `read_recipe`."""
        return read_recipe(self.folder)

    def value(self, name: str) -> Any:
        """The value of `status`, `name`, a parameter, a metric, a tag or an override; otherwise None."""
        record = self.record
        if name in ("status", "name"):
            return getattr(record, name)
        for values in (record.parameters, record.metrics, record.tags):
            if name in values:
                return values[name]
        return parse_value(self._settings[name]) if name in self._settings else None

    @property
    def names(self) -> set[str]:
        """Every name that `value` knows."""
        record = self.record
        return {"status", "name", *record.parameters, *record.metrics, *record.tags, *self._settings}

    @property
    def _settings(self) -> dict[str, str]:
        return dict(o.lstrip("+").partition("=")[::2] for o in self.record.overrides)


def short_folder(folder: Path) -> str:
    """A folder's short name, which verbs accept: without `outputs/runs` or `outputs/multiruns`."""
    parent = next((parent for parent in _GATHERED if folder.is_relative_to(parent)), None)
    return (folder.relative_to(parent) if parent else folder).as_posix()


def _folder_named(word: str, marker: str) -> Path | None:
    """The folder that a word names, by its path or its short name, if it holds the file `marker`."""
    candidates = [Path(word), *(parent / word for parent in _GATHERED)] if word else []
    return next((folder for folder in candidates if (folder / marker).is_file()), None)


def find_runs(folders: Iterable[Path]) -> list[Run]:
    """Every run below the folders, the newest first; damaged records are left out."""
    runs = [
        Run(folder, record) for folder in _folders_with(RUN_FILE, folders) if (record := Record.find(folder))
    ]
    return sorted(runs, key=lambda run: run.record.started, reverse=True)


def find_sweeps(folders: Iterable[Path]) -> list[tuple[Path, Sweep]]:
    """Every sweep below the folders, the newest first."""
    sweeps = [
        (folder, sweep) for folder in _folders_with(SWEEP_FILE, folders) if (sweep := Sweep.find(folder))
    ]
    return sorted(sweeps, key=lambda pair: (pair[0] / SWEEP_FILE).stat().st_mtime, reverse=True)


def find_run(word: str, folders: Sequence[Path] = (OUTPUTS,)) -> Run:
    """The run that a word names: by its folder, the beginning of its signature, its MLflow id, or its name.

    Runs with equal signatures have the same result: the newest finished one is returned.

    Raises:
        ConfigError: no run matches, or runs with different signatures do.
    """
    if folder := _folder_named(word, RUN_FILE):
        return Run(folder, Record.load(folder))
    if _folder_named(word, SWEEP_FILE):
        raise ConfigError(
            f"{word} is a sweep. Name one of its points, as in {Path(word) / '0'}; "
            f"`python -m mecha_exp table {word}` shows all, and compares it with other sweeps."
        )
    runs = find_runs(folders)
    named = [run for run in runs if word in (run.record.name, run_id_of(run.record))]
    if not named and len(word) >= MIN_PREFIX:
        named = [run for run in runs if run.signature.startswith(word)]
    signatures = {run.signature for run in named}
    if len(signatures) > 1:
        listed = ", ".join(f"{run.signature[:SHORT]} ({run.folder})" for run in named[:5])
        raise ConfigError(
            f"'{word}' means several runs: {listed}. Give more of the signature, or the folder."
        )
    if not named:
        where = ", ".join(map(str, folders))
        names = [run.record.name for run in runs]
        raise ConfigError(f"there is no run '{word}' below {where}.{_nearest(word, names, 'ls')}")
    return next((run for run in named if run.record.status == "FINISHED"), named[0])


def _nearest(word: str, names: Iterable[str], verb: str) -> str:
    """A hint for an unknown name: similar names, or else the verb that lists all."""
    known = sorted(set(names))
    near = [name for name in known if word in name] or difflib.get_close_matches(word, known, cutoff=0.6)
    listed = " or ".join(f"'{name}'" for name in near[:3])
    return f" Did you mean {listed}?" if near else f" `python -m mecha_exp {verb}` lists what there is."


def find_sweep(word: str | None, folders: Sequence[Path] = (OUTPUTS,)) -> tuple[Path, Sweep]:
    """The sweep that a word names, by its folder or its title; without a word the newest.

    Raises:
        ConfigError: no sweep matches.
    """
    if folder := _folder_named(word or "", SWEEP_FILE):
        return folder, Sweep.load(folder)
    sweeps = find_sweeps(folders)
    matches = [pair for pair in sweeps if word in (None, pair[1].title, pair[0].name)]
    if not matches:
        titles = {sweep.title for _, sweep in sweeps}
        named = f"sweep '{word}'" if word else "sweep"
        hint = _nearest(word, titles, "ls --sweeps") if word and titles else ""
        raise ConfigError(f"there is no {named} below {', '.join(map(str, folders))}.{hint}")
    return matches[0]


def run_id_of(record: Record) -> str:
    """The id of a record's MLflow run; empty where it has none."""
    return str(getattr(record, "run_id", None) or "")


@dataclass(frozen=True)
class Filter:
    """A condition such as `alpha>0.3`, `method=ties`, `status=FAILED`.

    Attributes:
        name: of a parameter, a metric, a tag, `status` or `name`.
        comparison: one of = != < <= > >=.
        value: the other side of the comparison, as text.
    """

    name: str
    comparison: str
    value: str

    @classmethod
    def parse(cls, text: str) -> Filter:
        """Read a condition from a word of the command line.

        Raises:
            ConfigError: the word has no comparison, or nothing to compare with.
        """
        for comparison in _COMPARISONS:
            name, separator, value = text.partition(comparison)
            if separator and name and value.strip() and value[0] not in "=<>!":
                return cls(name.strip(), comparison, value.strip())
        raise ConfigError(
            f"'{text}' is not a condition. Write it as alpha>0.3, method=ties or status=FAILED."
        )

    def holds(self, run: Run) -> bool:
        """Whether a run meets the condition; a run that lacks the name does not."""
        actual, expected = run.value(self.name), parse_value(self.value)
        if actual is None:
            return False
        if self.comparison in ("=", "!="):
            same = (
                actual == expected
                if is_number(actual) and is_number(expected)
                else as_text(actual) == self.value
            )
            return same == (self.comparison == "=")
        if not is_number(actual) or not is_number(expected):
            return False
        less, equal = bool(actual < expected), bool(actual == expected)
        return {"<": less, "<=": less or equal, ">": not less and not equal, ">=": not less}[self.comparison]


def _folders_with(name: str, folders: Iterable[Path]) -> Iterator[Path]:
    seen = set()
    for start in folders:
        for path, subfolders, files in os.walk(start):
            subfolders[:] = [
                f for f in subfolders if not f.startswith(".") and f not in ("mlartifacts", "store")
            ]
            if name in files and (folder := Path(path)).resolve() not in seen:
                seen.add(folder.resolve())
                yield folder
