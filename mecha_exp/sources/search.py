"""Finds the file or folder that the path of a model means."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.request import url2pathname

from mecha_exp.checkpoint.hub import hub_folder, is_hub_name
from mecha_exp.checkpoint.remote import is_address, look_up, with_slashes
from mecha_exp.checkpoint.safetensors.header import SUFFIX
from mecha_exp.errors import CheckpointError, did_you_mean, nearest, prefixed
from mecha_exp.families import CONFIG
from mecha_exp.sources import search_path
from mecha_exp.sources.packages import package_folder

PACKAGE_SCHEME = "pkg://"
MADE_SCHEME = "made://"
TRAINERS = {"mini8": "mecha_exp.examples.mini8.train"}
"""The modules that train the models of a bench on first use, by its name; each has `model_file(name)`."""
FILE_SCHEME = "file://"
MODELS_DIR_VARIABLE = "MECHA_MODELS_DIR"


def find_model(path: str, folders: Sequence[Path], offline: bool = False) -> Path:
    """Find the file or folder that a model's path means.

    A path is relative to the current folder, then to each of the model folders and to those that the
    environment variable MECHA_MODELS_DIR lists; `.safetensors` may be left out. `pkg://some.package/file` is
    a file inside an installed package that says that it carries models. `made://mini8/file` is a model that
    mecha_exp trains on first use. `org/name` is a model of the Hugging Face hub if no such file exists; where
    `offline`, it must be in the cache of its library. An address (`hf://org/name@revision`, `s3://...`,
    `https://...`) is looked up, and what is returned stands for it; where `offline`, it is refused.

    Raises:
        CheckpointError: there is no such model; the message lists the searched folders and the nearest name.
    """
    if path.startswith(PACKAGE_SCHEME):
        return packaged(path)
    if path.startswith(MADE_SCHEME):
        return _trained(path)
    path = with_slashes(path)
    if path.startswith(FILE_SCHEME):
        path = url2pathname(path.removeprefix(FILE_SCHEME))
    if is_address(path):
        return _looked_up(path, offline)
    path = str(with_home(path))
    listed = os.environ.get(MODELS_DIR_VARIABLE, "").split(os.pathsep)
    searched = (Path(), *folders, *search_path.get_all(), *(Path(folder) for folder in listed if folder))
    candidates = [folder / path for folder in searched]
    exists = {file: is_there(file) for name in candidates for file in (name, Path(f"{name}{SUFFIX}"))}
    for state in (True, None):  # opening a file of unknown state explains why it cannot be accessed
        if (match := next((file for file, known in exists.items() if known is state), None)) is not None:
            return match
    if is_hub_name(path) and not Path(path).parent.is_dir():
        return hub_folder(path, offline)
    parents = [candidate.parent for candidate in dict.fromkeys(candidates)]
    looked = ", ".join(str(parent.resolve()) for parent in parents)
    raise CheckpointError(
        f"the model '{path}' does not exist. Looked in {looked}.{_nearest_model(path, parents)}"
    )


def _nearest_model(path: str, parents: Sequence[Path]) -> str:
    """The hint with the models of some folders whose names are nearest, without regard to the suffix."""
    names: dict[str, str] = {}
    for parent in parents:
        if parent.is_dir():
            names |= {file.name.removesuffix(SUFFIX): file.name for file in parent.glob(f"*{SUFFIX}")}
            names |= {file.parent.name: file.parent.name for file in parent.glob(f"*/{CONFIG}")}
    near = nearest(Path(path).name.removesuffix(SUFFIX), names)
    return did_you_mean(names[near[0]] if near else "", [names[name] for name in near] or names.values())


def folders_of(config: Mapping[str, Any]) -> list[Path]:
    """The folder of `models.dir` in a configuration, where models are looked for; a list of at most one."""
    name = (config.get("models") or {}).get("dir")
    if not name:
        return []
    return [packaged(name) if name.startswith(PACKAGE_SCHEME) else with_home(name)]


def with_home(path: str) -> Path:
    """A path with the home folder for a `~` at its beginning."""
    try:
        return Path(path).expanduser()
    except RuntimeError:  # another user's `~name`, who does not exist
        return Path(path)


def is_there(path: Path) -> bool | None:
    """Whether a path exists, even as a broken link; None without the permission to look."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError:
        return None
    return True


def packaged(path: str) -> Path:
    """The file or folder of a path `pkg://some.package/name`; see `sources.packages`.

    Raises:
        CheckpointError: there is no such package that says that it carries models, or the path leaves it.
    """
    package, _, name = path.removeprefix(PACKAGE_SCHEME).partition("/")
    inner = PurePosixPath(name)
    if ".." in inner.parts or inner.is_absolute() or "\\" in name or "\0" in name:
        raise CheckpointError(f"{path!r} leaves its package: name a file in it.")
    with prefixed(f"'{path}': ", CheckpointError):
        return package_folder(package).joinpath(*inner.parts)


def _looked_up(address: str, offline: bool) -> Path:
    if offline:
        raise CheckpointError(
            f"'{address}' lies elsewhere. Nothing is read from elsewhere without hub.offline=false "
            "(offline=False in Python)."
        )
    return look_up(address)


def _trained(path: str) -> Path:
    """The file of a path `made://bench/name`, trained first where this machine has not made it yet."""
    bench, _, name = path.removeprefix(MADE_SCHEME).partition("/")
    if bench not in TRAINERS:
        raise CheckpointError(f"'{path}': there is no bench '{bench}'.{did_you_mean(bench, TRAINERS)}")
    try:
        file: Path = importlib.import_module(TRAINERS[bench]).model_file(name)
    except FileNotFoundError as error:
        raise CheckpointError(f"'{path}': {error}.") from None
    return file
