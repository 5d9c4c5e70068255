"""What a hyperparameter means in each recipe of a sweep, by the help of the parameter that it goes to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mecha_exp.app.recipes.files import without_files
from mecha_exp.app.words.plain_data import as_written
from mecha_exp.errors import RecipeError
from mecha_exp.method_api.registry import resolve_method

_DETAIL = re.compile(r"[,:;]")


def different_meanings(keys: Iterable[str], recipes: Mapping[str, Mapping[str, Any] | None]) -> list[str]:
    """A sentence for each hyperparameter that means different things in the recipes.

    Args:
        keys: the hyperparameters that a sweep sets.
        recipes: the top-level values of each recipe's file, by its name; None where they cannot be told.
    """
    notes = []
    for key in keys:
        by_meaning: dict[str, list[str]] = {}
        for name, values in recipes.items():
            recipe = without_files(as_written((values or {}).get("recipe")))
            meaning = " and ".join(dict.fromkeys(_meanings(recipe, key)))
            if meaning:
                by_meaning.setdefault(meaning, []).append(name)
        if len(by_meaning) > 1:
            listed = "; ".join(f"in {', '.join(names)}: {meaning}" for meaning, names in by_meaning.items())
            notes.append(
                f"{key} means different things ({listed}). Compare each recipe at its own best {key}, and "
                f"not rows of equal {key}."
            )
    return notes


def _meanings(recipe: Any, key: str) -> Iterator[str]:
    """The help of each parameter of a recipe that a hyperparameter goes to, without its details."""
    if not isinstance(recipe, Mapping):
        return
    try:
        signature = resolve_method(str(recipe["method"])).signature if "method" in recipe else None
    except RecipeError:  # of a plugin that is not loaded yet, or a mistake that is reported later
        signature = None
    reference = f"${{{key}}}"
    for name, value in recipe.items():
        if isinstance(value, Mapping) and ("method" in value or signature is None):
            yield from _meanings(value, key)
        elif signature and name in signature.names and reference in str(value):
            yield from filter(None, [_DETAIL.split(signature[str(name)].help)[0].strip()])
