"""Composes our configuration with Hydra, lets Hydra answer flags such as `--help`, and runs its jobs."""

from __future__ import annotations

import functools
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import hydra
import omegaconf.base
from hydra._internal import hydra as hydra_internals
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import IConfigRepository
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_automatic_config_search_path, get_args_parser, run_and_report
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, HydraException, OverrideParseException
from hydra.plugins.config_source import ConfigResult
from omegaconf import Container, DictConfig, OmegaConf

from mecha_exp.app.hydra.jobs import Jobs, parse_override
from mecha_exp.app.hydra.options import register_choices, register_presets
from mecha_exp.app.words.quoting import explain
from mecha_exp.errors import ConfigError, MechaError
from mecha_exp.system.write_errors import write_sentence

CONFIG_MODULE = "mecha_exp.conf"
CONFIG_NAME = "config"
VERSION_BASE = "1.3"


@dataclass(frozen=True)
class Batch:
    """Points that are run together.

    Attributes:
        jobs: the overrides of each.
        first: the number of the first one; those of the others follow.
    """

    jobs: Sequence[Sequence[str]]
    first: int = 0


BATCHES: ContextVar[Iterable[Batch]] = ContextVar("BATCHES", default=())
"""The batches of the sweep that is running; a batch has run when the next one is requested."""

COMPOSE: ContextVar[Callable[[Sequence[Sequence[str]]], Jobs] | None] = ContextVar("COMPOSE", default=None)
"""Makes jobs of their overrides while a sweep runs; None outside of one."""


class Composer:
    """Composes the configurations of a command line, once for each choice of groups.

    Attributes:
        overrides: the overrides of the command line.
        flags: its flags, as they were given.
        is_multirun: whether it has the flag -m.
        groups: the names of all groups.
    """

    def __init__(self, ours: Hydra, flags: Namespace, arguments: Sequence[str]) -> None:
        self._loader = ours.config_loader
        self._composed: dict[tuple[str, ...], DictConfig] = {}
        self.overrides: list[str] = list(flags.overrides)
        self.flags = list(arguments[: len(arguments) - len(self.overrides)])
        self.is_multirun = bool(flags.multirun)
        self.groups = frozenset(self._loader.list_groups(""))

    def compose(self, choice: Sequence[str]) -> DictConfig:
        """The configuration with these overrides, cached: copy it to change it."""
        key = tuple(choice)
        if key not in self._composed:
            overrides = list(choice)
            self._composed[key] = hydra.compose(CONFIG_NAME, overrides=overrides, return_hydra_config=True)
        return self._composed[key]

    def options(self, group: str) -> set[str]:
        """The names of a group's options."""
        return set(self._loader.get_group_options(group))

    def is_group(self, override: Override) -> bool:
        """Whether an override chooses an option of a group."""
        return override.key_or_group in self.groups or "/" in override.key_or_group


@contextmanager
def composer_of(arguments: Sequence[str]) -> Iterator[Composer]:
    """A composer for the arguments of a command line, flags first.

    Raises:
        ConfigError: the user's folder does not exist; or anything that Hydra rejects meanwhile.
    """
    flags = _flags_of(arguments)
    with hydra_of(flags) as ours:
        try:
            yield Composer(ours, flags, arguments)
        except HydraException as error:
            raise ConfigError(_in_our_words(error)) from None


@contextmanager
def hydra_of(flags: Namespace) -> Iterator[Hydra]:
    """Hydra over the packaged configuration and a folder of the user's, set up as Hydra's own start does.

    Hydra's public `initialize` functions take only one folder.

    Raises:
        ConfigError: the user's folder does not exist.
    """
    register_presets()
    _parse_references_once()
    path = flags.config_path or f"pkg://{CONFIG_MODULE}"
    search_path = create_automatic_config_search_path(__file__, None, path)
    if flags.config_dir:
        if not Path(flags.config_dir).is_dir():
            raise ConfigError(f"--config-dir {flags.config_dir}: there is no such folder.")
        before_schema = SearchPathQuery(provider="schema", path=None)  # which must be last
        search_path.prepend("command-line", f"file://{Path(flags.config_dir).absolute()}", before_schema)
    current = GlobalHydra.instance()
    before = current.hydra
    hydra.version.setbase(VERSION_BASE)
    current.hydra = Hydra("mecha_exp", _Loader(search_path))
    try:
        yield current.hydra
    finally:
        current.hydra = before


def _parse_references_once() -> None:
    """Let OmegaConf keep what it has parsed: the points of a sweep resolve the same references."""
    names = vars(omegaconf.base)
    if not hasattr(names["parse"], "cache_info"):
        names["parse"] = functools.lru_cache(10_000)(names["parse"])


