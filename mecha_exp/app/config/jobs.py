"""The configurations of the points of a sweep, each made when it is asked for.

Hydra composes a configuration from its files in some tenths of a second. So it is composed once for each
choice of files, and the values that differ are set on a copy.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override, OverrideType
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict, read_write

from mecha_exp.app.config.overrides import decides_files, note_task, parse_override, set_values

Choice = tuple[str, ...]
"""The overrides that choose the files of a configuration."""


@dataclass(frozen=True)
class Batch:
    """Points that are run together.

    Attributes:
        jobs: the overrides of each.
        first: the number of the first one; those of the others follow.
    """

    jobs: Sequence[Sequence[str]]
    first: int = 0


@dataclass(frozen=True)
class Jobs:
    """The configurations of jobs, each made when it is asked for, and all of what a worker needs for that.

    A configuration is a hundred times as large as the words that it comes from.

    Attributes:
        overrides: of each job.
        numbers: of each job in its sweep.
        bases: a pickled configuration without the values of points for each choice of files, which is read
            six times as fast as it is copied.
        groups: the names of all groups.
    """

    overrides: Sequence[Sequence[str]]
    numbers: Sequence[int]
    bases: Mapping[Choice, bytes]
    groups: frozenset[str]

    def __len__(self) -> int:
        return len(self.overrides)

    def __getitem__(self, index: int) -> DictConfig:
        """The configuration of a job, as Hydra composes it for a sweep, with its number."""
        return self._compose(index, Scratch())

    def in_turn(self, indices: Iterable[int]) -> Iterator[tuple[int, DictConfig]]:
        """Jobs with their configurations; each may become the next one (see `Scratch`)."""
        scratch = Scratch()
        return ((index, self._compose(index, scratch)) for index in indices)

    def part(self, indices: Sequence[int]) -> Jobs:
        """Some of the jobs."""
        overrides = [self.overrides[index] for index in indices]
        choices = {choice_of(words, self.groups) for words in overrides}
        bases = {choice: self.bases[choice] for choice in choices}
        return Jobs(overrides, [self.numbers[index] for index in indices], bases, self.groups)

    def _compose(self, index: int, scratch: Scratch) -> DictConfig:
        words = self.overrides[index]
        parsed = [parse_override(word) for word in words]
        values = [o for o in parsed if not decides_files(o, self.groups)]
        job = scratch.compose(self.bases[choice_of(words, self.groups)], values)
        note_task(job, parsed)
        with open_dict(job):
            job.hydra.job.id = job.hydra.job.num = self.numbers[index]
        return job


def choice_of(words: Sequence[str], groups: frozenset[str]) -> Choice:
    """The overrides that choose files, of those of a job."""
    return tuple(word for word in words if decides_files(parse_override(word), groups))


class Scratch:
    """A configuration that becomes that of one point after another, as long as plain values alone differ.

    Making one anew takes longer than most of what a plan does with it.
    """

    def __init__(self) -> None:
        self._config = DictConfig({})
        self._pickled = b""
        self._values: Sequence[Override] = ()

    def compose(self, pickled: bytes, values: Sequence[Override]) -> DictConfig:
        """The configuration of a point: that of the last one where setting what differs makes it.

        Args:
            pickled: the configuration without values, which is read six times as fast as it is copied.
            values: of the point.

        Raises:
            ConfigError: a value cannot be set; see `set_values`.
        """
        to_set = self._differing(values) if self._pickled == pickled else None
        if to_set is None:
            self._config, to_set = pickle.loads(pickled), list(values)
        self._pickled = b""  # until all is set
        set_values(self._config, to_set)
        self._pickled, self._values = pickled, values
        return self._config

    def _differing(self, values: Sequence[Override]) -> list[Override] | None:
        """The values that differ from those of the last point; None where setting them is not enough."""
        if len(values) != len(self._values):
            return None
        pairs = zip(values, self._values, strict=True)
        differing = [(new, old) for new, old in pairs if new.input_line != old.input_line]
        for new, old in differing:
            is_replaced = new.key_or_group == old.key_or_group and _is_plain(new) and _is_plain(old)
            if not is_replaced or any(_overlap(new, other) for other in values if other is not new):
                return None
        return [new for new, _ in differing]


def _is_plain(override: Override) -> bool:
    """Whether an override sets a number or a text, which leaves nothing of an earlier one."""
    is_set = override.type in (OverrideType.CHANGE, OverrideType.FORCE_ADD)
    return is_set and isinstance(override.value(), int | float | str)


def _overlap(one: Override, other: Override) -> bool:
    """Whether the keys of two overrides are the same, or one lies in the other."""
    first, second = f"{one.key_or_group}.", f"{other.key_or_group}."
    return first.startswith(second) or second.startswith(first)


def enter(job: DictConfig) -> Path:
    """Make a job the current one, so that references to Hydra's part resolve; returns its folder."""
    HydraConfig.instance().cfg = job  # type: ignore[assignment]  # `set_config` would copy it
    hydra = job.hydra
    is_sweep = hydra.mode == RunMode.MULTIRUN
    folder = Path(str(hydra.sweep.dir), str(hydra.sweep.subdir)) if is_sweep else Path(str(hydra.run.dir))
    runtime = hydra.runtime
    with read_write(runtime), open_dict(runtime):
        runtime.output_dir = str(folder.absolute())
    return folder.absolute()
