"""The names that are typed for the arguments of a recipe: `k` where its YAML says `density: ${k}`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from mecha_exp.app.words.plain_data import REFERENCE, as_written

_ARGUMENT = re.compile(r"\brecipe(?:\.\w+)+")


def in_typed_names(message: str, config: DictConfig) -> str:
    """A message about a recipe's arguments, each under the name that sets it on the command line.

    Args:
        message: names arguments by their places, as in `recipe.density: 1.5 is out of range [0, 1]`.
        config: of the job, with references that are not resolved.
    """
    recipe = config.get("recipe")
    if not OmegaConf.is_config(recipe):
        return message
    references = dict(_references("recipe", as_written(recipe)))

    def typed(match: re.Match[str]) -> str:
        place = match[0]
        names = [name for path, name in references.items() if path == place or path.startswith(f"{place}.")]
        set_ones = [name for name in names if OmegaConf.select(config, name)]
        return " or ".join(dict.fromkeys(set_ones or names)) or place

    return _ARGUMENT.sub(typed, message)


def _references(place: str, value: Any) -> Iterator[tuple[str, str]]:
    """The places in a recipe that are nothing but a reference, each with the name that it refers to."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _references(f"{place}.{name}", item)
    elif isinstance(value, str) and (match := REFERENCE.fullmatch(value)):
        yield place, match[1]
