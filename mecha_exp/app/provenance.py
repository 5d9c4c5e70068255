"""The environment of a result: the names of its inputs, the commit, the versions of packages."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

from mecha_exp._version import __version__
from mecha_exp.checkpoint import INDEX
from mecha_exp.graph.nodes import ModelNode
from mecha_exp.system.machine import machine

PACKAGES = ("torch", "numpy", "safetensors", "hydra-core", "omegaconf", "mlflow")


_LARGEST_DIFF = 1_000_000


def environment() -> dict[str, str]:
    """The commit, the versions and the machine that a result was made with."""
    return {**git_state(), **versions(), **machine()}


def input_names(files: Mapping[ModelNode, Path]) -> dict[ModelNode, str]:
    """A short name for each input: its file name, or its folder's if several files have the same name."""
    stems = [_stem(path) for path in files.values()]
    names: dict[ModelNode, str] = {}
    for (model, path), stem in zip(files.items(), stems, strict=True):
        name = stem if stems.count(stem) == 1 else path.absolute().parent.name
        taken = list(names.values()).count(name)
        names[model] = f"{name}_{taken + 1}" if taken else name
    return names


def _stem(path: Path) -> str:
    """The name of a file or folder without suffix; a shard index is named by its folder."""
    if path.name.endswith(INDEX):
        return path.absolute().parent.name
    return path.name if path.is_dir() else path.stem


@functools.cache
def git_state() -> dict[str, str]:
    """The commit that was used and whether there were changes on top of it.

    That of the current folder's repository or, outside one, of the checkout that this package runs from;
    nothing where neither is under git.
    """
    for folder in _repositories():
        try:
            commit, changes = _git(folder, "rev-parse", "HEAD"), _git(folder, "status", "--porcelain")
        except (OSError, subprocess.SubprocessError):
            continue
        return {"git/commit": commit, "git/dirty": str(bool(changes)).lower()}
    return {}


@functools.cache
def git_changes() -> str:
    """The uncommitted changes, as a diff on top of `git/commit`; untracked files are only named."""
    for folder in _repositories():
        try:
            diff = _git(folder, "diff", "HEAD", "--no-color", "--no-ext-diff")
            status = _git(folder, "status", "--porcelain")
        except (OSError, subprocess.SubprocessError):
            continue
        untracked = [f"# untracked: {line[3:]}" for line in status.splitlines() if line.startswith("??")]
        if len(diff) > _LARGEST_DIFF:
            diff = f"{diff[:_LARGEST_DIFF]}\n# ... cut after {_LARGEST_DIFF:,} of {len(diff):,} characters"
        return "\n".join([*untracked, diff, ""]) if untracked or diff else ""
    return ""


def _repositories() -> tuple[Path, Path]:
    return Path.cwd(), Path(__file__).parents[1]


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()


@functools.cache
def versions() -> dict[str, str]:
    """The versions of Python, of this package and of its main dependencies."""
    found = {"version/mecha_exp": __version__, "version/python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[f"version/{package}"] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
