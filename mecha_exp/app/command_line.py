"""Reads a command line and checks it before Hydra starts.

Hydra stops at the first wrong name, and it would run a sweep over a key that the recipe does not use as so
many identical jobs. Here everything that is wrong is reported at once with the nearest valid name, before any
folder is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hydra.core.override_parser.types import Override
from hydra.errors import OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from mecha_exp.app.adaptive.points import MAKERS, AdaptivePoints
from mecha_exp.app.checks.names import (
    check_names,
    check_options,
    check_outputs,
    check_removals,
    check_used,
    values_of,
)
from mecha_exp.app.checks.unused_settings import check_unused
from mecha_exp.app.config.compose import Composer, composer_of
from mecha_exp.app.config.grid import Grid
from mecha_exp.app.config.jobs import Jobs
from mecha_exp.app.config.method_recipes import GROUP
from mecha_exp.app.config.overrides import parse_override, set_values, unchecked
from mecha_exp.app.search.space import MODE as SEARCH
from mecha_exp.app.search.space import SearchedPoints, searched_points
from mecha_exp.app.sweep.points import Points, parts_of, points_of
from mecha_exp.app.words.blocks import BLOCKS
from mecha_exp.app.words.experts import names_of
from mecha_exp.app.words.lists import WEIGHTS, fit_lists
from mecha_exp.app.words.quotes import explain, quoted
from mecha_exp.app.words.reader import read
from mecha_exp.app.words.wildcards import expand_each, has_stars, places_of
from mecha_exp.errors import ConfigError, Problems
from mecha_exp.lab.points import LABELS, Setting
from mecha_exp.plugins import load_plugins

OUR_SWEEPER = "lab"


@dataclass(frozen=True)
class CommandLine:
    """A command line that has been checked.

    Attributes:
        typed: the arguments as they were typed.
        composer: composes its configurations and runs it.
        overrides: the overrides for Hydra, with `++` where its configuration lacks a key.
        is_sweep: whether it is a multirun.
        swept: the keys with several values, in the order of the command line.
        config: the configuration of the first point, with Hydra's part.
        points: the grid; a single point for a sweeper that makes its own.
        jobs: the overrides of each point, for our sweeper.
        left_out: hyperparameters with the recipes of the sweep that lack them.
        notes: remarks for the plan and the table.
        searched: the space of a search, whose `points` stand for those to come; None for other sweeps.
        adaptive: the points that an adaptive sweep begins with; None for other sweeps.
    """

    typed: list[str]
    composer: Composer
    overrides: list[str]
    is_sweep: bool
    swept: list[str]
    config: DictConfig
    points: Grid
    jobs: list[list[str]]
    left_out: Mapping[str, Sequence[str]]
    notes: Sequence[str]
    searched: SearchedPoints | None = None
    adaptive: AdaptivePoints | None = None

    @property
    def arguments(self) -> list[str]:
        """The arguments for Hydra, flags first."""
        return [*self.composer.flags.words, *self.overrides]

    @property
    def lists_points(self) -> bool:
        """Whether its points are known beforehand, unlike those of a search."""
        return _lists_points(self.config)

    def settings_in(self, folder: Path) -> list[str]:
        """The overrides of Hydra's part, for a run or a sweep in a folder."""
        typed = [o for o in map(parse_override, self.overrides) if o.is_hydra_override()]
        mode, where = ("MULTIRUN", "sweep") if self.is_sweep else ("RUN", "run")
        ours = [f"hydra.mode={mode}", f"hydra.{where}.dir={quoted(str(folder))}"]
        return [*(str(o.input_line) for o in typed if not o.is_sweep_override()), *ours]

    def jobs_of(self, overrides: Sequence[Sequence[str]]) -> Jobs:
        """The jobs of some points, in no folder of their own."""
        folder = Path(self.config.hydra.sweep.dir)
        return self.composer.jobs(self.settings_in(folder), overrides, 0, like=self.config)

    def job(self, setting: Setting) -> list[str]:
        """The overrides of a point of a search or an adaptive sweep, from what it sets."""
        known = self.searched or self.adaptive
        assert known is not None
        return _job(known.words_of(setting), self.points.parameters)


