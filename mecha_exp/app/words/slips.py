"""Words of other tools and likely slips: for each the command that is meant."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mecha_exp.app.words.quotes import joined, quoted, shell_word
from mecha_exp.errors import ConfigError, brief, nearest

PROGRAM = "python -m mecha_exp"
MODELS = (".safetensors", ".sft", ".ckpt", ".pt", ".pth", ".bin", ".gguf")
"""The suffixes of `checkpoint.formats`, which needs torch: a mistake is named sooner without it."""
_YAML = (".yml", ".yaml")
_MEANT = {
    "help": "--help",
    "version": "--version",
    "methods": "info methods",
    "configs": "info",
    "models": "info",
    "sweep": "--help",
    "run": "--help",
}
_VALUES = {
    ("engine", "gpu"): "cuda",
    ("engine", "cuda:0"): "cuda",
    ("engine", "device"): "cuda",
    ("tracking", "false"): "none",
    ("tracking", "off"): "none",
    ("evaluator", "false"): "none",
    ("output", "false"): "none",
}
_MERGEKIT = re.compile(r"^\s*(merge_method|slices|base_model)\s*:", re.MULTILINE)


def require_settings(arguments: Sequence[str], verbs: Callable[[], Sequence[str]]) -> None:
    """Check that no word stands for a verb where settings are expected.

    Raises:
        ConfigError: a verb that is misspelt, or not the first word.
    """
    for word in arguments:
        if word.isascii() and word.isalpha() and (known := nearest(word, verbs(), 0.75)):
            raise ConfigError(
                f"{brief(word)} is not a setting. If the verb {known[0]} is meant, it is the first word: "
                f"{PROGRAM} {known[0]} ..."
            )


def explain_bare(words: Sequence[str], number: int) -> str:
    """A message for a word without `=` where an override is expected."""
    word = words[number]
    following = words[number + 1] if number + 1 < len(words) else ""
    if word.strip("+~ ").startswith("="):
        before = words[number - 1] if number and "=" not in words[number - 1] else "alpha"
        value = word.strip("+~ =") or following or "0.3"
        meant = shell_word(f"{before}={value}")
        return f"{brief(word)} has no name before its '='. Type it without spaces: {meant}"
    opened = next((w for w in words[:number] if _is_open(w)), None)
    if opened and number and word.endswith(("]", "}", ",")):
        whole = " ".join(words[words.index(opened) : number + 1])
        return f"{brief(word)} stands alone: a list with spaces is one word in quotes: {shell_word(whole)}"
    if word in _MEANT:
        return f"'{word}' is not a setting. Type: {PROGRAM} {_MEANT[word]}"
    if message := _explain_file(word, words):
        return message
    if re.fullmatch(r"[A-Za-z_][\w.]*", word) and (value := " ".join(words[number + 1 :]).lstrip(" =")):
        following = value.split()[0]
    if re.fullmatch(r"[A-Za-z_][\w.]*", word) and following and "=" not in following:
        return f"{brief(word)}: a name and its value are one word: {shell_word(f'{word}={following}')}"
    return (
        f"{brief(word)} cannot be read: expected a setting such as alpha=0.3 or models.base=a.safetensors. "
        f"{PROGRAM} --help lists them."
    )


def _is_open(word: str) -> bool:
    """Whether a bracket of a word is not closed in it."""
    return word.count("[") + word.count("{") > word.count("]") + word.count("}")


def _explain_file(word: str, words: Sequence[str]) -> str | None:
    """A message for the name of a file that stands alone."""
    suffix = Path(word[-255:]).suffix.lower()
    if suffix == ".mecha":
        return f"{brief(word)} is a recipe. Type: {joined(['python', '-m', 'mecha_exp', 'merge', word])}"
    if suffix in _YAML and (message := mergekit_message(word)):
        return message
    if suffix not in MODELS:
        return None
    files = [w for w in words if "=" not in w and Path(w[-255:]).suffix.lower() in MODELS]
    experts = ",".join(map(quoted, files[1:])) or "b.safetensors"
    meant = ["recipe=weighted_sum"] if len(files) == 2 else []
    meant += [f"models.base={quoted(files[0])}", f"models.experts=[{experts}]"]
    return f"{brief(word)} is a model. Say what it is: {PROGRAM} {joined(meant)}"


def explain_flag(flag: str, arguments: Sequence[str], flags: Mapping[str, int]) -> str | None:
    """A message for a word with dashes that is not a flag; None for flags."""
    name, equals, value = flag.partition("=")
    if name in flags:
        return None
    bare = name.lstrip("-")
    after = list(arguments[list(arguments).index(flag) + 1 :])[:1] if flag in arguments else []
    if not equals and after and "=" not in after[0] and not after[0].startswith("-"):
        value = after[0]
    near = f" Did you mean '{nearest(name, flags, 0.75)[0]}'?" if nearest(name, flags, 0.75) else ""
    if re.fullmatch(r"[A-Za-z_][\w.-]+", bare):
        setting = shell_word(f"{bare.replace('-', '_')}={value or '...'}")
        return f"{brief(flag)} is not a flag. Settings have no dashes: {setting}.{near}"
    return f"{brief(flag)} is not a flag.{near or f' {PROGRAM} --help lists them.'}"


def explain_value(key: str, value: str) -> str | None:
    """A message for a value that means something else here; None for all others."""
    if meant := _VALUES.get((key, value.lower())):
        return f"{key}={value}: there is no such {key}. Did you mean {key}={meant}?"
    if key == "recipe":
        return _explain_recipe(value)
    return None


def _explain_recipe(value: str) -> str | None:
    suffix = Path(value[-255:]).suffix.lower()
    if suffix == ".mecha":
        meant = joined(["recipe=mecha", f"recipe.path={quoted(value)}"])
        return f"recipe={value}: a .mecha file is given as {meant}"
    if suffix in _YAML:
        return mergekit_message(value) or (
            f"recipe={value}: a recipe is chosen by its name. Put the file at FOLDER/recipe/"
            f"{Path(value).name} and type: {PROGRAM} --config-dir FOLDER recipe={Path(value).stem}"
        )
    if suffix in MODELS:
        return (
            f"recipe={value}: this is a model. The merge in its header is done again by: {PROGRAM} merge "
            f"{shell_word(value)}"
        )
    return None


def mergekit_message(path: str) -> str | None:
    """A message for a configuration of mergekit; None for any other file."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(100_000)
    except (OSError, ValueError):
        return None
    if not _MERGEKIT.search(text):
        return None
    return (
        f"{brief(path)} is a configuration of mergekit. Type: {PROGRAM} merge {shell_word(path)} OUTPUT, or "
        f"for a sweep: {PROGRAM} recipe=mergekit {shell_word(f'recipe.path={path}')}"
    )
