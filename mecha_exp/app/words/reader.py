"""Turns the words that people type into the overrides that Hydra parses."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from mecha_exp.app.words.blocks import BLOCKS, apart, block_words
from mecha_exp.app.words.quotes import parse, quoted, split, with_home
from mecha_exp.app.words.slips import explain_bare, explain_flag, explain_value
from mecha_exp.app.words.wildcards import hide_stars
from mecha_exp.errors import CheckpointError, ConfigError, Problems

OPEN_NODES = (BLOCKS, "evaluator", "sweep.options")
"""Nodes that take any key: an override of a key in them does not need a `+`."""

FLAGS = {
    **dict.fromkeys(("--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r"), 0),
    **dict.fromkeys(("--multirun", "-m", "--shell-completion", "-sc"), 0),
    **dict.fromkeys(("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn"), 1),
    **dict.fromkeys(("--config-dir", "-cd", "--experimental-rerun"), 1),
    **dict.fromkeys(("--info", "-i"), 0),
}
"""Hydra's flags, with the number of words that follow each."""

_PATHS = (
    *("models.base", "models.dir", "models.cache", "recipe.path", "sweep.file", "output.path", "store"),
    "tracking.uri",
)
_LISTS_OF_PATHS = (
    *("models.experts", "models.sets", "models.statistics", "models.masks", "models.data"),
    "plugins",
)
_NEW = ("output.path", "models.cache")
"""Paths that need not exist yet."""


def reorder(arguments: Sequence[str]) -> list[str]:
    """The arguments with every flag before every override, so that `-m` may stand anywhere.

    >>> reorder(["recipe=ties", "-m", "alpha=0.3,0.5"])
    ['-m', 'recipe=ties', 'alpha=0.3,0.5']
    """
    flags, overrides = _parted(arguments)
    return flags + overrides


def read(arguments: Sequence[str]) -> list[str]:
    """The arguments for Hydra's parser: its flags as they are, and every other word as overrides.

    Raises:
        ConfigError: all words that mean nothing, each with the one that is likely meant.
    """
    flags, typed = _parted(arguments)
    problems = Problems()
    folders = [Path(with_home(w.partition("=")[2])) for w in typed if w.startswith("models.dir=")]
    overrides: list[str] = []
    for number, word in enumerate(typed):
        try:
            overrides += _overrides(typed, number, folders) if word.strip() else []
        except ConfigError as error:
            problems.add(error)
            if "=" not in word.strip("="):  # and the words after it are likely its value
                break
    problems.raise_as(ConfigError)
    return flags + apart(overrides)


def _parted(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The flags, each with its value, and the other words.

    Raises:
        ConfigError: all words with dashes that are not flags, and flags whose value is missing.
    """
    flags: list[str] = []
    others: list[str] = []
    problems = Problems()
    rest = iter(arguments)
    for word in rest:
        if not word.startswith("-"):
            others.append(word)
            continue
        if message := explain_flag(word, arguments, FLAGS):
            problems.add(message)
        values = list(itertools.islice(rest, FLAGS.get(word, 0)))
        is_setting = any("=" in value and not Path(value).exists() for value in values)
        if len(values) < FLAGS.get(word, 0) or is_setting:
            problems.add(f"{word}: the word after it is missing, which says what the flag is about.")
        flags += [word, *values]
    problems.raise_as(ConfigError)
    return flags, others


def _overrides(words: Sequence[str], number: int, folders: Sequence[Path]) -> list[str]:
    """The overrides of a word.

    Raises:
        ConfigError: it is not an override, or its value cannot be used.
    """
    word = words[number]
    if "=" not in word and not word.startswith("~"):
        raise ConfigError(explain_bare(words, number))
    key, equals, value = word.partition("=")
    if not equals:
        return [word]
    if not key.strip("+~ "):
        raise ConfigError(explain_bare(words, number))
    name = key.lstrip("+")
    if message := explain_value(name, value):
        raise ConfigError(message)
    value = _literal(name, with_home(value), folders)
    if name == BLOCKS or name.startswith(f"{BLOCKS}."):
        return block_words(name, value)
    if (name.startswith("weights.") or name.endswith(".*")) and (hidden := hide_stars(name)):
        return [f"{hidden}={value}"]
    is_open = any(name.startswith(f"{node}.") for node in OPEN_NODES)
    return [f"++{name}={value}"] if is_open else [f"{key}={value}"]


def _literal(key: str, value: str, folders: Sequence[Path]) -> str:
    """The value of a path, in quotes where a file has the characters of Hydra's grammar in its name."""
    lists = [part.strip() for part in split(value)] if key in _LISTS_OF_PATHS else []
    if lists and all(part.startswith("[") and part.endswith("]") for part in lists):
        return ",".join(_list_of_literals(part, folders) for part in lists)
    if key in _PATHS or key in _LISTS_OF_PATHS or key.rpartition(".")[0] in _LISTS_OF_PATHS:
        return quoted(value) if _is_literal(key, value, folders) else value
    return value


def _list_of_literals(value: str, folders: Sequence[Path]) -> str:
    """A list with those of its parts in quotes that are paths, and those of lists in it."""
    parts = [part.strip() for part in split(value[1:-1])]
    words = [_literal_in_list(part, folders) for part in parts]
    return f"[{','.join(words)}]" if words != parts else value


def _literal_in_list(part: str, folders: Sequence[Path]) -> str:
    if _is_literal("", part, folders):
        return quoted(part)
    return _list_of_literals(part, folders) if part.startswith("[") and part.endswith("]") else part


def _is_literal(key: str, value: str, folders: Sequence[Path]) -> bool:
    """Whether a value is a path whose characters Hydra would not take as they are."""
    override = parse(f"x={value}")
    if override is not None and not override.is_sweep_override() and override.value() == value:
        return False
    if not value or value[0] in "'\"" or "${" in value:
        return False
    if override is None and key in _NEW:
        return True
    if "," in value and override is not None and not _exists(value, ()):
        return False  # a list of files, which are looked for one by one
    return _exists(value, folders)


def _exists(path: str, folders: Sequence[Path]) -> bool:
    if "\0" in path or len(path) > 4096:
        return False
    try:
        if Path(path).exists():
            return True
        from mecha_exp.checkpoint.remote import is_address  # imports torch, which takes seconds
        from mecha_exp.sources.search import find_model

        if is_address(path):
            return "," not in path  # which of several is looked up when it is needed

        find_model(path, folders)
    except (CheckpointError, OSError, ValueError):
        return False
    return True
