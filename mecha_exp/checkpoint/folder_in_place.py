"""Replaces a model in its folder file by file, where the folder cannot be exchanged as a whole.

New shards get names that no file of the folder has. The index that names them is renamed to its place in one
step, and the old shards are deleted after it: at every moment the index and the shards that it names are one
model. Small files are put in place just before the index.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from mecha_exp.checkpoint.folder import PIPELINE, read_index
from mecha_exp.checkpoint.safetensors.header import SUFFIX
from mecha_exp.checkpoint.shards import Package
from mecha_exp.checkpoint.sidecars import CARD, is_own_card
from mecha_exp.errors import CheckpointError
from mecha_exp.system.folders import files_below

_SHARD = r"-\d{5}-of-\d{5}"
_TOKEN = r"\.mecha-[0-9a-f]{8}"


def replaced_files(folder: Path, packages: Sequence[Package]) -> set[str]:
    """The files of the model that a folder holds, by their path in it, which a new model replaces.

    They are the indices, the shards that they list, those that a killed replacement has left, the file that
    marks a pipeline, and a card that this library wrote, since it would describe the new model wrongly.
    Beside an index, shards that it does not list are such leftovers.
    """
    names = {PIPELINE, *([CARD] if is_own_card(folder / CARD) else [])}
    for package in packages:
        names.add(package.path_of(package.index))
        names |= {package.path_of(shard.name) for shard in package.shards}
        inner = folder / package.folder
        leftover = re.compile(f".+{_SHARD}{_TOKEN}{re.escape(SUFFIX)}")
        with contextlib.suppress(CheckpointError):
            names |= {package.path_of(name) for name in read_index(inner / package.index)}
            stem = re.escape(package.stem)
            leftover = re.compile(f"({stem}{_SHARD}|.+{_SHARD}{_TOKEN}){re.escape(SUFFIX)}")
        if inner.is_dir():
            names |= {package.path_of(x.name) for x in inner.iterdir() if leftover.fullmatch(x.name)}
    return names


def publish_in_place(
    staged: Path, target: Path, packages: Sequence[Package], replaced: Collection[str]
) -> None:
    """Move the files of a staged folder into its target, so that each component's index decides.

    Args:
        replaced: the files of the old model, which are deleted at the end.

    Raises:
        OSError: what was moved so far is deleted by the next writer; the old model is still whole, unless
            small files were replaced already.
    """
    token = secrets.token_hex(4)
    files_of = [_move_shards(staged, target, package, token) for package in packages]
    last = {package.path_of(_deciding(package)) for package in packages}
    names = list(files_below(staged))
    for name in names:
        if name not in last and name != PIPELINE:
            _move(staged / name, target / name)
    for package, files in zip(packages, files_of, strict=True):
        name = package.path_of(_deciding(package))
        if len(package.shards) > 1:
            (staged / name).write_bytes(index_content(package, files))
        _move(staged / name, target / name)
    if PIPELINE in names:
        _move(staged / PIPELINE, target / PIPELINE)
    current = {p.path_of(n) for p, files in zip(packages, files_of, strict=True) for n in files.values()}
    for name in set(replaced) - set(names) - current - last:
        (target / name).unlink(missing_ok=True)


def index_content(package: Package, files: Mapping[str, str]) -> bytes:
    """The bytes of the index of a package's shards.

    Args:
        files: the file name of each key.
    """
    content = {"metadata": {"total_size": package.nbytes}, "weight_map": dict(sorted(files.items()))}
    return (json.dumps(content, indent=2) + "\n").encode()


def _deciding(package: Package) -> str:
    """The file whose rename replaces the weights of a package."""
    return package.index if len(package.shards) > 1 else package.shards[0].name


def _move_shards(staged: Path, target: Path, package: Package, token: str) -> dict[str, str]:
    """Move the shards of a package to names of their own; returns the new file name of each key."""
    if len(package.shards) == 1:
        return dict(package.files)
    new_name = {}
    for shard in package.shards:
        name = shard.name
        if (target / package.folder / name).exists():
            name = f"{name.removesuffix(SUFFIX)}.mecha-{token}{SUFFIX}"
        _move(staged / package.path_of(shard.name), target / package.path_of(name))
        new_name[shard.name] = name
    return {key: new_name[name] for key, name in package.files.items()}


def _move(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    source.replace(target)
