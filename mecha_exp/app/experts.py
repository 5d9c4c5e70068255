"""The experts and the base of a point: the models that its numbers are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from mecha_exp.app.point import Point
from mecha_exp.app.recipes.templates import foreign_base
from mecha_exp.app.words.experts import names_of
from mecha_exp.checkpoint.model import ADAPTER_CONFIG
from mecha_exp.errors import CheckpointError, ConfigError
from mecha_exp.graph.nodes import ModelNode
from mecha_exp.sources.readers import readers
from mecha_exp.sources.search import find_model


def experts_found(point: Point) -> list[Path]:
    """The files of `models.experts` that exist; a recipe may do without the others."""
    paths = []
    for model in point.config["models"].get("experts") or ():
        with suppress(CheckpointError):
            paths.append(find_model(str(model), point.options.model_dirs))
    return paths


def base_of(point: Point) -> str | None:
    """The name of the base among the inputs of a point; None if the base is not one of them.

    Of a configuration of mergekit it is its `base_model`.
    """
    base = foreign_base(point.config, point.options.model_dirs) or point.config["models"].get("base")
    names = {point.files[node]: name for node, name in point.names.items()}
    try:
        return names.get(find_model(str(base), point.options.model_dirs)) if base else None
    except CheckpointError:  # it does not exist, and the recipe does without it
        return None


def base_of_adapter(point: Point, path: Path) -> Path | None:
    """The model that an input stands on, if the input is an adapter of PEFT; None for a model.

    Raises:
        CheckpointError: the base of an adapter that the recipe does not merge does not exist.
        RecipeError: nothing tells the base of an adapter.
    """
    if not (path / ADAPTER_CONFIG).is_file():
        return None
    by_node = {point.files[node]: node for node in point.names}
    if path in by_node:
        bases: dict[ModelNode, ModelNode] = {}
        for reader in readers([path / ADAPTER_CONFIG]):
            bases |= reader.bases(point.recipe, point.options.model_dirs)
        return point.files[bases[by_node[path]]] if by_node[path] in bases else None
    base = point.config["models"].get("base")
    return find_model(str(base), point.options.model_dirs) if base else None


def experts_of(point: Point) -> dict[str, str]:
    """The names of the models that `models.expert_of` makes experts, by task."""
    names = {path: name for name, path in experts_left_out(point).items()}
    names |= {point.files[node]: name for node, name in point.names.items()}
    return {task: names[path] for task, path in named_experts(point).items() if path in names}


def experts_left_out(point: Point) -> dict[str, Path]:
    """The files of the experts that `models.expert_of` names and the point does not merge, by short names."""
    merged = {*point.names.values()}
    paths = dict.fromkeys(path for path in named_experts(point).values() if path not in point.files.values())
    named = zip(names_of([str(path) for path in paths]), paths, strict=True)
    return {name: path for name, path in named if name not in merged}


def named_experts(point: Point) -> dict[str, Path]:
    """The files of the experts that `models.expert_of` names, by task: inputs by their names, or paths."""
    named = point.config["models"].get("expert_of") or {}
    if not isinstance(named, Mapping):
        raise ConfigError(f"models.expert_of={named}: expected tasks with models: {{task_a: expert_a}}.")
    files = {name: point.files[node] for node, name in point.names.items()}
    others = _experts_by_name(point)
    return {
        str(task): files.get(str(model))
        or find_model(others.get(str(model), str(model)), point.options.model_dirs)
        for task, model in named.items()
    }


def _experts_by_name(point: Point) -> dict[str, str]:
    """The paths of the experts that a point could have merged: of `models.experts`, and of its set."""
    models = point.config["models"]
    sets, number = models.get("sets") or (), point.expert_set or 0
    of_set = sets[number] if number < len(sets) else ()
    named: dict[str, str] = {}
    for experts in (of_set, models.get("experts") or ()):
        paths = [str(expert) for expert in experts]
        named |= zip(names_of(paths), paths, strict=True)
    return named
