"""Refuses what a command line gives and the recipe does not use: models, strengths of blocks, new keys."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from mecha_exp.app.config.grid import Grid, GridPoint, recipe_name, references_of
from mecha_exp.app.sweep.hyperparameters import recipes_of_any_number
from mecha_exp.app.words.experts import names_of
from mecha_exp.app.words.plain_data import REFERENCE, as_written, entry
from mecha_exp.app.words.quotes import shell_word
from mecha_exp.errors import Problems, did_you_mean, some
from mecha_exp.graph.by_key import BLOCKS, CONVENTION, PATTERNS, PRESET
from mecha_exp.recipe.foreign import word_of

_MODELS, _BASE, _EXPERTS = "models", "models.base", "models.experts"
_MEASURED = "regmean_plus_plus or df_merge"
_FILES_OF = {
    "models.statistics": "fisher or regmean",
    "models.masks": "stitch",
    "models.data": _MEASURED,
    "models.module": _MEASURED,
}
"""What stands beside the experts, and recipes that read it."""
DEMO = "pkg://mecha_exp.examples.digits/"
_RESOLVED = re.compile(r"\$\{[^}]*[^\w.}][^}]*\}")  # what a resolver refers to is not known
_OPEN = ("hydra", "evaluator", "blocks", "recipe", "debug", "experiment")
_OPEN_PARTS = ("sweep.options.",)


def check_unused(grid: Grid, swept: Sequence[str], own: frozenset[str], problems: Problems) -> None:
    """Check that the models, the strengths of blocks and the new keys of each point are used.

    Args:
        grid: the points.
        swept: the keys with several values, which are checked elsewhere, and those that only label points.
        own: keys that are hyperparameters of some recipe of the sweep.
        problems: receives a message for each that is not.
    """
    several = len(grid.choices) > 1
    taken = _experts_of_any(grid) if several else set()
    of_any = set().union(*map(references_of, grid.first_of_each)) if several else set()
    seen: set[tuple[Any, ...]] = set()
    for point in grid.points:
        typed = tuple(str(o.input_line) for o in point.overrides if _is_checked(o))
        if (id(point.base), typed) in seen:
            continue
        seen.add((id(point.base), typed))
        config = point.config()
        references = references_of(config)
        _check_blocks(config, references, problems)
        if not _RESOLVED.search(str(as_written(config.recipe))):
            elsewhere = references | _references_elsewhere(config)
            _check_models(point, config, elsewhere, taken, problems)
            _check_base(point, config, elsewhere | of_any, problems)
            _check_files(point, config, elsewhere | of_any, problems)
        _check_new_keys(point, config, references, {*swept, *own, *grid.parameters}, problems)


def is_base_idle(point: GridPoint) -> bool:
    """Whether a point gives a base that its recipe does not merge, as others of its sweep do."""
    config = point.config()
    is_known = not _RESOLVED.search(str(as_written(config.recipe)))
    return is_known and _BASE in _typed(point) and not {_BASE, _MODELS} & references_of(config)


def idle_experts(config: DictConfig) -> list[str]:
    """The experts of a configuration that its recipe does not merge."""
    experts = _experts(config)
    references = references_of(config)
    if word_of(config.recipe):  # which names its own models
        return []
    if _EXPERTS in references or _RESOLVED.search(str(as_written(config.recipe))):
        return []
    names = names_of([str(path) for path in experts])
    return [name for i, name in enumerate(names) if f"{_EXPERTS}.{i}" not in references]


def _is_checked(override: Override) -> bool:
    key = override.key_or_group
    return key.startswith((f"{_MODELS}.", f"{BLOCKS}.")) or override.is_add() or override.is_force_add()


def _experts(config: DictConfig) -> list[Any]:
    listed = OmegaConf.select(config, _EXPERTS)  # which may refer to one of models.sets
    if not OmegaConf.is_list(listed):
        return [listed] * (listed is not None)
    return list(as_written(listed))


def _experts_of_any(grid: Grid) -> set[int]:
    """The indices of the experts that some recipe of a sweep uses."""
    taken: set[int] = set()
    for config in grid.first_of_each:
        references = references_of(config)
        taken |= {i for i in range(len(_experts(config))) if _uses(i, references)}
    return taken


def _uses(index: int, references: set[str]) -> bool:
    return bool({_MODELS, _EXPERTS, f"{_EXPERTS}.{index}"} & references)


def _references_elsewhere(config: DictConfig) -> set[str]:
    """The keys that other parts of a configuration refer to, such as an evaluator to the base."""
    others = [value for key, value in as_written(config).items() if key not in ("hydra", "recipe", _MODELS)]
    return set(REFERENCE.findall(str(others)))


def _check_blocks(config: DictConfig, references: set[str], problems: Problems) -> None:
    blocks = config.get(BLOCKS) or {}
    names = [name for name in (*blocks, *(blocks.get(PATTERNS) or ())) if name not in (CONVENTION, PATTERNS)]
    own = [f"the preset {blocks[PRESET]}" if name == PRESET else str(name) for name in names]
    if own and BLOCKS not in references:
        problems.add(
            f"{BLOCKS}: the recipe{recipe_name(config)} takes no strength for each block, so {some(own, 3)} "
            "would not be used. Leave it out, or choose a recipe that has an alpha by block, such as ties, "
            "task_arithmetic or weighted_sum."
        )


def _check_models(
    point: GridPoint, config: DictConfig, references: set[str], taken: set[int], problems: Problems
) -> None:
    experts = _experts(config)
    used = [i for i in range(len(experts)) if _uses(i, references)]
    is_typed = any(f"{key}.".startswith(f"{_EXPERTS}.") for key in _typed(point))
    idle = [i for i in range(len(experts)) if i not in used and i not in taken]
    if is_typed and idle:
        names = some((Path(str(experts[i])).name for i in idle), 3)
        with_base = _BASE in references
        base = "models.base (still the demo's) and " if base_of_demo(config) else "models.base and "
        merged = f"{base if with_base else ''}{len(used) or 'no'} of the {len(experts)} experts"
        problems.add(
            f"{_EXPERTS}: the recipe{recipe_name(config)} merges {merged}, so {names} would not be used. "
            f"Leave out what is not used, or choose a recipe of any number of experts: "
            f"{some(recipes_of_any_number(with_base=with_base), 6)}."
        )


def _check_base(point: GridPoint, config: DictConfig, references: set[str], problems: Problems) -> None:
    """Whether the base is read by the recipe, or by another one of the sweep."""
    if _BASE in _typed(point) and config.models.get("base") is not None and not {_BASE, _MODELS} & references:
        problems.add(
            f"{_BASE}: the recipe{recipe_name(config)} merges the experts alone, so the base would not be "
            f"used. Leave it out, or add it to {_EXPERTS}."
        )


def base_of_demo(config: DictConfig) -> str | None:
    """The base of the bundled demo where a recipe merges it with experts that are not of the demo."""
    base = config.models.get("base")
    experts = [str(expert) for expert in _experts(config)]
    is_of_demo = isinstance(base, str) and base.startswith(DEMO) and {_BASE, _MODELS} & references_of(config)
    return base if is_of_demo and not any(expert.startswith(DEMO) for expert in experts) else None


def _typed(point: GridPoint) -> set[str]:
    return {o.key_or_group for o in point.overrides if not o.is_delete()}


def _check_files(point: GridPoint, config: DictConfig, references: set[str], problems: Problems) -> None:
    """Whether files beside the experts are read by the recipe, or by another one of the sweep."""
    for key, readers in _FILES_OF.items():
        is_typed = any(f"{o.key_or_group}.".startswith(f"{key}.") for o in point.overrides)
        is_read = _MODELS in references or any(f"{name}.".startswith(f"{key}.") for name in references)
        if is_typed and not is_read and OmegaConf.select(config, key):
            problems.add(
                f"{key}: the recipe{recipe_name(config)} does not read it, so it would not be used. "
                f"Leave it out, or choose a recipe that reads it, such as {readers}."
            )


def _check_new_keys(
    point: GridPoint, config: DictConfig, references: set[str], known: set[str], problems: Problems
) -> None:
    """Whether each key that was added with a `+` is used."""
    raw = as_written(point.base)
    everything = references | _references_elsewhere(config)
    for override in point.overrides:
        key = override.key_or_group
        top = key.partition(".")[0]
        is_new = override.is_add() or override.is_force_add()
        is_used = key in known or any(r == key or r.startswith((f"{key}.", f"{top}[")) for r in everything)
        is_open = top in _OPEN or key.startswith(_OPEN_PARTS)
        if not is_new or is_open or is_used or top in everything - {_MODELS} or _has(raw, key):
            continue
        siblings = raw.get(top) if "." in key else None
        names = list(siblings) if isinstance(siblings, Mapping) else [*references, *raw]
        hint = did_you_mean(key.rpartition(".")[2], [str(n) for n in names if n != "hydra"])
        problems.add(f"{shell_word(str(override.input_line))}: nothing uses '{key}'.{hint}")


def _has(raw: Any, key: str) -> bool:
    try:
        reduce(entry, key.split("."), raw)
    except LookupError:
        return False
    return True
