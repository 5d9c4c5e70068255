"""Recipe templates in a configuration: `recipe=mecha recipe.path=template.mecha a=a.safetensors alpha=0.3`.

A parameter of the recipe is filled by the top-level value of its name, which need not be in any file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mecha_exp.app.recipes.files import with_files, without_files
from mecha_exp.errors import ConfigError, brief, did_you_mean
from mecha_exp.graph.nodes import InMemory, Node, call, models_of
from mecha_exp.graph.rewrite import rewrite
from mecha_exp.recipe import build_recipe, deserialize_path, parameters_of
from mecha_exp.recipe.files import fill_from_files, find_recipe
from mecha_exp.recipe.foreign import GROUP, ForeignRecipe, RecipeReader, reader_of, value_at, word_of
from mecha_exp.recipe.keys import for_keys
from mecha_exp.recipe.yaml_reader import KEYS, NODE_WORDS


def build_filled(config: Mapping[str, Any], folders: Sequence[Path], reserved: Sequence[str]) -> Node:
    """Build the recipe of a resolved configuration, and fill the parameters that it has values for.

    Args:
        config: the whole configuration; its `recipe` is built.
        folders: where recipes are looked for, after the current folder.
        reserved: top-level names that mean something else, and fill nothing.

    Raises:
        RecipeError: everything that is wrong with it.
    """
    if word := word_of(config.get("recipe")):
        if config.get(KEYS) is not None:
            raise ConfigError(f"keys: a configuration of {word} says itself what each tensor gets: filter.")
        reader, path = _foreign(config["recipe"], word, folders)
        reader.check_names(path, reserved)
        return foreign_recipe(config, word, folders).recipe
    recipe = _built(with_files(config.get("recipe"), folders), folders)
    names = sorted({parameter.name for parameter in parameters_of(recipe)} - set(reserved))
    values = {name: config[name] for name in names if config.get(name) is not None}
    filled = fill_from_files(recipe, values, folders)
    return for_keys(_renamed(filled, config["models"].get("rename")), config.get(KEYS))


def _renamed(recipe: Node, rules: Any) -> Node:
    """A recipe that reads some of its models under other keys: `{MODEL: "OLD -> NEW, ..."}`.

    Raises:
        ConfigError: expected a mapping of models to rules, or the recipe does not read one of the models.
    """
    if not rules:
        return recipe
    if not isinstance(rules, Mapping) or not all(isinstance(rule, str) for rule in rules.values()):
        raise ConfigError(
            "models.rename: expected rules by model, such as {b.safetensors: '* -> bert.*'}, got "
            f"{brief(rules)}."
        )
    models = {str(model.source): model for model in models_of(recipe)}
    for name in rules:
        if name not in models:
            raise ConfigError(
                f"models.rename: the recipe reads no model {name!r}, as it is written there."
                f"{did_you_mean(str(name), models)}"
            )
    calls: dict[Node, Node] = {
        models[name]: call("rename_keys", models[name], rule) for name, rule in rules.items()
    }
    (renamed,) = rewrite([recipe], lambda node: calls.get(node, node))
    return renamed


def _require_read(recipe: Any) -> None:
    """Check that a recipe which is the path of a file is not in the form of a tool that no package reads."""
    words = recipe.keys() - {"path", *NODE_WORDS} if isinstance(recipe, Mapping) and "path" in recipe else ()
    if len(words) == 1 and not recipe.keys() & {*NODE_WORDS}:
        (word,) = words
        raise ConfigError(
            f"recipe={word}: it is read by a package that is not installed here, which announces "
            f"{word} by an entry point of the group {GROUP}."
        )


def _foreign(recipe: Mapping[str, Any], word: str, folders: Sequence[Path]) -> tuple[RecipeReader, Path]:
    """What reads a recipe in the form of another tool, and its file."""
    return reader_of(word), find_recipe(Path(recipe[word]), folders)


def foreign_recipe(config: Mapping[str, Any], word: str, folders: Sequence[Path]) -> ForeignRecipe:
    """The recipe in the form of another tool, with the values that are given for its dotted paths.

    Raises:
        MechaError: as its reader raises it; or it has tensors in memory, which have no signature.
    """
    reader, path = _foreign(config["recipe"], word, folders)
    values = {name: value_at(config, name) for name in reader.paths(path)}
    offline = bool((config.get("hub") or {}).get("offline", True))
    merge = reader.read(path, {name: v for name, v in values.items() if v is not None}, folders, offline)
    if any(isinstance(model.source, InMemory) for model in models_of(merge.recipe)):
        raise ConfigError(
            f"{path} is {merge.in_memory}, so that a run could not be found again by its inputs. Merge it by "
            f"itself: python -m mecha_exp merge {path} OUTPUT"
        )
    return merge


def brought_by(config: Mapping[str, Any], folders: Sequence[Path]) -> ForeignRecipe | None:
    """What a recipe in the form of another tool brings beside its graph; None of our own recipes."""
    word = word_of(config.get("recipe"))
    return foreign_recipe(config, word, folders) if word else None


def notes_of(config: Mapping[str, Any], folders: Sequence[Path]) -> tuple[str, ...]:
    """What of a recipe in the form of another tool has no effect, in sentences; none of our own recipes."""
    merge = brought_by(config, folders)
    return merge.notes if merge else ()


def foreign_base(config: Mapping[str, Any], folders: Sequence[Path]) -> str | None:
    """The base model that a recipe in the form of another tool names; None of our own recipes.

    Raises:
        MechaError: it cannot be read.
    """
    word = word_of(config.get("recipe"))
    if word is None:
        return None
    reader, path = _foreign(config["recipe"], word, folders)
    return reader.base(path, config)


def first_seed_of(word: str, path: Path, values: Mapping[str, Any], folders: Sequence[Path]) -> int | None:
    """The seed of a recipe in the form of another tool; None if it draws nothing at random.

    Raises:
        MechaError: it cannot be read.
    """
    return reader_of(word).seed(find_recipe(path, folders), values)


def names_in(recipe: Any, folders: Sequence[Path]) -> set[str]:
    """The names of the parameters of a configured recipe, before they are filled.

    Of one in the form of another tool they are the dotted paths of its values.

    Raises:
        RecipeError: everything that is wrong with the recipe.
    """
    if word := word_of(recipe):
        reader, path = _foreign(recipe, word, folders)
        return set(reader.paths(path))
    return {parameter.name for parameter in parameters_of(_built(without_files(recipe), folders))}


def _built(recipe: Any, folders: Sequence[Path]) -> Node:
    _require_read(recipe)
    return build_recipe(
        recipe,
        load_text=lambda path: deserialize_path(find_recipe(Path(path), folders)),
        model_dirs=folders,
    )
