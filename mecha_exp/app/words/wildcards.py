"""Words for each of several things: `blocks.IN*=interval(0,1)` is a range for each block of its own.

`alpha.*` stands for each item of a list, such as each knot of a gradient.
Hydra's keys hold no `*`. From reading to composing, which tells what there is, it is written as `$`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

from hydra.core.override_parser.types import Override

from mecha_exp.app.words.quotes import KEY
from mecha_exp.errors import ConfigError, did_you_mean

ANY = "$"
"""What stands for `*` in a key."""
_NAMED = ("blocks.", "weights.")
"""Where patterns of names stand; elsewhere a star alone is each item of a list."""


def has_stars(override: Override) -> bool:
    """Whether an override stands for each of several blocks, weights, or items of a list."""
    key = override.key_or_group
    return (ANY in key and key.startswith(_NAMED)) or key.endswith(f".{ANY}")


def hide_stars(key: str) -> str | None:
    """A key with its stars written so that Hydra reads it; None if it has none, or more than stars.

    >>> hide_stars("weights.*"), hide_stars("blocks.a"), hide_stars("blocks.IN?*")
    ('weights.$', None, None)
    """
    hidden = key.replace("*", ANY)
    return hidden if "*" in key and ANY not in key and KEY.fullmatch(hidden.replace(ANY, "_")) else None


def expand_each(overrides: Sequence[Override], names_below: Callable[[str], Sequence[str]]) -> list[str]:
    """The words of overrides; one with stars becomes a word for each name that it matches.

    A name that another word sets keeps what that one says.

    Args:
        overrides: of the command line.
        names_below: the names of what there is below a key: `blocks`, `weights`, or a list.

    Raises:
        ConfigError: stars that match nothing, or a name that cannot stand in a key.
    """
    set_alone = {override.key_or_group for override in overrides}
    words: list[str] = []
    for override in overrides:
        word = str(override.input_line)
        if not has_stars(override):
            words.append(word)
            continue
        key, _, value = word.partition("=")
        name = override.key_or_group
        parent, _, pattern = name.partition(".") if name.startswith(_NAMED) else name.rpartition(".")
        keys = [f"{parent}.{name}" for name in _matching(pattern, names_below(parent), word)]
        sign = key.removesuffix(override.key_or_group)
        words += [f"{sign}{name}={value}" for name in keys if name not in set_alone]
    return words


def places_of(key: str, value: Any) -> list[str]:
    """The names of the items of a list: their places.

    Raises:
        ConfigError: it is not a list.
    """
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConfigError(
            f"{key}.*: {key} is {value} and not a list, whose items the star stands for. For a gradient over "
            f"the layers, each of whose knots is searched, begin with as many: {key}=[0.5,0.5,0.5]."
        )
    return [str(place) for place in range(len(value))]


def _matching(pattern: str, names: Sequence[str], word: str) -> list[str]:
    """The names that a pattern matches, each fit to stand in a key beside the others."""
    typed = word.lstrip("+").replace(ANY, "*")
    matching = fnmatch.filter(names, pattern.replace(ANY, "*"))
    if not matching:
        raise ConfigError(f"{typed}: no name is like it.{did_you_mean('', names)}")
    if unfit := next((name for name in matching if not KEY.fullmatch(f"_.{name}")), None):
        raise ConfigError(f"{typed}: '{unfit}' cannot stand in the name of a key.")
    if inner := next((a for a in matching for b in matching if a.startswith(f"{b}.")), None):
        raise ConfigError(f"{typed}: '{inner}' is a part of another one that it matches. Name fewer.")
    return matching
