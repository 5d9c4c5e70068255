"""Fits a sweep over several recipes: each recipe gets only the hyperparameters that it has.

`recipe=ties,task_arithmetic alpha=0.3,0.5 k=0.1,0.2` has four points of TIES, and two of task arithmetic,
which has no k. What a recipe has is read from its file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from mecha_exp.app.config.options import option_values
from mecha_exp.app.sweep.meanings import different_meanings
from mecha_exp.lab.points import Setting

GROUP = "recipe"


@dataclass(frozen=True)
class RecipeFile:
    """The hyperparameters in the file of a recipe.

    Attributes:
        values: its hyperparameters with their defaults, and its graph; None where that cannot be told.
    """

    values: Mapping[str, Any] | None

    @classmethod
    def load(cls, name: str) -> RecipeFile:
        """Read the file of a recipe, with the files that it is based on.

        One that names a text or a configuration has the hyperparameters that stand there.
        """
        values = option_values(GROUP, name)
        is_open = values is None or bool({"mecha", "mergekit"} & (values.get(GROUP) or {}).keys())
        return cls(None if is_open else values)

    def has(self, key: str) -> bool:
        """Whether a key is one of its hyperparameters."""
        return self.values is not None and key in self.values

    def uses(self, key: str) -> bool:
        """Whether it has or may have a hyperparameter, or refers to it."""
        return self.values is None or key in self.values or f"${{{key}" in str(self.values)

    @property
    def seed(self) -> int | None:
        """The default seed of its random draws; None if it makes none."""
        seed = (self.values or {}).get("seed")
        return seed if isinstance(seed, int) else None


@dataclass(frozen=True)
class Fitted:
    """The points of a sweep over several recipes.

    Attributes:
        fixed: overrides that all points have.
        settings: what each point sets beside them.
        own: keys that are hyperparameters of some recipe.
        left_out: keys with the recipes that have none.
        meanings: a sentence for each key that means different things in the recipes.
    """

    fixed: list[Override]
    settings: list[Setting]
    own: frozenset[str]
    left_out: dict[str, list[str]]
    meanings: list[str]


def recipes_with(key: str) -> list[str]:
    """The recipes that have a hyperparameter of that name."""
    return [name for name, file in _recipes() if file.has(key)]


def recipes_of_any_number(*, with_base: bool) -> list[str]:
    """The recipes that merge all experts, those with a base or those without one."""
    values = {name: file.values or {} for name, file in _recipes()}
    graphs = {name: str(v.get(GROUP)) for name, v in values.items()}
    return [
        name
        for name, graph in graphs.items()
        if "${models.experts}" in graph and ("${models.base}" in graph) == with_base
    ]


def _recipes() -> list[tuple[str, RecipeFile]]:
    names = sorted(GlobalHydra.instance().config_loader().get_group_options(GROUP))
    return [(name, RecipeFile.load(name)) for name in names]


def recipe_of(setting: Setting, config: DictConfig) -> str:
    """The name of a point's recipe."""
    return setting.get(GROUP, str(config.hydra.runtime.choices.get(GROUP)))


def drop_unused(
    settings: Sequence[Setting], fixed: Sequence[Override], varied: Sequence[str], config: DictConfig
) -> Fitted:
    """Drop the hyperparameters that a point's recipe lacks and another recipe of the sweep has.

    A key that none of them has stays everywhere, so that it is an error; so does what a listed point names.

    Args:
        settings: the points.
        fixed: overrides that all points have.
        varied: the keys that were listed with several values.
        config: with its groups chosen.
    """
    files = {name: RecipeFile.load(name) for name in dict.fromkeys(recipe_of(s, config) for s in settings)}
    set_keys = {key.lstrip("+") for key in varied} | {o.key_or_group for o in fixed if not o.is_delete()}
    groups = config.hydra.runtime.choices
    own = {key for key in set_keys if key not in groups and any(file.has(key) for file in files.values())}
    left_out = {key: [n for n, file in files.items() if not file.uses(key)] for key in sorted(own)}
    left_out = {key: names for key, names in left_out.items() if names}
    moved = {
        o.get_key_element(): str(o.input_line).partition("=")[2] for o in fixed if o.key_or_group in left_out
    }

    def fitted(setting: Setting) -> Setting:
        name = recipe_of(setting, config)
        texts = {**moved, **setting}
        return {k: text for k, text in texts.items() if name not in left_out.get(k.lstrip("+"), ())}

    kept = [o for o in fixed if o.key_or_group not in left_out]
    meanings = different_meanings(sorted(own), {name: file.values for name, file in files.items()})
    return Fitted(kept, [fitted(s) for s in settings], frozenset(own), left_out, meanings)
