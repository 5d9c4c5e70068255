"""Where a result comes from: inputs by content, code by commit, packages by version."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

import mecha_exp
from mecha_exp.checkpoint import INDEX
from mecha_exp.engine import Plan
from mecha_exp.engine.inputs import Source
from mecha_exp.engine.program import rewrite
from mecha_exp.errors import MechaError
from mecha_exp.evaluation import Scoring
from mecha_exp.nodes import ModelNode, Node
from mecha_exp.recipe import serialize

log = logging.getLogger(__name__)

PACKAGES = ("torch", "numpy", "safetensors", "hydra-core", "omegaconf", "mlflow")
_HASH_CHUNK = 1 << 22


def tags(recipe: Node, planned: Plan, dtype: torch.dtype | None) -> dict[str, str]:
    """What identifies a result, and what it was made with."""
    prints = {model: fingerprint(source) for model, source in planned.sources.items()}
    return {
        "signature": signature(recipe, prints, planned, dtype),
        **{f"fingerprint/{name}": prints[model] for model, name in input_names(planned).items()},
        **git_state(),
        **versions(),
    }


def signature(recipe: Node, prints: Mapping[ModelNode, str], planned: Plan, dtype: torch.dtype | None) -> str:
    """The hash of what decides the bytes: the recipe, the inputs' contents, the arithmetic, the version."""

    def by_content(node: Node) -> Node:
        return ModelNode(prints[node], node.space, node.config) if isinstance(node, ModelNode) else node

    options = planned.options
    settings = [options.compute_dtype, options.on_missing, options.on_nonfinite, dtype, mecha_exp.__version__]
    text = json.dumps([serialize(*rewrite([recipe], by_content)), *map(str, settings)])
    return hashlib.sha256(text.encode()).hexdigest()


def input_names(planned: Plan) -> dict[ModelNode, str]:
    """A short name for each input: the file's, or its folder's where several files are called alike."""
    stems = {model: _stem(s.path) if s.path else s.name for model, s in planned.sources.items()}
    names: dict[ModelNode, str] = {}
    for model, source in planned.sources.items():
        name = stems[model]
        if source.path and list(stems.values()).count(name) > 1:
            name = source.path.absolute().parent.name
        taken = list(names.values()).count(name)
        names[model] = f"{name}_{taken + 1}" if taken else name
    return names


def fingerprint(source: Source) -> str:
    """The SHA-256 of an input's file, or of those of its files; they are read again only if they changed."""
    if not source.files:
        return "in memory"
    prints = [_fingerprint_of(file) for file in source.files]
    return prints[0] if len(prints) == 1 else hashlib.sha256("".join(prints).encode()).hexdigest()


def _fingerprint_of(file: Path) -> str:
    status = file.stat()
    return _hash_file(os.fspath(file.resolve()), status.st_size, status.st_mtime_ns, status.st_ino)


def _stem(path: Path) -> str:
    """What a file, or a folder, is called; an index of shards by its folder."""
    if path.name.endswith(INDEX):
        return path.absolute().parent.name
    return path.name if path.is_dir() else path.stem


@functools.lru_cache(maxsize=256)
def _hash_file(path: str, size: int, mtime_ns: int, inode: int) -> str:
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while chunk := file.read(_HASH_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def measure_input(scoring: Scoring, path: Path) -> dict[str, float]:
    """What the evaluators say of an input, once for each file and process; nothing where one fails on it."""
    status = path.stat()
    wanted = _Wanted(scoring, path.resolve(), (status.st_size, status.st_mtime_ns, status.st_ino))
    return dict(_measure_input(wanted))


@dataclass(frozen=True)
class _Wanted:
    """A measurement of a file, equal to another one that would come to the same."""

    scoring: Scoring = field(compare=False)
    path: Path
    state: tuple[int, int, int]
    keys: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", tuple(e.key for e in self.scoring.evaluations))


@functools.lru_cache(maxsize=256)
def _measure_input(wanted: _Wanted) -> dict[str, float]:
    try:
        return wanted.scoring.measure(wanted.path)
    except MechaError as error:
        log.warning("the input %s cannot be measured for comparison: %s", wanted.path, error)
        return {}


@functools.cache
def git_state() -> dict[str, str]:
    """The commit that was used and whether there were changes on top of it.

    That of the current folder's repository or, outside one, of the checkout that this package runs from;
    nothing where neither is under git.
    """
    for folder in (Path.cwd(), Path(mecha_exp.__file__).parent):
        try:
            commit, changes = _git(folder, "rev-parse", "HEAD"), _git(folder, "status", "--porcelain")
        except (OSError, subprocess.SubprocessError):
            continue
        return {"git/commit": commit, "git/dirty": str(bool(changes)).lower()}
    return {}


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()


@functools.cache
def versions() -> dict[str, str]:
    """The versions of Python, of this package, and of what it stands on."""
    found = {"version/mecha_exp": mecha_exp.__version__, "version/python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[f"version/{package}"] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
