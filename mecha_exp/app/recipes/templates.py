"""Recipe templates in a configuration: `recipe=mecha recipe.path=template.mecha a=a.safetensors alpha=0.3`.

A parameter of the recipe is filled by the top-level value of its name, which need not be in any file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mecha_exp.app.recipes.files import with_files, without_files
from mecha_exp.checkpoint.sidecars import SmallFiles
from mecha_exp.errors import ConfigError, brief, did_you_mean
from mecha_exp.graph.nodes import InMemory, Node, call, models_of
from mecha_exp.graph.rewrite import rewrite
from mecha_exp.lab.points import SEED_PATH
from mecha_exp.mergekit.documents import by_name, load_documents, paths_in, with_values
from mecha_exp.mergekit.methods import METHODS, SEED
from mecha_exp.mergekit.recipe import Merge, read_merge
from mecha_exp.recipe import build_recipe, deserialize_path, parameters_of
from mecha_exp.recipe.files import fill_from_files, find_recipe
from mecha_exp.recipe.keys import for_keys
from mecha_exp.recipe.yaml_reader import KEYS

MERGEKIT = "mergekit"
"""The word of a recipe that is a configuration of mergekit."""


def build_filled(config: Mapping[str, Any], folders: Sequence[Path], reserved: Sequence[str]) -> Node:
    """Build the recipe of a resolved configuration, and fill the parameters that it has values for.

    Args:
        config: the whole configuration; its `recipe` is built.
        folders: where recipes are looked for, after the current folder.
        reserved: top-level names that mean something else, and fill nothing.

    Raises:
        RecipeError: everything that is wrong with it.
    """
    if is_of_mergekit(config.get("recipe")):
        if config.get(KEYS) is not None:
            raise ConfigError("keys: a configuration of mergekit says itself what each tensor gets: filter.")
        _require_free_names(find_recipe(Path(config["recipe"][MERGEKIT]), folders), reserved)
        return merge_of_mergekit(config, folders).recipe
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


def _require_free_names(path: Path, reserved: Sequence[str]) -> None:
    """Check that no document is named like a value of the bench, so that neither is taken for the other."""
    documents = load_documents(path)
    clashes = sorted(by_name(documents).keys() & set(reserved)) if len(documents) > 1 else []
    if clashes:
        raise ConfigError(
            f"{path}: a document has the name {clashes[0]!r}, which has a meaning of its own here: "
            f"{clashes[0]}.dtype would be read as both. Give it another name."
        )


def merge_of_mergekit(config: Mapping[str, Any], folders: Sequence[Path]) -> Merge:
    """The merge of a configuration of mergekit, with the values that are given for its dotted paths.

    Raises:
        MechaError: as `from_mergekit` raises it; or it is a mixture of experts, which has no signature.
    """
    path = find_recipe(Path(config["recipe"][MERGEKIT]), folders)
    values = {name: _value_at(config, name) for name in paths_in(path)}
    offline = bool((config.get("hub") or {}).get("offline", True))
    merge = read_merge(path, {name: v for name, v in values.items() if v is not None}, folders, offline)
    if any(isinstance(model.source, InMemory) for model in models_of(merge.recipe)):
        raise ConfigError(
            f"{path} is a mixture of experts, whose gates are made in memory, so that a run could not be "
            f"found again by its inputs. Merge it by itself: python -m mecha_exp merge {path} OUTPUT"
        )
    return merge


def notes_of(config: Mapping[str, Any], folders: Sequence[Path]) -> tuple[str, ...]:
    """What of a configuration of mergekit has no effect, in sentences; none of any other recipe."""
    return merge_of_mergekit(config, folders).notes if is_of_mergekit(config.get("recipe")) else ()


def small_files_of(config: Mapping[str, Any], folders: Sequence[Path]) -> SmallFiles:
    """The small files that a recipe brings for the folder of its output; see `Job`."""
    is_foreign = is_of_mergekit(config.get("recipe"))
    return merge_of_mergekit(config, folders).small_files if is_foreign else {}


def config_of_mergekit(config: Mapping[str, Any], folders: Sequence[Path]) -> Mapping[str, Any] | None:
    """The configuration of mergekit that a recipe is, with its values; None for any other recipe."""
    return merge_of_mergekit(config, folders).config if is_of_mergekit(config.get("recipe")) else None


def base_of_mergekit(config: Mapping[str, Any], folders: Sequence[Path]) -> str | None:
    """The base model that a configuration of mergekit names; None for any other recipe, or without one.

    Several documents in one file have none in common.

    Raises:
        MechaError: it cannot be read.
    """
    if not is_of_mergekit(config.get("recipe")):
        return None
    documents = load_documents(find_recipe(Path(config["recipe"][MERGEKIT]), folders))
    named = config.get("base_model") or documents[0].get("base_model")
    return named if isinstance(named, str) and len(documents) == 1 else None


def first_seed_of(path: Path, values: Mapping[str, Any], folders: Sequence[Path]) -> int | None:
    """The seed of the random masks of a configuration of mergekit; None if it draws none.

    A file of several documents has a seed for each, and none of its own.

    Raises:
        MechaError: it cannot be read.
    """
    documents = load_documents(find_recipe(path, folders))
    if len(documents) > 1:
        return None
    config = with_values(documents[0], values)
    method = METHODS.get(str(config.get("merge_method")))
    if method is None or SEED not in method.parameters:
        return None
    seed = _value_at(config, SEED_PATH)
    return seed if isinstance(seed, int) else 0


def names_in(recipe: Any, folders: Sequence[Path]) -> set[str]:
    """The names of the parameters of a configured recipe, before they are filled.

    Of a configuration of mergekit they are the dotted paths of its values.

    Raises:
        RecipeError: everything that is wrong with the recipe.
    """
    if is_of_mergekit(recipe):
        return set(paths_in(find_recipe(Path(recipe[MERGEKIT]), folders)))
    return {parameter.name for parameter in parameters_of(_built(without_files(recipe), folders))}


def is_of_mergekit(recipe: Any) -> bool:
    """Whether the `recipe` of a configuration is one of mergekit."""
    return isinstance(recipe, Mapping) and MERGEKIT in recipe


def _value_at(config: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; None where there is none."""
    value: Any = config
    for word in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(word, value.get(int(word)) if word.isdecimal() else None)
    return value


def _built(recipe: Any, folders: Sequence[Path]) -> Node:
    return build_recipe(
        recipe,
        load_text=lambda path: deserialize_path(find_recipe(Path(path), folders)),
        model_dirs=folders,
    )
