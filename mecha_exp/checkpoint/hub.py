"""Models of the Hugging Face hub by name, through the cache of its library."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from mecha_exp.checkpoint.formats import FORMATS, SUFFIXES
from mecha_exp.checkpoint.safetensors.header import INDEX
from mecha_exp.errors import CheckpointError, first_line
from mecha_exp.families import SMALL_PATTERNS

_NAME = re.compile(r"(?P<repository>[\w][\w.-]*/[\w][\w.-]*)(@(?P<revision>[\w][\w./-]*))?")
_SMALL_FILES = (*SMALL_PATTERNS, "LICENSE*", "README.md")
_WEIGHTS = tuple(known.suffixes[0] for known in FORMATS if known.suffixes)
_CACHED, _SNAPSHOTS = "models--", "snapshots"
"""The names of folders in the cache of the hub: models--ORG--NAME/snapshots/COMMIT."""


class Cached(NamedTuple):
    """What a path in the cache of the hub is of: a repository, a commit, and a path in it (empty: all)."""

    repository: str
    commit: str
    inside: str


def in_hub_cache(path: Path) -> Cached | None:
    """What a path is of that lies in a cache of the hub, wherever that is; None for any other path."""
    parts = path.absolute().parts
    for number, (cached, snapshots) in enumerate(pairwise(parts[:-1])):
        if cached.startswith(_CACHED) and snapshots == _SNAPSHOTS:
            repository = cached.removeprefix(_CACHED).replace("--", "/", 1)
            return Cached(repository, parts[number + 2], "/".join(parts[number + 3 :]))
    return None


def is_hub_name(name: str) -> bool:
    """Whether a name can be a model on the hub: `org/name`, or `org/name@revision`."""
    return bool(_NAME.fullmatch(name)) and not name.endswith((*SUFFIXES, INDEX))


def hub_folder(name: str, offline: bool = False) -> Path:
    """The folder of a hub model in the local cache. Downloads the model if it is not there, unless `offline`.

    Safetensors are preferred; pickles are downloaded for a model that has no other weights.

    Raises:
        CheckpointError: the library is not installed, there is no such model, or it is not in the cache and
            the hub cannot be reached.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise CheckpointError(f"'{name}' is not the name of a model on the hub: expected org/name.")
    try:
        import huggingface_hub
    except ModuleNotFoundError:
        raise CheckpointError(
            f"'{name}' is not a file here. If it is a model of the Hugging Face hub, install the library "
            "that fetches it: pip install 'mecha_exp[hub]'."
        ) from None
    try:
        for suffix in _WEIGHTS:
            folder = Path(
                huggingface_hub.snapshot_download(
                    match["repository"],
                    revision=match["revision"],
                    allow_patterns=[f"*{suffix}", *_SMALL_FILES],
                    local_files_only=offline,
                )
            )
            if any(file.suffix in _WEIGHTS for file in folder.rglob("*")):
                return folder
    except Exception as error:  # the library also raises errors of its transport
        if offline:
            raise CheckpointError(
                f"'{name}' is not a file here, and is not in the cache of the Hugging Face hub. Nothing is "
                "downloaded without hub.offline=false (offline=False in Python)."
            ) from None
        raise CheckpointError(
            f"'{name}' is not a file here, is not in the cache of the Hugging Face hub, and cannot be "
            f"fetched: {first_line(error)}"
        ) from None
    raise CheckpointError(f"'{name}' of the Hugging Face hub has no weights that can be read.")