@contextmanager
def checked(arguments: Sequence[str]) -> Iterator[CommandLine]:
    """Read a command line and check its names. Hydra is set up for it in the context.

    Raises:
        ConfigError: everything that is wrong with it.
    """
    with composer_of(read(arguments)) as composer:
        yield _check(list(arguments), composer)


def _check(typed: list[str], composer: Composer) -> CommandLine:
    problems = Problems()
    parsed = _parsed(composer.overrides, problems)
    check_removals(parsed, composer, problems)
    problems.raise_as(ConfigError)
    chosen = [override for override in parsed if composer.is_group(override)]
    _load_methods(parsed, composer)
    for override in chosen:
        check_options(override, composer, problems)
    problems.raise_as(ConfigError)
    first = composer.compose([*map(_first_choice, chosen), *_hydra_settings(parsed)])
    if any(map(has_stars, parsed)):
        names_below = partial(_names_below, parsed, first, composer)
        parsed = [parse_override(word) for word in expand_each(parsed, names_below)]
    overrides = fit_lists(parsed, first, composer.is_group)
    parsed = [parse_override(word) for word in overrides]
    is_sweep = composer.flags.is_multirun or first.hydra.mode == RunMode.MULTIRUN
    sweep = _sweep(parsed, first, composer) if is_sweep else _single(parsed)
    points = Grid.of(sweep.words, composer, RunMode.MULTIRUN if is_sweep else RunMode.RUN)
    check_names(points, problems)
    problems.raise_as(ConfigError)
    points.check_types()
    keys = {key for key in sweep.swept if key not in {*composer.groups, *LABELS}}
    added = points.parameters | sweep.own  # which the configuration of the sweep as a whole may lack
    completed = [f"++{word}" if _key(word) in added else word for word in overrides]
    jobs = [_job(words, points.parameters) for words in sweep.words]
    check_used(keys, points, problems)
    check_unused(points, [*sweep.swept, *LABELS], sweep.own, problems)
    check_outputs(points, problems)
    problems.raise_as(ConfigError)
    searched = sweep if isinstance(sweep, SearchedPoints) else None
    adaptive = sweep if isinstance(sweep, AdaptivePoints) else None
    more = (sweep.left_out, sweep.notes, searched, adaptive)
    return CommandLine(typed, composer, completed, is_sweep, sweep.swept, points[0], points, jobs, *more)


def _load_methods(parsed: Sequence[Override], composer: Composer) -> None:
    """Load the plugins of a command line that chooses a recipe of no file: it may be a method of theirs."""
    files = composer.options(GROUP)
    recipes = [name for o in parsed if o.key_or_group == GROUP for name in values_of(o)]
    if any(isinstance(name, str) and name not in files for name in recipes):
        named = [o.value() for o in parsed if o.key_or_group == "plugins"]
        load_plugins([str(plugin) for value in named if isinstance(value, list) for plugin in value])


def _parsed(words: Sequence[str], problems: Problems) -> list[Override]:
    """The overrides of words; a word that cannot be parsed is a problem, with the place where it goes wrong.

    Raises:
        ConfigError: all of them.
    """
    parsed = []
    for word in words:
        try:
            parsed.append(parse_override(word))
        except OverrideParseException as error:
            problems.add(explain(error))
    problems.raise_as(ConfigError)
    return parsed


def _single(parsed: list[Override]) -> Points:
    """The point of a command line without -m."""
    if several := [str(o.input_line) for o in parsed if o.is_sweep_override()]:
        raise ConfigError(f"{', '.join(several)} has several values: add -m to run each of them.")
    return Points([], [str(o.input_line) for o in parsed], [{}])