def _sweeps(word: str) -> bool:
    """Whether an override has several values, which Hydra refuses without `--multirun` in its help, too."""
    try:
        return parse_override(word).is_sweep_override()
    except OverrideParseException:  # Hydra says what is wrong with it
        return False


def answer(arguments: Sequence[str]) -> None:
    """Let Hydra answer a flag such as `--help` that runs nothing.

    Raises:
        ConfigError: a word beside `--help` cannot be read, or names nothing.
    """
    register_presets()
    register_choices()
    flags = _flags_of(arguments)
    if flags.help:
        with hydra_of(flags) as ours:
            flags.overrides = [word for word in flags.overrides if not _sweeps(word)]
            try:
                ours.app_help(flags.config_name or CONFIG_NAME, get_args_parser(), flags)
            except HydraException as error:
                raise ConfigError(_in_our_words(error)) from None
        return
    sys.argv = [sys.argv[0], *arguments]
    hydra_internals.ConfigLoaderImpl = _Loader  # type: ignore[attr-defined]  # Hydra's own start would use its own
    hydra.main(version_base=VERSION_BASE, config_path=f"pkg://{CONFIG_MODULE}", config_name=CONFIG_NAME)(
        lambda config: None
    )()


def run_jobs(arguments: Sequence[str], batches: Iterable[Batch] | None, task: Callable[..., Any]) -> None:
    """Let Hydra run a command line as one job, or as the jobs of a sweep.

    `hydra.main` would compose the configuration once more, only to learn which of the two it is.

    Args:
        arguments: the arguments of the command line, flags first.
        batches: the jobs of a sweep, in batches that are run one after another; None for one job.
        task: the function that is called with the configuration of each job.

    Raises:
        MechaError: asking for the next batch did.
        OSError: the disk is full, or the like.
    """
    flags = _flags_of(arguments)
    words = [*flags.overrides, f"hydra.mode={'RUN' if batches is None else 'MULTIRUN'}"]
    failures: list[Exception] = []

    def run() -> None:
        start = ours.run if batches is None else ours.multirun
        try:
            start(flags.config_name or CONFIG_NAME, task, words)
        except (MechaError, OSError) as error:  # which Hydra would report as a bug, with its traceback
            if isinstance(error, OSError) and write_sentence(error) is None:
                raise
            failures.append(error)

    token = BATCHES.set(batches or ())
    try:
        with hydra_of(flags) as ours:
            run_and_report(run)
    finally:
        BATCHES.reset(token)
    if failures:
        raise failures[0]


def _flags_of(arguments: Sequence[str]) -> Namespace:
    """The flags of a command line.

    Raises:
        ConfigError: a flag that Hydra does not know, or without its value.
    """
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message}.")

    parser.error = refuse  # type: ignore[method-assign]
    return parser.parse_args(list(arguments))


def _in_our_words(error: HydraException) -> str:
    if isinstance(error, OverrideParseException):
        return explain(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines) or type(error).__name__


def _refuse_hydra_settings(config: Container, name: str) -> None:
    """Raise unless a file of the user's leaves Hydra's own settings alone, but for what it varies."""
    settings = config.get("hydra") if isinstance(config, DictConfig) else None
    if settings is None:
        return
    entries = OmegaConf.to_container(settings) if isinstance(settings, Container) else settings
    names = [f"hydra.{key!s}" for key in entries] if isinstance(entries, dict) else ["hydra"]
    if isinstance(entries, dict) and isinstance(entries.get("sweeper"), dict):
        names.remove("hydra.sweeper")
        names += [f"hydra.sweeper.{key}" for key in entries["sweeper"]]
    refused = sorted(set(names) - {"hydra.mode", "hydra.sweeper.params"})
    if refused:
        raise ConfigCompositionException(
            f"{name}.yaml sets {', '.join(refused)}, which can run code. A file may set "
            "hydra.sweeper.params and hydra.mode; put other settings of Hydra on the command line."
        )


class _Loader(ConfigLoaderImpl):
    """Hydra's loader, without copying the whole repository for each list of a group's options.

    Files of a folder of the user's are data: they do not reach the part of Hydra's configuration that names
    code to run.
    """

    def _load_single_config(self, default: ResultDefault, repo: IConfigRepository) -> ConfigResult:
        result = super()._load_single_config(default, repo)
        if result.path.startswith("file://"):
            _refuse_hydra_settings(result.config, str(default.config_path))
        return result

    def get_group_options(
        self,
        group_name: str,
        results_filter: ObjectType | None = ObjectType.CONFIG,
        config_name: str | None = None,
        overrides: list[str] | None = None,
    ) -> list[str]:
        """The names in a group. A configuration and overrides may add folders to the search path."""
        if config_name is None and not overrides:
            return self.repository.get_group_options(group_name, results_filter)
        return super().get_group_options(group_name, results_filter, config_name, overrides)
