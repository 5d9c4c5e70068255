"""Composes and runs the jobs of a sweep as Hydra does, without its copies of each configuration.

Hydra composes every job from the files, which takes some tens of milliseconds each. Here the values that
differ are set on a copy, in Hydra's own way. To run a job, Hydra copies the configuration six times and
writes it with a slow YAML emitter, which takes longer than to merge and measure a small model.
"""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.utils import JobReturn, JobStatus, configure_log, env_override
from hydra.errors import ConfigCompositionException
from hydra.types import HydraContext
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write
from omegaconf._utils import get_omega_conf_dumper

from mecha_exp.app.words.plain_data import as_written
from mecha_exp.errors import ConfigError, brief


class Jobs:
    """The configurations of jobs, each composed when it is asked for.

    A configuration is a hundred times as large as the words that it comes from.

    Args:
        loader: Hydra's loader.
        config: the configuration of the sweep.
        overrides: the overrides of each job.
        first_number: the number of the first job.
        numbers: the numbers of all jobs, where they do not follow one another.
    """

    def __init__(
        self,
        loader: ConfigLoader,
        config: DictConfig,
        overrides: Sequence[Sequence[str]],
        first_number: int = 0,
        numbers: Sequence[int] | None = None,
    ) -> None:
        self._loader, self._config, self.overrides = loader, config, overrides
        self.numbers = range(first_number, first_number + len(overrides)) if numbers is None else numbers
        self._groups = set(loader.list_groups(""))
        self._bases: dict[tuple[str, ...], bytes] = {}

    def __len__(self) -> int:
        return len(self.overrides)

    def __getitem__(self, index: int) -> DictConfig:
        """The configuration of a job, equal to that of Hydra's `load_sweep_config`, with its number."""
        return self._compose(index, Scratch())

    def in_turn(self, indices: Iterable[int]) -> Iterator[tuple[int, DictConfig]]:
        """Jobs with their configurations; each may become the next one (see `Scratch`)."""
        scratch = Scratch()
        return ((index, self._compose(index, scratch)) for index in indices)

    def _compose(self, index: int, scratch: Scratch) -> DictConfig:
        parsed = [parse_override(word) for word in self.overrides[index]]
        choices = tuple(str(o.input_line) for o in parsed if decides_files(o, self._groups))
        values = [o for o in parsed if not decides_files(o, self._groups)]
        if choices not in self._bases:
            base = self._loader.load_sweep_config(self._config, list(choices))
            self._bases[choices] = pickle.dumps(base)
        job = scratch.compose(self._bases[choices], values)
        note_task(job, parsed)
        with open_dict(job):
            job.hydra.job.id = job.hydra.job.num = self.numbers[index]
        OmegaConf.copy_cache(from_config=self._config, to_config=job)
        return job


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


def set_values(config: DictConfig, overrides: Iterable[Override]) -> None:
    """Set the values of overrides in a configuration, as Hydra does.

    Raises:
        ConfigError: a key leads into a value that has no parts, or does not take such a value.
        ConfigCompositionException: what is to be removed is not there, or what is to be added is.
    """
    for override in overrides:
        try:
            ConfigLoaderImpl._apply_overrides_to_config([override], config)
        except (ConfigCompositionException, ValueError, TypeError, AttributeError) as error:
            reason = error.__cause__ or error
            if isinstance(reason, ConfigCompositionException):
                raise
            message = brief(str(reason).splitlines()[0])
            raise ConfigError(f"{override.input_line}: {message}.") from None


def unchecked(override: Override) -> Override:
    """An override that Hydra sets under any key, since the names are checked later; `~key` sets None."""
    return replace(override, type=OverrideType.FORCE_ADD, package=None)


@functools.lru_cache(maxsize=10_000)
def parse_override(word: str) -> Override:
    """Parse a word of the command line; cached, because points share most of their words.

    Raises:
        OverrideParseException: the word is not an override.
    """
    hydra = GlobalHydra.instance()
    loader = hydra.config_loader() if hydra.is_initialized() else None  # which lists what `glob(...)` means
    return OverridesParser.create(config_loader=loader).parse_overrides([word])[0]


