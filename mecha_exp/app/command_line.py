"""The command line, checked before Hydra starts: names that nothing knows, sweeps that change nothing.

Hydra stops at the first wrong name and shows where in its own words; and it would run a sweep over a key
that the recipe does not use as so many identical jobs. Here the configuration is composed once for each
choice of groups, and everything wrong is reported at once with the nearest valid name, before any folder is
made.
"""

from __future__ import annotations

import difflib
import itertools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra import compose
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf

from mecha_exp.app.hydra.compose import CONFIG_NAME, hydra_of
from mecha_exp.app.hydra.jobs import parse_override
from mecha_exp.app.hydra.presets import expanded
from mecha_exp.app.sweep.points import Points, points_of
from mecha_exp.errors import ConfigError, Problems, did_you_mean
from mecha_exp.graph.curves import PRESETS

OPEN_NODES = ("blocks", "evaluator")
"""Nodes that take any key: an override there need not say `+`."""

_VALUE_FLAGS = {"--cfg", "--config-path", "--config-name", "--config-dir", "--package"}
_VALUE_FLAGS |= {"-c", "-cp", "-cn", "-cd", "-p"}
_TEMPLATE = re.compile(r"'(?:mecha|parameter)':")  # a word that brings parameters into a recipe
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_IN_MAPPINGS = " The names in a mapping are not quoted, and ':', '[' and ']' in them take a backslash."
OUR_SWEEPER = "lab"
BLOCK = "block"
"""What a block ablation calls the block that a point sets apart; a name for tables, not a hyperparameter."""


def reorder(arguments: Sequence[str]) -> list[str]:
    """The arguments with every flag before every override, so that `-m` may stand anywhere.

    >>> reorder(["recipe=ties", "-m", "alpha=0.3,0.5"])
    ['-m', 'recipe=ties', 'alpha=0.3,0.5']
    """
    flags: list[str] = []
    overrides: list[str] = []
    rest = iter(arguments)
    for word in rest:
        if not word.startswith("-"):
            overrides.append(_opened(word))
            continue
        flags.append(word)
        if word in _VALUE_FLAGS:
            flags.extend(itertools.islice(rest, 1))
    return flags + overrides


@dataclass(frozen=True)
class Grid(Sequence[DictConfig]):
    """The configurations of the points, each made when it is asked for.

    Attributes:
        points: of each the configuration with its choice of groups, and the (key, value) pairs on top of it.
    """

    points: list[tuple[DictConfig, tuple[tuple[str, Any], ...]]]

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: Any) -> Any:
        base, settings = self.points[index]
        config = base.copy()
        for key, value in settings:
            OmegaConf.update(config, key, value, force_add=True)
        return config

    @cached_property
    def parameters(self) -> set[str]:
        """The parameters of the recipes, which any of the values may fill."""
        return set().union(*map(_parameters_of, self.first_of_each))

    @property
    def choices(self) -> list[DictConfig]:
        """The configuration of each choice of groups, without what its points set."""
        return list({id(base): base for base, _ in self.points}.values())

    @property
    def first_of_each(self) -> list[DictConfig]:
        """The first point of each choice of groups."""
        firsts: dict[int, int] = {}
        for number, (base, _) in enumerate(self.points):
            firsts.setdefault(id(base), number)
        return [self[number] for number in firsts.values()]


@dataclass(frozen=True)
class CommandLine:
    """What a command line asks for.

    Attributes:
        typed: the arguments, reordered.
        arguments: the same for Hydra, with a + where its configuration lacks a key.
        is_sweep: whether it is a multirun.
        swept: the keys with several values, in the order in which they were given.
        config: the configuration of the first point, with Hydra's part.
        points: the grid, as far as it is listed here and not by a sweeper.
        jobs: the overrides of each point, for our sweeper.
        left_out: hyperparameters with the recipes of the sweep that have none.
    """

    typed: list[str]
    arguments: list[str]
    is_sweep: bool
    swept: list[str]
    config: DictConfig
    points: Grid
    jobs: list[list[str]]
    left_out: Mapping[str, Sequence[str]]

    @property
    def lists_points(self) -> bool:
        """Whether its points are known beforehand, as those of a search are not."""
        return bool(self.config.hydra.runtime.choices["hydra/sweeper"] == OUR_SWEEPER)


