"""Composes our configuration with Hydra, and lets Hydra answer flags such as `--help`."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import hydra
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from yaml import MarkedYAMLError

from mecha_exp.app.config.jobs import Choice, Jobs, choice_of
from mecha_exp.app.config.method_recipes import MethodRecipes, MethodRecipesPath
from mecha_exp.app.config.options import CONFIG_MODULE, register_choices, register_presets
from mecha_exp.app.config.overrides import decides_files, note_task, parse_override, set_values
from mecha_exp.app.config.user_folder import SCHEME, USER_FOLDER, DataFolder, UserFolder
from mecha_exp.app.words.quotes import explain
from mecha_exp.app.words.reader import FLAGS
from mecha_exp.errors import ConfigError

CONFIG_NAME = "config"
VERSION_BASE = "1.3"

_FOLDERS_AND_MODE = ("hydra.mode", "hydra.run.dir", "hydra.sweep.dir")
"""Settings of Hydra that are only values, which a command sets after its check."""


@dataclass(frozen=True)
class Flags:
    """The flags of a command line, and its overrides.

    Attributes:
        words: the flags as they were given.
        overrides: the overrides.
        config_name: the name of the configuration.
        config_dir: a folder of the user's; None without one.
        is_multirun: whether there is the flag -m.
    """

    words: list[str]
    overrides: list[str]
    config_name: str = CONFIG_NAME
    config_dir: str | None = None
    is_multirun: bool = False

    @classmethod
    def of(cls, arguments: Sequence[str]) -> Flags:
        """The flags of arguments that are ordered, flags first.

        Raises:
            ConfigError: the user's folder does not exist, or takes the place of ours.
        """
        words: list[str] = []
        values: dict[str, str] = {}
        rest = list(arguments)
        while rest and rest[0].startswith("-"):
            name, equals, value = rest.pop(0).partition("=")
            count = 0 if equals else FLAGS.get(name, 0)
            values[name] = value or "".join(rest[:count])
            words += [f"{name}{equals}{value}", *rest[:count]]
            del rest[:count]
        if not {"--config-path", "-cp"}.isdisjoint(values):
            raise ConfigError(
                "--config-path would replace our own configuration: add yours with --config-dir FOLDER."
            )
        folder = values.get("--config-dir", values.get("-cd"))
        if folder and not Path(folder).is_dir():
            raise ConfigError(f"--config-dir {folder}: there is no such folder.")
        name = values.get("--config-name", values.get("-cn")) or CONFIG_NAME
        return cls(words, rest, name, folder, not {"-m", "--multirun"}.isdisjoint(values))


@dataclass
class Composer:
    """Composes the configurations of a command line from files, once for each choice of files.

    To compose one takes as long as many points of a small model. The check of a command line, the sweep as a
    whole and its points mostly choose the same files, so that their values are set on copies.

    Attributes:
        flags: of the command line.
        groups: the names of all groups.
    """

    flags: Flags
    groups: frozenset[str]
    _bases: dict[Choice, bytes] = field(default_factory=dict)

    @property
    def overrides(self) -> list[str]:
        """The overrides of the command line."""
        return self.flags.overrides

    @classmethod
    def of(cls, config: DictConfig) -> Composer:
        """A composer for a command line that Hydra has composed."""
        loader = GlobalHydra.instance().config_loader()
        return cls(Flags([], [], str(config.hydra.job.config_name)), frozenset(loader.list_groups("")))

    def compose(self, words: Sequence[str]) -> DictConfig:
        """The configuration with these overrides.

        Raises:
            HydraException: a word cannot be read, or names nothing.
            ConfigError: a value cannot be set.
        """
        parsed = [parse_override(word) for word in words]
        values = [o for o in parsed if not self._chooses(o)]
        chosen = sorted((o for o in parsed if self._chooses(o)), key=Override.is_hydra_override)
        config: DictConfig = pickle.loads(self._base([str(o.input_line) for o in chosen]))
        set_values(config, values)
        config.hydra.overrides.hydra = [str(o.input_line) for o in parsed if o.is_hydra_override()]
        note_task(config, parsed)
        return config

    def jobs(
        self, settings: Sequence[str], jobs: Sequence[Sequence[str]], first: int, like: DictConfig
    ) -> Jobs:
        """The configurations of jobs.

        Args:
            settings: overrides of Hydra's part that all jobs have, such as its mode and its folders.
            jobs: the overrides of each job.
            first: the number of the first job.
            like: a configuration whose resolved values they share, such as that of `${now:%H}`.
        """
        bases: dict[Choice, bytes] = {}
        for choice in {choice_of(words, self.groups) for words in jobs}:
            base = self.compose([*settings, *choice])
            OmegaConf.copy_cache(from_config=like, to_config=base)
            bases[choice] = pickle.dumps(base)
        return Jobs(jobs, range(first, first + len(jobs)), bases, self.groups)

    def options(self, group: str) -> set[str]:
        """The names of a group's options."""
        return set(GlobalHydra.instance().config_loader().get_group_options(group))

    def is_group(self, override: Override) -> bool:
        """Whether an override chooses an option of a group."""
        return override.key_or_group in self.groups or "/" in override.key_or_group

    def _chooses(self, override: Override) -> bool:
        """Whether Hydra has to compose anew for an override, because it says which files are read."""
        is_value = override.key_or_group in _FOLDERS_AND_MODE or isinstance(override.value(), dict)
        return decides_files(override, self.groups) and not is_value

    def _base(self, choice: list[str]) -> bytes:
        """The configuration with these files, pickled: read a hundred times as fast as composed."""
        key = tuple(choice)
        if key not in self._bases:
            words = [
                word.replace("file://", f"{SCHEME}://") if "searchpath" in word else word for word in choice
            ]
            composed = hydra.compose(self.flags.config_name, words, return_hydra_config=True)
            self._bases[key] = pickle.dumps(composed)
        return self._bases[key]


