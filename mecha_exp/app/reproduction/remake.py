"""Reproduces a result: finds its inputs, merges them with the original settings, compares."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mecha_exp.app.outputs.makers import setting_in
from mecha_exp.app.point import Point
from mecha_exp.app.preparation import prepare
from mecha_exp.app.provenance import environment
from mecha_exp.app.reproduction.comparison import Outcome, compare_bytes, compare_numbers
from mecha_exp.app.reproduction.original import Original
from mecha_exp.app.reproduction.sources import restore_plugins
from mecha_exp.checkpoint import is_file_name
from mecha_exp.checkpoint.formats import SAFETENSORS
from mecha_exp.checkpoint.remote import place_of
from mecha_exp.engine.code_hash import code_hashes
from mecha_exp.engine.options import SETTINGS
from mecha_exp.errors import CheckpointError, ConfigError
from mecha_exp.graph.nodes import ModelNode, Node, models_of
from mecha_exp.graph.rewrite import rewrite
from mecha_exp.lab.content_hash import content_of, is_hash
from mecha_exp.plugins import load_plugins
from mecha_exp.recipe import deserialize
from mecha_exp.runs.record import CHANGES_FILE, CHECKOUT_CHANGES_FILE
from mecha_exp.sources.search import find_model, is_there


def remake(
    original: Original,
    folders: Sequence[Path],
    output: Path | None,
    scratch: Path,
    anyway: bool = False,
    plugins: Sequence[str] = (),
) -> Outcome:
    """Reproduce a result.

    Args:
        original: the result and its provenance.
        folders: the folders to search for inputs, by name or by content.
        output: the path of the reproduced model; None does not keep it.
        scratch: a folder for temporary files.
        anyway: whether to go on if the content of an input has changed.
        plugins: that are loaded already, and stand for those of their names.

    Raises:
        ConfigError: a plugin is gone, and was not kept; or the output is an adapter.
    """
    if setting_in(original.config.get("output") or {}):
        raise ConfigError(
            "the output is an adapter, and models alone are reproduced. The command of the run makes the "
            "adapter again, with rerun=always."
        )
    outcome = Outcome()
    restored = restore_plugins(original.folder, original.config.get("plugins") or (), scratch, plugins)
    try:
        load_plugins(restored)
    except ConfigError as error:
        raise ConfigError(f"{error} If it lies elsewhere by now, name it by --plugin.") from None
    original = replace(original, config={**original.config, "plugins": [*plugins, *restored]})
    recipe = deserialize(original.recipe)
    files = _find_inputs(recipe, original, [*folders, *original.folders], outcome)
    outcome.environment += _other_environment(original, recipe)
    if any(path is None for path in files.values()) or (outcome.differences and not anyway):
        return outcome
    here = {model: str(path) for model, path in files.items()}
    point = _point(original, _moved(recipe, here), scratch)
    outcome.made = True
    if original.sha256:
        target = scratch / _model_name(original, point) if output is None else output
        if is_file_name(Path(_model_name(original, point))) and not is_file_name(target):
            target = target / _model_name(original, point)  # a file has the bytes of a file
        compare_bytes(original, point, target, outcome)
    else:
        compare_numbers(original, replace(point, output=output), output, outcome)
    outcome.identical = not outcome.differences
    return outcome


def _find_inputs(
    recipe: Node, original: Original, folders: Sequence[Path], outcome: Outcome
) -> dict[ModelNode, Path | None]:
    """The current path of each input. A missing or changed input is a difference."""
    paths: dict[ModelNode, Path | None] = {}
    for model, known in itertools.zip_longest(models_of(recipe), original.inputs):
        if model is None:
            break
        path = paths[model] = _find_input(str(model.source), known, folders)
        if path is None:
            outcome.differences.append(f"the input {model.source} is missing (SHA-256 {known or 'unknown'})")
            continue
        now = content_of(path)
        if known and now != known:
            outcome.differences.append(f"the input {path} has changed: {_change(known, now)}")
        place = place_of(path)
        moved = "" if place == model.source else f", found as {place}"
        outcome.inputs.append(f"{model.source}{moved}{', the same content' if now == known else ''}")
    return paths


def _change(known: str, now: str) -> str:
    """How contents differ, of which one may be known by the version alone that its store names."""
    if is_hash(known) and is_hash(now):
        return f"SHA-256 was {known}, is {now}"
    return (
        f"it was {known}, is {now}. Its store gives no hash, so only one version at one address is the same"
    )


def _find_input(source: str, content: str | None, folders: Sequence[Path]) -> Path | None:
    """Find an input by its path, by its name in the folders, or by its content under any name."""
    candidates = [folder / Path(source).name for folder in folders]
    with contextlib.suppress(CheckpointError):
        candidates.insert(0, find_model(source, folders))
    present = [path for path in candidates if is_there(path)]
    for path in present if content else ():
        if content_of(path) == content:
            return path
    if content:
        for path in (p for folder in folders for p in sorted(folder.rglob("*")) if SAFETENSORS.has_suffix(p)):
            if content_of(path) == content:
                return path
    return present[0] if present else None


def _other_environment(original: Original, recipe: Node) -> list[str]:
    """Each version, feature and method that has changed since."""
    now = environment()
    differences = [
        f"{name}: {then} then, {now.get(name, 'none')} now"
        for name, then in original.versions.items()
        if now.get(name) != then and not name.startswith("git/diff")
    ]
    code = code_hashes(recipe)
    changed = [name for name, then in original.methods.items() if code.get(name) != then]
    differences += [f"the code of the method '{name}'" for name in changed]
    return differences + _kept_changes(original.folder, differences)


def _kept_changes(run: Path | None, differences: Sequence[str]) -> list[str]:
    """Where the uncommitted changes lie that the result was made with, if a commit or code is another one."""
    if run is None or not any(line.startswith(("git/", "the code of")) for line in differences):
        return []
    files = [run / name for name in (CHANGES_FILE, CHECKOUT_CHANGES_FILE)]
    return [f"uncommitted changes, as they were then: {path}" for path in files if path.is_file()]


def _moved(recipe: Node, files: Mapping[ModelNode, str]) -> Node:
    def here(node: Node) -> Node:
        return replace(node, source=files[node]) if isinstance(node, ModelNode) else node

    (moved,) = rewrite([recipe], here)
    return moved


def _point(original: Original, recipe: Node, scratch: Path) -> Point:
    """A point with the original settings that change bits; the others suit this machine."""
    text = scratch / "recipe.mecha"
    text.write_text(original.recipe, encoding="utf-8")
    options = original.config.get("engine") or {}
    engine = {name: options[name] for name in SETTINGS if name in options}
    output = {"dtype": "input", **(original.config.get("output") or {})}
    config: dict[str, Any] = {
        "models": {},
        "recipe": {"mecha": str(text)},
        "blocks": {},
        "evaluator": {"name": None, "weight_stats": False},
        **{name: original.config[name] for name in ("evaluator", "plugins") if name in original.config},
        "engine": engine,
        "output": {**output, "save": True, "path": None, "durable": False},
    }
    return replace(prepare(config, scratch), recipe=recipe)


def _model_name(original: Original, point: Point) -> str:
    """The name of the reproduced model: a folder if the original was one, else a file."""
    path = (original.config.get("output") or {}).get("path")
    is_file = point.shard_size is None and (path is None or is_file_name(Path(path)))
    is_file = is_file and not original.is_folder
    return "model.safetensors" if is_file else "model"