def enter(job: DictConfig) -> Path:
    """Make a job the current one, so that references to Hydra's part resolve; returns its folder."""
    HydraConfig.instance().cfg = job  # type: ignore[assignment]  # `set_config` would copy it
    hydra = job.hydra
    folder = Path(str(hydra.sweep.dir), str(hydra.sweep.subdir)).absolute()
    runtime = hydra.runtime
    with read_write(runtime), open_dict(runtime):
        runtime.output_dir = str(folder)
    return folder


def run_job(config: DictConfig, task: Callable[[DictConfig], Any], context: HydraContext) -> JobReturn:
    """Run a job in its folder, with the files, the log and the callbacks of Hydra's `run_job`.

    Args:
        config: the configuration of the job, with Hydra's part.
        task: called with `config`. An exception that it raises becomes the return value.
        context: what Hydra gave to the launcher.
    """
    settings = config.hydra
    before = HydraConfig.instance().cfg
    folder = enter(config)
    folder.mkdir(parents=True, exist_ok=True)
    returned = JobReturn(
        list(settings.overrides.task), cfg=config, hydra_cfg=config, task_name=settings.job.name
    )
    try:
        with _working_folder(folder if settings.job.chdir else Path()):
            returned.working_dir = str(Path.cwd())
            configure_log(settings.job_logging, settings.verbose)
            if settings.output_subdir is not None:
                _write_configs(config, folder / settings.output_subdir)
            with env_override(settings.job.env_set):
                context.callbacks.on_job_start(config=config, task_function=task)
                try:
                    returned.return_value, returned.status = task(config), JobStatus.COMPLETED
                except Exception as error:
                    returned.return_value, returned.status = error, JobStatus.FAILED
            context.callbacks.on_job_end(config=config, job_return=returned)
    finally:
        HydraConfig.instance().cfg = before
    return returned


@contextmanager
def _working_folder(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _write_configs(config: DictConfig, folder: Path) -> None:
    """Write the files in which Hydra keeps the configuration of a job."""
    content = OmegaConf.to_container(config, enum_to_str=True)
    assert isinstance(content, dict)
    hydra = content.pop("hydra")
    files = {"config": content, "hydra": {"hydra": hydra}, "overrides": hydra["overrides"]["task"]}
    folder.mkdir(exist_ok=True)
    for name, part in files.items():
        text = yaml.dump(part, Dumper=_Dumper, allow_unicode=True, sort_keys=False)
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


class _Dumper(getattr(yaml, "CDumper", yaml.Dumper)):  # type: ignore[misc]
    """OmegaConf's dumper, by libyaml where PyYAML has it."""

    yaml_representers = get_omega_conf_dumper().yaml_representers


def decides_files(override: Override, groups: Set[str]) -> bool:
    """Whether an override chooses files, so that it does more than set a value."""
    name = override.key_or_group
    return name in groups or "/" in name or override.is_hydra_override()


def note_task(config: DictConfig, overrides: Sequence[Override]) -> None:
    """Note in Hydra's part which overrides a configuration has, without those of that part itself."""
    task = [o for o in overrides if not o.is_hydra_override()]
    _replace(config.hydra.overrides.task, [str(o.input_line) for o in task])
    settings = config.hydra.job  # looking it up again takes as long as setting a value
    naming = settings.config.override_dirname
    settings.override_dirname = get_overrides_dirname(
        task, naming.exclude_keys, naming.item_sep, naming.kv_sep
    )


def _replace(texts: ListConfig, new_texts: Sequence[str]) -> None:
    """Replace the texts of a list where they differ: most are those of the point before."""
    before = as_written(texts)
    for index, (old, new) in enumerate(zip(before, new_texts, strict=False)):
        if old != new:
            texts[index] = new
    texts.extend(new_texts[len(before) :])
    for _ in before[len(new_texts) :]:
        texts.pop()