@contextmanager
def composer_of(arguments: Sequence[str]) -> Iterator[Composer]:
    """A composer for the arguments of a command line, flags first.

    Raises:
        ConfigError: the user's folder does not exist; or Hydra rejects something in the block.
    """
    flags = Flags.of(arguments)
    with (
        _user_folder(flags),
        _in_our_words(),
        _own_hydra(),
        initialize_config_module(CONFIG_MODULE, version_base=VERSION_BASE, job_name="mecha_exp"),
    ):
        groups = GlobalHydra.instance().config_loader().list_groups("")
        yield Composer(flags, frozenset(groups))


@contextmanager
def _own_hydra() -> Iterator[None]:
    """Leave Hydra's globals to us; a program that uses Hydra itself finds its own ones again."""
    hydra_before, job_before = GlobalHydra.instance().hydra, HydraConfig.instance().cfg
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra, HydraConfig.instance().cfg = hydra_before, job_before


def answer(arguments: Sequence[str]) -> None:
    """Let Hydra answer a flag such as `--help` that runs nothing.

    Raises:
        ConfigError: a word beside `--help` cannot be read, or names nothing.
    """
    register_choices()
    flags = Flags.of(arguments)
    is_help = not {"--help", "-h"}.isdisjoint(flags.words)
    overrides = [word for word in flags.overrides if not (is_help and _sweeps(word))]
    before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [sys.argv[0], *_without_folder(flags.words), *overrides]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # an error is raised, and not printed in Hydra's words
    try:
        with _user_folder(flags), _in_our_words(), _own_hydra():
            hydra.main(
                version_base=VERSION_BASE, config_path=f"pkg://{CONFIG_MODULE}", config_name=CONFIG_NAME
            )(lambda config: None)()
    finally:
        sys.argv = before[0]
        os.environ.pop("HYDRA_FULL_ERROR")
        if before[1] is not None:
            os.environ["HYDRA_FULL_ERROR"] = before[1]


@contextmanager
def _user_folder(flags: Flags) -> Iterator[None]:
    """Let Hydra find the user's folder, and our options."""
    for plugin in (DataFolder, UserFolder, MethodRecipes, MethodRecipesPath):
        Plugins.instance().register(plugin)
    register_presets()
    token = USER_FOLDER.set(Path(flags.config_dir) if flags.config_dir else None)
    try:
        yield
    finally:
        USER_FOLDER.reset(token)


@contextmanager
def _in_our_words() -> Iterator[None]:
    try:
        yield
    except OverrideParseException as error:
        raise ConfigError(explain(error)) from None
    except HydraException as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ConfigError(" ".join(lines) or type(error).__name__) from None
    except MarkedYAMLError as error:  # in the user's folder
        where = error.problem_mark
        place = f"{where.name}, line {where.line + 1}" if where else "a configuration"
        raise ConfigError(f"{place}: this is not YAML: {error.problem}.") from None


def _without_folder(words: Sequence[str]) -> list[str]:
    """Flags without the user's folder, which the search path has from us."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in ("--config-dir", "-cd"):
            next(rest, None)
        elif not word.startswith(("--config-dir=", "-cd=")):
            kept.append(word)
    return kept


def _sweeps(word: str) -> bool:
    """Whether an override has several values, which Hydra refuses without `--multirun` in its help, too."""
    try:
        return parse_override(word).is_sweep_override()
    except OverrideParseException:  # Hydra says what is wrong with it
        return False


def multirun_config(composer: Composer, settings: Sequence[str], overrides: Sequence[str]) -> DictConfig:
    """The configuration of a sweep as a whole, as Hydra gives it to sweepers and launchers.

    Args:
        composer: of its command line.
        settings: overrides of Hydra's part.
        overrides: all overrides of the command line.
    """
    parsed = [parse_override(word) for word in overrides]
    fixed = [o for o in parsed if not o.is_sweep_override() and not o.is_hydra_override()]
    config = composer.compose([*settings, *(str(o.input_line) for o in fixed)])
    task = [str(o.input_line) for o in parsed if not o.is_hydra_override()]
    OmegaConf.update(config, "hydra.overrides.task", task)
    return config