def check(arguments: Sequence[str]) -> CommandLine:
    """Read a command line and check its names.

    Raises:
        ConfigError: everything that is wrong with it.
    """
    flags = get_args_parser().parse_args(list(arguments))
    with hydra_of(flags):
        try:
            return _check(list(arguments), list(flags.overrides), bool(flags.multirun))
        except HydraException as error:
            raise ConfigError(_in_our_words(error)) from None


def _check(arguments: list[str], words: list[str], multirun: bool) -> CommandLine:
    groups = GlobalHydra.instance().config_loader().list_groups("")
    parsed = [parse_override(word) for word in words]
    problems = Problems()
    for override in parsed:
        if _is_group(override, groups):
            _check_options(override, problems)
    problems.raise_as(ConfigError)
    chosen = [o for o in parsed if _is_group(o, groups)]
    fixed = [str(o.input_line) for o in parsed if o.is_hydra_override() and not o.is_sweep_override()]
    chosen_words = [*next(_choose(chosen)), *fixed]
    first = _compose(chosen_words)
    is_sweep = multirun or first.hydra.mode == RunMode.MULTIRUN
    if is_sweep:
        given = {o.key_or_group for o in parsed}
        preset = [f"{k}={v}" for k, v in (first.hydra.sweeper.params or {}).items() if k not in given]
        parsed = [*map(parse_override, preset), *parsed]
    elif swept := [o.input_line for o in parsed if o.is_sweep_override()]:
        raise ConfigError(f"{', '.join(map(str, swept))} has several values: add -m to run each of them.")
    settled = _settled(parsed, groups, first)
    sweep = _points(parsed, settled) if is_sweep else Points([], [str(o.input_line) for o in parsed], [{}])
    points = _grid(sweep, groups, {tuple(chosen_words): first}, problems)
    problems.raise_as(ConfigError)
    added = points.parameters | sweep.own  # which the configuration of the sweep as a whole may lack
    completed = [f"++{word}" if _key(word) in added else word for word in arguments]
    jobs = [_job(words, points.parameters) for words in sweep.words]
    _check_used({k for k in sweep.swept if k not in groups and k != BLOCK}, points, problems)
    _check_distinct_outputs(is_sweep, points, problems)
    problems.raise_as(ConfigError)
    return CommandLine(arguments, completed, is_sweep, sweep.swept, points[0], points, jobs, sweep.left_out)


def _job(words: list[str], parameters: set[str]) -> list[str]:
    """The overrides of a point as Hydra's sweepers give them to a launcher."""
    named = (f"++{word}" if _key(word) in parameters else word for word in words)
    return [word for word in named if not word.lstrip("+").startswith(("hydra.", "hydra/"))]


def _points(parsed: list[Override], config: DictConfig) -> Points:
    """The points of a sweep; of one that another sweeper makes, one for all."""
    if config.hydra.runtime.choices["hydra/sweeper"] == OUR_SWEEPER:
        return points_of(parsed, config)
    swept = [o for o in parsed if o.is_sweep_override()]
    fixed = [str(o.input_line) for o in parsed if o not in swept]
    first = {o.get_key_element(): str(_values(o)[0]) for o in swept}
    return Points([o.key_or_group for o in swept], fixed, [first])


def _settled(overrides: list[Override], groups: list[str], config: DictConfig) -> DictConfig:
    """The configuration with every value that is not varied."""
    config = config.copy()
    for override in overrides:
        is_value = not _is_group(override, groups) and not override.is_hydra_override()
        if is_value and not override.is_sweep_override():
            OmegaConf.update(config, override.key_or_group, override.value(), force_add=True)
    return config


