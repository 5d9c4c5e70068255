"""The configurations of the points of a sweep, each made when it is asked for.

Hydra composes a configuration from its files in some tenths of a second. So it is composed once for each
choice of files, and the values that differ are set on a copy.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override, OverrideType
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict, read_write

from mecha_exp.app.config.overrides import decides_files, note_task, parse_override, set_values
from mecha_exp.app.words.plain_data import as_written, entry

NUMBERED = "${hydra:job.num}"
"""The folder of a point in that of its sweep, unless the user names another."""
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


class Composed:
    """A configuration, and the same as plain data.

    Reading all of a configuration from OmegaConf's nodes takes as long as merging a small model.
    """

    def __init__(self, config: DictConfig) -> None:
        self.config = config

    @cached_property
    def written(self) -> dict[str, Any]:
        """The plain data, with references such as `${alpha}` as texts."""
        written = OmegaConf.to_container(self.config, enum_to_str=True)
        assert isinstance(written, dict)
        return {str(key): value for key, value in written.items()}

    def note(self, key: str) -> None:
        """Bring the plain data in line with a value that was changed."""
        if "written" not in vars(self):
            return
        *places, name = key.split(".")
        try:
            holder = reduce(entry, places, self.written)
            entry(holder, name)
        except LookupError:  # it is new, or a reference leads there
            del self.written
        else:
            value = as_written(OmegaConf.select(self.config, key))
            holder[int(name) if isinstance(holder, list) else name] = value


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
        return self.compose(index, Scratch()).config

    def in_turn(self, indices: Iterable[int]) -> Iterator[tuple[int, Composed]]:
        """Jobs with their configurations; each may become the next one (see `Scratch`)."""
        scratch = Scratch()
        return ((index, self.compose(index, scratch)) for index in indices)

    def part(self, indices: Sequence[int]) -> Jobs:
        """Some of the jobs."""
        overrides = [self.overrides[index] for index in indices]
        choices = {choice_of(words, self.groups) for words in overrides}
        bases = {choice: self.bases[choice] for choice in choices}
        return Jobs(overrides, [self.numbers[index] for index in indices], bases, self.groups)

    def compose(self, index: int, scratch: Scratch) -> Composed:
        """The configuration of a job, made of the one that was made in a scratch before."""
        words = self.overrides[index]
        parsed = [parse_override(word) for word in words]
        values = [o for o in parsed if not decides_files(o, self.groups)]
        job = scratch.compose(self.bases[choice_of(words, self.groups)], values)
        note_task(job.config, parsed)
        settings = job.config.hydra.job
        with read_write(settings), open_dict(settings):
            settings.id = settings.num = self.numbers[index]
        for key in ("hydra.job", "hydra.overrides"):
            job.note(key)
        return job


def choice_of(words: Sequence[str], groups: frozenset[str]) -> Choice:
    """The overrides that choose files, of those of a job."""
    return tuple(word for word in words if decides_files(parse_override(word), groups))


class Scratch:
    """A configuration that becomes that of one point after another, as long as plain values alone differ.

    Making one anew takes longer than most of what a plan does with it.
    """

    def __init__(self) -> None:
        self._composed = Composed(DictConfig({}))
        self._pickled = b""
        self._values: Sequence[Override] = ()

    def compose(self, pickled: bytes, values: Sequence[Override]) -> Composed:
        """The configuration of a point: that of the last one where setting what differs makes it.

        Args:
            pickled: the configuration without values, which is read six times as fast as it is copied.
            values: of the point.

        Raises:
            ConfigError: a value cannot be set; see `set_values`.
        """
        to_set = self._differing(values) if self._pickled == pickled else None
        if to_set is None:
            self._composed, to_set = Composed(pickle.loads(pickled)), list(values)
        self._pickled = b""  # until all is set
        set_values(self._composed.config, to_set)
        for override in to_set:
            self._composed.note(override.key_or_group)
        self._pickled, self._values = pickled, values
        return self._composed

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
    value = override.value()
    return is_set and isinstance(value, int | float | str) and "${" not in str(value) and value != MISSING


def _overlap(one: Override, other: Override) -> bool:
    """Whether the keys of two overrides are the same, or one lies in the other."""
    first, second = f"{one.key_or_group}.", f"{other.key_or_group}."
    return first.startswith(second) or second.startswith(first)


def enter(job: DictConfig) -> Path:
    """Make a job the current one, so that references to Hydra's part resolve; returns its folder."""
    HydraConfig.instance().cfg = job  # type: ignore[assignment]  # `set_config` would copy it
    hydra = job.hydra
    is_sweep = hydra.mode == RunMode.MULTIRUN
    is_numbered = as_written(hydra.sweep)["subdir"] == NUMBERED  # else the reference is read for each job
    subdir = hydra.job.num if is_numbered else hydra.sweep.subdir
    folder = Path(str(hydra.sweep.dir), str(subdir)) if is_sweep else Path(str(hydra.run.dir))
    runtime = hydra.runtime
    with read_write(runtime), open_dict(runtime):
        runtime.output_dir = str(folder.absolute())
    return folder.absolute()
