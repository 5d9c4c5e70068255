"""Checks the names on a command line against the configuration: options, keys, swept hyperparameters."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence, Set
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from mecha_exp.app.config.compose import Composer
from mecha_exp.app.config.grid import Grid, GridPoint, recipe_name, used_by
from mecha_exp.app.config.method_recipes import GROUP, names_of_methods
from mecha_exp.app.sweep.hyperparameters import recipes_with
from mecha_exp.app.words.plain_data import REFERENCE, as_written, entry
from mecha_exp.app.words.quotes import shell_word
from mecha_exp.errors import Problems, did_you_mean, nearest, some
from mecha_exp.graph.by_key import BLOCKS
from mecha_exp.graph.curves import PRESETS
from mecha_exp.recipe.foreign import word_of
from mecha_exp.recipe.yaml_reader import KEYS

_PER_POINT = {"joblib": "processes", "submitit_local": "processes", "submitit_slurm": "slurm"}
"""The successors of launchers that ran each point by itself."""

_SINGULAR = {"blocks": "preset of blocks", "models": "set of models"}


def values_of(override: Override) -> list[Any]:
    """The values that an override gives its key, one or several."""
    if override.is_discrete_sweep():
        return list(override.sweep_iterator())
    if override.is_interval_sweep():  # for sweepers that search: one value stands for the interval
        return [override.value().start]  # type: ignore[union-attr]
    return [override.value()]


def check_options(override: Override, composer: Composer, problems: Problems) -> None:
    """Whether the options that an override chooses exist."""
    group = override.key_or_group
    options = composer.options(group) | set(PRESETS if group == "blocks" else ())
    names = [name for value in values_of(override) for name in _named(value)]
    if group == GROUP and not all(isinstance(name, str) and name in options for name in names):
        options |= names_of_methods()
    for name in names:
        if group == "hydra/launcher" and str(name) in _PER_POINT:
            problems.add(
                f"hydra/launcher={name} ran each point by itself, and nothing was shared. Points run in "
                f"shares now, each one pass of a worker: hydra/launcher={_PER_POINT[str(name)]}, or ray."
            )
        elif not isinstance(name, str) and not override.is_delete():
            example = "none" if name is None and "none" in options else min(options)
            problems.add(
                f"{group}: expected the name of an option, such as {group}={example}. What it sets is "
                f"changed by {group}.KEY=VALUE."
            )
        elif isinstance(name, str) and name not in options:
            what = _SINGULAR.get(group, group)
            problems.add(f"{group}={name}: there is no such {what}.{_option_hint(group, name, options)}")


def _named(value: Any) -> list[Any]:
    """The names of a choice, which may be a list; {} stands for what is not a name, and for none of them."""
    if not isinstance(value, list):
        return [value]
    return [each if isinstance(each, str) else {} for each in value] or [{}]


def check_removals(overrides: Sequence[Override], composer: Composer, problems: Problems) -> None:
    """Whether a `~` takes away what every run reads: a group, or a setting of the sweep."""
    for key in (o.key_or_group for o in overrides if o.is_delete()):
        group, _, name = key.partition(".")
        if key in composer.groups and (options := composer.options(key)):
            example = "none" if "none" in options else min(options)
            problems.add(f"~{key}: every run needs '{key}'. Choose an option of it, as in {key}={example}.")
        elif group == "sweep" and name:
            problems.add(f"~{key}: settings of a sweep cannot be taken away. Give it a value: {key}=...")


def _option_hint(group: str, name: str, options: Set[str]) -> str:
    hint = did_you_mean(name, options)
    if group == "evaluator" and not nearest(name, options):
        return f"{hint} An evaluator of a plugin is chosen by {shell_word(f'evaluator.name={name}')}."
    return hint


def check_names(grid: Grid, problems: Problems) -> None:
    """Whether the keys that points set exist in their configurations; `+key` may be new."""
    overrides = {
        (id(point.base), o.key_or_group): (point, o) for point in grid.points for o in point.overrides
    }
    raw = {id(base): as_written(base) for base in grid.choices}
    for point, override in overrides.values():
        key = override.key_or_group
        is_new = override.is_add() or override.is_force_add()
        is_item = any(o.key_or_group == key.rpartition(".")[0] for o in point.overrides)
        if not is_new and not is_item and key not in grid.parameters:
            _check_name(point, raw[id(point.base)], key, grid.parameters, problems)


def _check_name(point: GridPoint, node: Any, key: str, parameters: Iterable[str], problems: Problems) -> None:
    path = key.split(".")
    for depth, part in enumerate(path):
        try:
            node = entry(node, part)
        except LookupError:
            is_place = depth == 0 or part.isdecimal()
            if is_place and (others := _paths_beside(key, point, parameters)):
                hint = did_you_mean(key, others)
                problems.add(f"{key}: no such value in the configuration of mergekit.{hint}")
                return
            parent = ".".join(path[:depth]) or f"the recipe{recipe_name(point.base)}"
            hint = _hint(point, part, node if isinstance(node, dict) else {}, depth == 0)
            meant = _block_meant(point, path)
            problems.add(f"{key}: {parent} has no '{part}'.{meant or hint}")
            return


def _paths_beside(key: str, point: GridPoint, paths: Iterable[str]) -> list[str]:
    """The dotted paths in a configuration of mergekit beside a key, or else all of them.

    There are none of other recipes, and none for a key without a dot.
    """
    place = key.rpartition(".")[0]
    if not place or not word_of(as_written(point.base).get("recipe")):
        return []
    dotted = sorted(path for path in paths if "." in path)
    return [path for path in dotted if path.rpartition(".")[0] == place] or dotted


def _block_meant(point: GridPoint, path: Sequence[str]) -> str:
    """The hint for a strength of a block that is sought below another key; empty for other keys."""
    if BLOCKS in path[:-1]:
        name = ".".join(path[list(path).index(BLOCKS) + 1 :])
    elif len(path) > 1 and path[0] in used_by(point.config()) and not path[1].isdecimal():
        name = ".".join(path[1:])
    else:
        return ""
    return f" A block gets its own strength by {shell_word(f'{BLOCKS}.{name}=0.3')}"


def _hint(point: GridPoint, name: str, siblings: dict[str, Any], is_top: bool) -> str:
    """The key that is likely meant by a name that the configuration lacks."""
    known = [str(key) for key in siblings if key != "hydra"]
    if not is_top:
        return did_you_mean(name, known) if known else ""
    deeper = [f"{key}.{name}" for key in known if isinstance(siblings[key], dict) and name in siblings[key]]
    if own := re.fullmatch(r"\$\{(\w+)\}", str((siblings.get("recipe") or {}).get(name))):
        return f" The method's '{name}' is the recipe's hyperparameter '{own[1]}'."
    return f" Did you mean '{deeper[0]}'?" if deeper else _nearest(name, known, used_by(point.config()))


def _nearest(name: str, known: Sequence[str], used: set[str]) -> str:
    """The closest name: a hyperparameter of the recipe is more likely than another key."""
    likely = difflib.get_close_matches(name, used, cutoff=0.6)
    near = likely or difflib.get_close_matches(name, known, cutoff=0.75)
    if near:
        return did_you_mean(name, near)
    others = recipes_with(name) if len(used) != 1 else []  # where there is one, that one is meant
    of_others = f" '{name}' belongs to {some((f'recipe={r}' for r in others), 4)}." if others else ""
    return f" It uses {', '.join(sorted(used)) or 'no hyperparameter'}.{of_others}"


def check_used(swept: set[str], grid: Grid, problems: Problems) -> None:
    """Whether each swept hyperparameter reaches the recipe; else the points would be equal merges."""
    checked: set[tuple[int, str]] = set()
    for point in grid.points:
        keys = [o.key_or_group for o in point.overrides if o.key_or_group in swept]
        for key in (k for k in keys if "." not in k and (id(point.base), k) not in checked):
            checked.add((id(point.base), key))
            used = used_by(point.config())
            if key not in (*used, KEYS):
                names = ", ".join(sorted(used)) or "no hyperparameter"
                problems.add(
                    f"{key} is swept, but the recipe{recipe_name(point.base)} does not use it, so every "
                    f"point would be the same merge. It uses {names}."
                )


def check_outputs(grid: Grid, problems: Problems) -> None:
    """Whether the paths of models are texts, and points do not overwrite each other's models."""
    if not any(as_written(config.output)["path"] for config in grid.first_of_each):
        return
    for config in grid.first_of_each:
        for name in REFERENCE.findall(str(as_written(config.output)["path"])):
            if OmegaConf.is_config(OmegaConf.select(config, name)):
                problems.add(
                    f"output.path: ${{{name}}} is a mapping or a list, and no text. The name of the recipe "
                    "is ${hydra:runtime.choices.recipe}; 'output.path=merged/' gives each point of a sweep "
                    "a folder with its name."
                )
                return
    if "${hydra:" in str(as_written(grid.first_of_each[0].output)):
        return  # the folder or the number of the point, which differ
    paths = [str(config.output.path) for config in grid if config.output.save and config.output.path]
    if len(set(paths)) < len(paths):
        problems.add(
            f"output.path={paths[0]} is the same for several points, which would overwrite each other. Name "
            "a folder by 'output.path=merged/': each point has a folder with its name there. Or put a swept "
            "value into it, as in 'output.path=merged-${alpha}.safetensors', or leave it out."
        )