def _grid(
    sweep: Points, groups: list[str], bases: dict[tuple[str, ...], DictConfig], problems: Problems
) -> Grid:
    """The points, composed once for each choice of groups; names that a choice does not know are noted.

    Args:
        sweep: the points as overrides.
        groups: all there are.
        bases: the choices that are composed already.
        problems: where they are noted.
    """
    points: list[tuple[DictConfig, tuple[tuple[str, Any], ...]]] = []
    named: dict[tuple[int, str], tuple[int, Override]] = {}
    for words in sweep.words:
        parsed = [parse_override(word) for word in words]
        choice = tuple(str(o.input_line) for o in parsed if _is_group(o, groups) or o.is_hydra_override())
        values = [o for o in parsed if not _is_group(o, groups) and not o.is_hydra_override()]
        base = bases[choice] if choice in bases else bases.setdefault(choice, _compose(list(choice)))
        points.append((base, tuple((o.key_or_group, o.value()) for o in values)))
        named.update({(id(base), o.key_or_group): (len(points) - 1, o) for o in values})
    grid = Grid(points)
    for number, override in named.values():
        if override.key_or_group not in grid.parameters:
            _check_name(grid, number, override, problems)
    return grid


def _choose(chosen: list[Override]) -> Iterator[list[str]]:
    """Every combination of options of the chosen groups, as overrides."""
    for words in itertools.product(*(_words(o) for o in chosen)):
        yield list(words)


def _words(override: Override) -> list[str]:
    """An override for each value of a sweep; one that is no sweep as it was typed."""
    if not override.is_discrete_sweep():
        return [str(override.input_line)]
    return [f"{override.get_key_element()}={text}" for text in override.sweep_string_iterator()]


def _values(override: Override) -> list[Any]:
    if override.is_discrete_sweep():
        return list(override.sweep_iterator())
    if override.is_interval_sweep():  # for sweepers that search: any value of it stands for all
        return [override.value().start]  # type: ignore[union-attr]
    return [override.value()]


def _is_group(override: Override, groups: list[str]) -> bool:
    return override.key_or_group in groups or "/" in override.key_or_group


def _check_options(override: Override, problems: Problems) -> None:
    loader = GlobalHydra.instance().config_loader()
    group = override.key_or_group
    options = {*loader.get_group_options(group), *(PRESETS if group == "blocks" else ())}
    for name in _values(override):
        if isinstance(name, str) and name not in options:
            problems.add(f"{group}={name}: there is no such {group}.{did_you_mean(str(name), options)}")


def _check_name(grid: Grid, number: int, override: Override, problems: Problems) -> None:
    """Whether a key that a point sets exists without that; `+key` may be new."""
    if override.is_add() or override.is_force_add():
        return
    config = grid.points[number][0]
    node: Any = config
    path = override.key_or_group.split(".")
    for depth, part in enumerate(path):
        if isinstance(node, ListConfig) and part.isdecimal() and int(part) < len(node):
            node = node._get_node(int(part))
        elif isinstance(node, DictConfig) and part in node.keys():  # `in node` says no to a missing value
            node = node._get_node(part)
        else:
            known = [str(k) for k in node if k != "hydra"] if isinstance(node, DictConfig) else []
            where = ".".join(path[:depth]) or f"the recipe{_recipe_of(config)}"
            deeper = [f"{name}.{part}" for name in known if not depth and _has(config._get_node(name), part)]
            if deeper:
                hint = f" Did you mean '{deeper[0]}'?"
            else:
                hint = did_you_mean(part, known) if depth else _nearest(part, known, _used_by(grid[number]))
            problems.add(f"{override.key_or_group}: {where} has no '{part}'.{hint}")
            return