def _sweep(parsed: list[Override], first: DictConfig, composer: Composer) -> Points:
    """The points of a sweep; for another sweeper, one point that stands for all."""
    typed = {o.key_or_group for o in parsed}
    preset = [f"{k}={v}" for k, v in (first.hydra.sweeper.params or {}).items() if k not in typed]
    parsed = [*map(parse_override, preset), *parsed]
    config = _with_fixed_values(parsed, first, composer)
    if config.sweep.mode == SEARCH and not _lists_points(config):
        raise ConfigError("sweep=search asks for its points itself: leave hydra/sweeper out.")
    if config.sweep.mode == SEARCH:
        return searched_points(parsed, config)
    if config.sweep.mode in MAKERS:
        if not _lists_points(config):
            raise ConfigError(f"sweep={config.sweep.mode} makes its points itself: leave hydra/sweeper out.")
        return MAKERS[config.sweep.mode](parsed, config)
    if _lists_points(config):
        _require_variation(parsed, config)
        return points_of(parsed, config)
    swept = [o for o in parsed if o.is_sweep_override()]
    fixed = [str(o.input_line) for o in parsed if o not in swept]
    setting = {o.get_key_element(): str(values_of(o)[0]) for o in swept}
    return Points([o.key_or_group for o in swept], fixed, [setting])


def _require_variation(parsed: list[Override], config: DictConfig) -> None:
    """Check that a list of numbers was not meant as the values of a sweep.

    Raises:
        ConfigError: nothing else has several values.
    """
    settings = config.sweep
    if (
        settings.mode != "grid"
        or settings.replicates is not None
        or any(o.is_sweep_override() for o in parsed)
    ):
        return
    for override in parsed:
        value = override.value()
        if not isinstance(value, list):
            continue
        if value and all(isinstance(v, int | float) for v in value) and "." not in override.key_or_group:
            key, text = override.key_or_group, ",".join(str(v) for v in value)
            raise ConfigError(
                f"-m, but nothing has several values: {key}=[{text}] is one value, a list, which for a "
                f"strength is a gradient over the layers. The sweep is {key}={text} -m, without brackets."
            )


def _names_below(parsed: Sequence[Override], first: DictConfig, composer: Composer, key: str) -> list[str]:
    """The names of what there is below `blocks`, `weights` or a list, with the models of a command line."""
    words = fit_lists([o for o in parsed if not has_stars(o)], first, composer.is_group)
    config = _with_fixed_values([parse_override(word) for word in words], first, composer)
    if key == BLOCKS:
        return parts_of(config.models, "block")
    if key == WEIGHTS:
        return names_of([str(expert) for expert in config.models.experts or ()])
    return places_of(key, OmegaConf.select(config, key))


def _with_fixed_values(parsed: Sequence[Override], config: DictConfig, composer: Composer) -> DictConfig:
    """A copy of the configuration with every value that is not varied."""
    config = config.copy()
    fixed = [o for o in parsed if not o.is_sweep_override() and not o.is_hydra_override()]
    set_values(config, [unchecked(o) for o in fixed if not composer.is_group(o)])
    return config


def _job(words: list[str], parameters: set[str]) -> list[str]:
    """The overrides of a point in the form that Hydra's sweepers give to a launcher."""
    named = (f"++{word}" if _key(word) in parameters else word for word in words)
    return [word for word in named if not word.lstrip("+").startswith(("hydra.", "hydra/"))]


def _first_choice(override: Override) -> str:
    """An override of a group with its first option."""
    if not override.is_discrete_sweep():
        return str(override.input_line)
    return f"{override.get_key_element()}={next(override.sweep_string_iterator())}"


def _hydra_settings(parsed: list[Override]) -> list[str]:
    return [str(o.input_line) for o in parsed if o.is_hydra_override() and not o.is_sweep_override()]


def _lists_points(config: DictConfig) -> bool:
    return bool(config.hydra.runtime.choices["hydra/sweeper"] == OUR_SWEEPER)


def _key(word: str) -> str:
    """The key of an override."""
    return "" if word.startswith("-") else word.partition("=")[0]
