"""Where the path of a model is looked for."""

from __future__ import annotations

import importlib.resources
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mecha_exp.checkpoint.hub import hub_folder, is_hub_name
from mecha_exp.checkpoint.safetensors.header import SUFFIX
from mecha_exp.errors import CheckpointError, did_you_mean
from mecha_exp.sources import search_path

PACKAGE_SCHEME = "pkg://"
MODELS_DIR_VARIABLE = "MECHA_MODELS_DIR"


def find_model(path: str, folders: Sequence[Path]) -> Path:
    """The file or the folder that a model's path means.

    A path is relative to the current folder, then to each of the model folders and to those that the
    environment variable MECHA_MODELS_DIR lists; `.safetensors` may be left out. `pkg://some.package/file` is
    a file inside an installed package, and `org/name` that is nowhere a model of the Hugging Face hub.

    Raises:
        CheckpointError: it is nowhere; the message says where was looked, and what lies there.
    """
    if path.startswith(PACKAGE_SCHEME):
        return packaged(path)
    named = os.environ.get(MODELS_DIR_VARIABLE, "").split(os.pathsep)
    places = (Path(), *folders, *search_path.get_all(), *(Path(folder) for folder in named if folder))
    tried = [folder / path for folder in places]
    lies = {file: _lies_at(file) for name in tried for file in (name, Path(f"{name}{SUFFIX}"))}
    for wanted in (True, None):  # opening it says why it cannot be told
        if (found := next((file for file, answer in lies.items() if answer is wanted), None)) is not None:
            return found
    if is_hub_name(path) and not Path(path).parent.is_dir():
        return hub_folder(path)
    lying = {p.name for t in tried if t.parent.is_dir() for p in t.parent.glob(f"*{SUFFIX}")}
    looked = ", ".join(str(p.parent.resolve()) for p in dict.fromkeys(tried))
    raise CheckpointError(
        f"the model '{path}' does not exist. Looked in {looked}.{did_you_mean(Path(path).name, lying)}"
    )


def folders_of(config: Mapping[str, Any]) -> list[Path]:
    """The folder of `models.dir` in a configuration, where models are looked for; a list of at most one."""
    name = (config.get("models") or {}).get("dir")
    if not name:
        return []
    return [packaged(name) if name.startswith(PACKAGE_SCHEME) else Path(name)]


def _lies_at(path: Path) -> bool | None:
    """Whether something is there, be it a link that leads nowhere; None where that may not be known."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError:
        return None
    return True


def packaged(path: str) -> Path:
    """The file or folder that a `pkg://some.package/name` means."""
    package, _, name = path.removeprefix(PACKAGE_SCHEME).partition("/")
    try:
        return Path(str(importlib.resources.files(package).joinpath(name)))
    except ModuleNotFoundError:
        raise CheckpointError(f"'{path}': there is no package '{package}'.") from None
