"""Making a result again, and comparing it with the original: its bytes or, where none were kept, numbers."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mecha_exp.app.point import Point, prepare
from mecha_exp.app.provenance import environment
from mecha_exp.app.reproduction.original import Original
from mecha_exp.checkpoint import Checkpoint
from mecha_exp.checkpoint.formats import SAFETENSORS
from mecha_exp.engine import plan, run_plan
from mecha_exp.engine.code_hash import code_hashes
from mecha_exp.engine.options import SETTINGS
from mecha_exp.engine.statistics import summarise
from mecha_exp.errors import CheckpointError, some
from mecha_exp.graph.nodes import ModelNode, Node, models_of
from mecha_exp.graph.rewrite import rewrite
from mecha_exp.lab.content_hash import content_of, size_of
from mecha_exp.plugins import load_plugins
from mecha_exp.recipe import deserialize
from mecha_exp.sources.search import find_model


@dataclass
class Outcome:
    """What became of it.

    Attributes:
        identical: whether it is the same.
        made: whether it could be made at all.
        compared: what was compared, in words.
        inputs: where each input was found.
        environment: what it is made with now that is another one than then.
        differences: what stands against making it, or what came out differently.
    """

    identical: bool = False
    made: bool = False
    compared: str = ""
    inputs: list[str] = field(default_factory=list)
    environment: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


def remake(
    original: Original, folders: Sequence[Path], output: Path | None, scratch: Path, anyway: bool = False
) -> Outcome:
    """Make a result again.

    Args:
        original: what is known of it.
        folders: where inputs lie now, by name or by content.
        output: where the model is to be kept, if it is.
        scratch: a folder for what is not kept.
        anyway: go on where the content of an input is another one.
    """
    outcome = Outcome()
    load_plugins(original.config.get("plugins") or ())
    recipe = deserialize(original.recipe)
    files = _find_inputs(recipe, original, [*folders, *original.folders], outcome)
    outcome.environment += _other_environment(original, recipe)
    if any(path is None for path in files.values()) or (outcome.differences and not anyway):
        return outcome
    here = {model: str(path) for model, path in files.items()}
    point = _point(original, _moved(recipe, here), scratch)
    outcome.made = True
    if original.sha256:
        _compare_bytes(original, point, output or scratch / _model_name(original, point), outcome)
    else:
        _compare_numbers(original, replace(point, output=None), outcome)
    outcome.identical = not outcome.differences
    return outcome


def _find_inputs(
    recipe: Node, original: Original, folders: Sequence[Path], outcome: Outcome
) -> dict[ModelNode, Path | None]:
    """Where each input lies now; what is missing or another one is a difference."""
    found: dict[ModelNode, Path | None] = {}
    for model, known in itertools.zip_longest(models_of(recipe), original.inputs):
        if model is None:
            break
        path = found[model] = _find_input(str(model.source), known, folders)
        if path is None:
            outcome.differences.append(f"the input {model.source} is missing (SHA-256 {known or 'unknown'})")
            continue
        now = content_of(path)
        if known and now != known:
            outcome.differences.append(f"the input {path} has changed: SHA-256 was {known}, is {now}")
        moved = "" if str(path) == model.source else f", found as {path}"
        outcome.inputs.append(f"{model.source}{moved}{', the same content' if now == known else ''}")
    return found


def _find_input(source: str, content: str | None, folders: Sequence[Path]) -> Path | None:
    """An input by its path, by its name below the folders, or by its content under any name."""
    candidates = [folder / Path(source).name for folder in folders]
    with contextlib.suppress(CheckpointError):
        candidates.insert(0, find_model(source, folders))
    present = [path for path in candidates if path.exists()]
    for path in present if content else ():
        if content_of(path) == content:
            return path
    if content:
        for path in (p for folder in folders for p in sorted(folder.rglob("*")) if SAFETENSORS.has_suffix(p)):
            if content_of(path) == content:
                return path
    return present[0] if present else None


def _other_environment(original: Original, recipe: Node) -> list[str]:
    """Each version, feature and method that is another one now."""
    now = environment()
    found = [
        f"{name}: {then} then, {now.get(name, 'none')} now"
        for name, then in original.versions.items()
        if now.get(name) != then and not name.startswith("git/diff")
    ]
    code = code_hashes(recipe)
    changed = [name for name, then in original.methods.items() if code.get(name) != then]
    return found + [f"the code of the method '{name}'" for name in changed]


def _moved(recipe: Node, files: Mapping[ModelNode, str]) -> Node:
    def here(node: Node) -> Node:
        return replace(node, source=files[node]) if isinstance(node, ModelNode) else node

    (moved,) = rewrite([recipe], here)
    return moved


def _point(original: Original, recipe: Node, scratch: Path) -> Point:
    """A point with the settings that decide bits as they were, and all others as they suit this machine."""
    text = scratch / "recipe.mecha"
    text.write_text(original.recipe, encoding="utf-8")
    given = original.config.get("engine") or {}
    engine = {name: given[name] for name in SETTINGS if name in given}
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
    """What the model is called here: a file, or a folder where it was one."""
    path = (original.config.get("output") or {}).get("path")
    is_file = point.shard_size is None and (path is None or str(path).endswith(".safetensors"))
    return "model.safetensors" if is_file else "model"


def _compare_bytes(original: Original, point: Point, target: Path, outcome: Outcome) -> None:
    """Write the model with the header of the original, and compare the files."""
    if original.model is not None and target.exists() and target.samefile(original.model):
        raise CheckpointError(f"{target} is the original: say another file with --output.")
    job = replace(point.job(target.absolute()), metadata=dict(original.metadata), statistics=False)
    with plan([job], point.options) as planned:
        run_plan(planned)
    now, size = content_of(target), size_of(target)
    outcome.compared = f"{size:,} bytes, SHA-256 {now}"
    if now == original.sha256:
        return
    outcome.differences.append(f"the file: SHA-256 was {original.sha256}, is {now}")
    if original.model is not None and original.model.is_file():
        outcome.differences += describe_differences(original.model, target)


def describe_differences(a: Path, b: Path) -> list[str]:
    """What differs between two models: keys, shapes, dtypes, and how many values by how much."""
    found: list[str] = []
    with Checkpoint(a) as first, Checkpoint(b) as second:
        if only := [key for key in first.keys() if key not in second]:
            found.append(f"keys that are not there any more: {some(only)}")
        if only := [key for key in second.keys() if key not in first]:
            found.append(f"keys that are new: {some(only)}")
        if first.header.metadata != second.header.metadata:
            found.append("the metadata in the header")
        for key in first.keys():
            if key in second:
                found += _compare_tensors(key, first.read(key), second.read(key))
    return found


def _compare_tensors(key: str, a: torch.Tensor, b: torch.Tensor) -> list[str]:
    if a.shape != b.shape or a.dtype != b.dtype:
        return [f"{key}: {a.dtype} {tuple(a.shape)} was, {b.dtype} {tuple(b.shape)} is"]
    different = a.reshape(-1).view(torch.uint8) != b.reshape(-1).view(torch.uint8)
    if not different.any():
        return []
    count = int(different.reshape(a.numel(), -1).any(dim=1).sum())
    largest = (a.double() - b.double()).abs().nan_to_num().max().item()
    return [f"{key}: {count:,} of {a.numel():,} values, by up to {largest:.3g}"]


def _compare_numbers(original: Original, point: Point, outcome: Outcome) -> None:
    """Merge in memory and measure; for a result of which no file was kept."""
    merged: dict[str, torch.Tensor] = {}
    with plan([point.job(merged)], point.options) as planned:
        report = run_plan(planned)
        scoring = point.read_scoring({key: shape for key, (_, shape) in planned.layouts[0].items()})
    now = dict(scoring.measure(merged))
    for model, by_key in report.moments[0].items():
        whole = summarise(by_key)[""]
        measured = {
            "distance": whole.distance,
            "relative_change": whole.relative_change,
            "cosine": whole.cosine,
        }
        now |= {f"weights/{name}/{point.names[model]}": value for name, value in measured.items()}
    shared = [name for name in original.metrics if name in now]
    outcome.compared = f"{len(shared)} numbers, since no file was kept: {some(shared, 5)}"
    for name in shared:
        then = original.metrics[name]
        if now[name] != then and not (math.isnan(now[name]) and math.isnan(then)):
            outcome.differences.append(f"{name}: {then!r} was, {now[name]!r} is")
    if not shared:
        outcome.differences.append("nothing that was measured can be measured again, and no file was kept")
