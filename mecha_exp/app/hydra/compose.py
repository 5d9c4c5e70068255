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
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_automatic_config_search_path, get_args_parser, run_and_report
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig
from yaml import MarkedYAMLError

from mecha_exp.app.hydra.jobs import Jobs, parse_override
from mecha_exp.app.hydra.loader import Loader
from mecha_exp.app.hydra.options import register_choices, register_presets
from mecha_exp.app.words.quotes import explain
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
    """Composes the configurations of a command line, and lets Hydra run its jobs.

    Attributes:
        overrides: the overrides of the command line.
        flags: its flags, as they were given.
        is_multirun: whether it has the flag -m.
        groups: the names of all groups.
    """

    def __init__(self, ours: Hydra, flags: Namespace, arguments: Sequence[str]) -> None:
        self._hydra, self._loader = ours, ours.config_loader
        self._config_name: str = flags.config_name or CONFIG_NAME
        self.overrides: list[str] = list(flags.overrides)
        self.flags = list(arguments[: len(arguments) - len(self.overrides)])
        self.is_multirun = bool(flags.multirun)
        self.groups = frozenset(self._loader.list_groups(""))

    def compose(self, choice: Sequence[str]) -> DictConfig:
        """The configuration with these overrides."""
        return self._hydra.compose_config(self._config_name, list(choice), RunMode.RUN, from_shell=False)

    def options(self, group: str) -> set[str]:
        """The names of a group's options."""
        return set(self._loader.get_group_options(group))

    def is_group(self, override: Override) -> bool:
        """Whether an override chooses an option of a group."""
        return override.key_or_group in self.groups or "/" in override.key_or_group

    def run(self, words: Sequence[str], batches: Iterable[Batch] | None, task: Callable[..., Any]) -> None:
        """Let Hydra run the command line as one job, or as the jobs of a sweep.

        `hydra.main` would compose the configuration once more, only to learn which of the two it is.

        Args:
            words: the overrides of the job, or of the sweep as a whole.
            batches: the jobs of a sweep, in batches that are run one after another; None for one job.
            task: the function that is called with the configuration of each job.

        Raises:
            MechaError: asking for the next batch did.
            OSError: the disk is full, or the like.
        """
        start = self._hydra.run if batches is None else self._hydra.multirun
        overrides = [*words, f"hydra.mode={'RUN' if batches is None else 'MULTIRUN'}"]
        failures: list[Exception] = []

        def run() -> None:
            try:
                start(self._config_name, task, overrides)
            except (MechaError, OSError) as error:  # which Hydra would report as a bug, with its traceback
                if isinstance(error, OSError) and write_sentence(error) is None:
                    raise
                failures.append(error)

        token = BATCHES.set(batches or ())
        try:
            run_and_report(run)
        finally:
            BATCHES.reset(token)
        if failures:
            raise failures[0]


@contextmanager
def composer_of(arguments: Sequence[str]) -> Iterator[Composer]:
    """A composer for the arguments of a command line, flags first.

    Raises:
        ConfigError: the user's folder does not exist; or Hydra rejects something in the block.
    """
    flags = _flags_of(arguments)
    with hydra_of(flags) as ours:
        try:
            yield Composer(ours, flags, arguments)
        except HydraException as error:
            raise ConfigError(_in_our_words(error)) from None
        except MarkedYAMLError as error:  # in the user's folder
            where = error.problem_mark
            place = f"{where.name}, line {where.line + 1}" if where else "a configuration"
            raise ConfigError(f"{place}: this is not YAML: {error.problem}.") from None


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
    current.hydra = Hydra("mecha_exp", Loader(search_path))
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
    vars(hydra_internals)["ConfigLoaderImpl"] = Loader  # Hydra's own start would use its own
    hydra.main(version_base=VERSION_BASE, config_path=f"pkg://{CONFIG_MODULE}", config_name=CONFIG_NAME)(
        lambda config: None
    )()


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