def _nearest(name: str, known: Sequence[str], used: set[str]) -> str:
    """A hint for a name that the configuration lacks: the recipe's own ones are more likely to be meant."""
    likely = difflib.get_close_matches(name, used, cutoff=0.6)
    near = likely or difflib.get_close_matches(name, known, cutoff=0.75)
    return did_you_mean(name, near) if near else f" It uses {', '.join(sorted(used)) or 'no hyperparameter'}."


def _has(node: Any, name: str) -> bool:
    return isinstance(node, DictConfig) and name in node.keys()  # no keys where it is missing or empty


def _recipe_of(config: DictConfig) -> str:
    name = config.hydra.runtime.choices.get("recipe")
    return f" '{name}'" if name else ""


def _check_used(swept: set[str], points: Grid, problems: Problems) -> None:
    """A swept hyperparameter must reach the recipe, or the sweep would be one merge many times."""
    seen: set[tuple[int, str]] = set()
    for number, (base, settings) in enumerate(points.points):
        for key in (k for k, _ in settings if k in swept and "." not in k and (id(base), k) not in seen):
            seen.add((id(base), key))
            used = _used_by(points[number])
            if key not in used:
                problems.add(
                    f"{key} is swept, but the recipe{_recipe_of(base)} does not use it, so every point would "
                    f"be the same merge. It uses {', '.join(sorted(used)) or 'no hyperparameter'}."
                )


def _used_by(config: DictConfig) -> set[str]:
    """The top-level hyperparameters that the recipe refers to, directly or through another one."""
    raw = OmegaConf.to_container(config, resolve=False)
    assert isinstance(raw, dict)
    used = _parameters_of(config)
    waiting = [raw.get("recipe"), *(raw.get(name) for name in used)]
    while waiting:
        for reference in _REFERENCE.findall(str(waiting.pop())):
            key = reference.partition(".")[0]
            if key not in used:
                used.add(key)
                waiting.append(raw.get(key))
    return {key for key in used if key not in ("models", "blocks", "recipe")}


def _parameters_of(config: DictConfig) -> set[str]:
    """The parameters of the recipe, where it is or may hold a template."""
    raw = OmegaConf.to_container(config, resolve=False)
    assert isinstance(raw, dict)
    if not _TEMPLATE.search(str(raw.get("recipe"))):
        return set()
    from mecha_exp.app.point import resolve
    from mecha_exp.app.templates import names_in
    from mecha_exp.sources.search import folders_of

    resolved = resolve(config)
    return names_in(resolved["recipe"], folders_of(resolved))


def _check_distinct_outputs(is_sweep: bool, points: Grid, problems: Problems) -> None:
    if not any(p.output.path for p in points.first_of_each):
        return
    paths = [str(p.output.path) for p in points if p.output.save and p.output.path]
    if is_sweep and len(points) > 1 and len(set(paths)) < len(paths):
        problems.add(
            f"output.path={paths[0]} is the same for several points, which would overwrite each other. Put "
            "a swept value into it, as in 'output.path=merged-${alpha}.safetensors'."
        )


def _compose(overrides: list[str]) -> DictConfig:
    return compose(CONFIG_NAME, overrides=overrides, return_hydra_config=True)


def _key(word: str) -> str:
    """What an override sets."""
    return "" if word.startswith("-") else word.partition("=")[0]


def _opened(word: str) -> str:
    """`blocks.x=1` as `++blocks.x=1`, and several presets of blocks as a sweep."""
    is_open = any(word.startswith(f"{node}.") for node in OPEN_NODES)
    return f"++{word}" if is_open else expanded(word)


def _in_our_words(error: HydraException) -> str:
    if isinstance(error, OverrideParseException):
        hint = _IN_MAPPINGS if "{" in str(error.override) else ""
        return f"'{error.override}' cannot be read: {str(error.message).splitlines()[0]}.{hint}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines) or type(error).__name__


def program_name() -> str:
    """How the program was called, for messages."""
    return "mecha-exp" if Path(sys.argv[0]).stem == "mecha-exp" else "python -m mecha_exp"
