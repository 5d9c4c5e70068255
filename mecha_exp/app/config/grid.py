"""The configurations of a sweep's points, and the hyperparameters that their recipes use."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict, read_write

from mecha_exp.app.config.compose import Composer
from mecha_exp.app.config.jobs import Scratch
from mecha_exp.app.config.overrides import decides_files, parse_override, unchecked
from mecha_exp.app.words.plain_data import REFERENCE, as_written

_TEMPLATE = re.compile(r"'(?:mecha|mergekit|parameter)':")  # a node of a recipe that brings parameters


@dataclass(frozen=True)
class GridPoint:
    """A point as its configuration's choice of groups, and the values on top of it.

    Attributes:
        base: the configuration of its choice of groups, shared by all points with that choice.
        pickled: the same, which is read six times as fast as it is copied.
        overrides: the values that the point sets.
    """

    base: DictConfig
    pickled: bytes
    overrides: tuple[Override, ...]

    def config(self, scratch: Scratch | None = None) -> DictConfig:
        """The configuration of the point, made of that of the last one where there is a scratch."""
        return (scratch or Scratch()).compose(self.pickled, [unchecked(o) for o in self.overrides]).config


@dataclass(frozen=True)
class Grid(Sequence[DictConfig]):
    """The configurations of the points, each composed when it is requested."""

    points: list[GridPoint]

    @classmethod
    def of(
        cls, points: Sequence[Sequence[str]], composer: Composer, mode: RunMode = RunMode.MULTIRUN
    ) -> Grid:
        """The grid of points that are given by their overrides; or of one that runs alone."""
        bases: dict[tuple[str, ...], tuple[DictConfig, bytes]] = {}
        return cls([_grid_point(words, composer, bases, mode) for words in points])

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: Any) -> Any:
        return self._config(index, Scratch())

    def in_turn(self) -> Iterator[DictConfig]:
        """The configurations one after another; each may become the next one (see `Scratch`)."""
        scratch = Scratch()
        return (self._config(index, scratch) for index in range(len(self)))

    def _config(self, index: int, scratch: Scratch) -> DictConfig:
        config = self.points[index].config(scratch)
        with read_write(config.hydra.job), open_dict(config.hydra.job):
            config.hydra.job.num = index  # as its job has it, for paths that refer to it
        return config

    @cached_property
    def parameters(self) -> set[str]:
        """The parameters of the recipes; values of the configuration may fill them."""
        return set().union(*map(parameters_of, self.first_of_each))

    def check_types(self) -> None:
        """Raise a ConfigError where a configuration has a value of another type, but for references."""
        from mecha_exp.app.preparation import check_types, with_paths

        for config in self.first_of_each:
            written = dict(as_written(config))
            with_paths(config, written)
            check_types({n: v for n, v in written.items() if not REFERENCE.search(str(v))})

    @property
    def choices(self) -> list[DictConfig]:
        """The configuration of each choice of groups, without the values of its points."""
        return list({id(point.base): point.base for point in self.points}.values())

    @property
    def first_of_each(self) -> list[DictConfig]:
        """The first point of each choice of groups."""
        firsts: dict[int, GridPoint] = {}
        for point in self.points:
            firsts.setdefault(id(point.base), point)
        return [point.config() for point in firsts.values()]


def _grid_point(
    words: Sequence[str],
    composer: Composer,
    bases: dict[tuple[str, ...], tuple[DictConfig, bytes]],
    mode: RunMode,
) -> GridPoint:
    parsed = [parse_override(word) for word in words]
    choice = tuple(str(o.input_line) for o in parsed if decides_files(o, composer.groups))
    values = tuple(o for o in parsed if not decides_files(o, composer.groups))
    if choice not in bases:
        base = composer.compose([*choice, f"hydra.mode={mode.name}"])
        bases[choice] = base, pickle.dumps(base)
    return GridPoint(*bases[choice], values)


def recipe_name(config: DictConfig) -> str:
    """The recipe of a configuration, in quotes after a space; empty without one."""
    name = config.hydra.runtime.choices.get("recipe")
    return f" '{name}'" if name else ""


def used_by(config: DictConfig) -> set[str]:
    """The top-level hyperparameters that the recipe refers to, directly or through another one."""
    used = {reference.partition(".")[0] for reference in references_of(config)}
    return {key for key in used if key not in ("models", "blocks", "recipe")}


def references_of(config: DictConfig) -> set[str]:
    """The keys that the recipe refers to, directly or through another one, such as `models.experts.0`."""
    raw = as_written(config)
    references = parameters_of(config)
    waiting = [raw.get("recipe"), *(raw.get(name) for name in references)]
    while waiting:
        for reference in REFERENCE.findall(str(waiting.pop())):
            if reference not in references:
                references.add(reference)
                waiting.append(raw.get(reference.partition(".")[0]))
    return references


def parameters_of(config: DictConfig) -> set[str]:
    """The parameters of the recipe, if it is or may contain a template."""
    raw = as_written(config)
    if not _TEMPLATE.search(str(raw.get("recipe"))):
        return set()
    from mecha_exp.app.preparation import resolve
    from mecha_exp.app.recipes.templates import names_in
    from mecha_exp.plugins import load_plugins
    from mecha_exp.sources.search import folders_of

    resolved = resolve(config)
    load_plugins(resolved.get("plugins") or ())  # a text names methods, which may be theirs
    return names_in(resolved["recipe"], folders_of(resolved))
