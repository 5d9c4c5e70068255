"""Distributes tensors to the files of a model's folder: by component, and in shards of a size."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mecha_exp.checkpoint.dtypes import Layout, stored_bytes
from mecha_exp.checkpoint.folder import STEMS, Component
from mecha_exp.checkpoint.formats import GGUF, SAFETENSORS
from mecha_exp.checkpoint.safetensors.header import INDEX, SUFFIX
from mecha_exp.errors import CheckpointError, ConfigError, counted, some

WRITTEN = (*SAFETENSORS.suffixes, *SAFETENSORS.other_suffixes, *GGUF.other_suffixes)
"""The suffixes of files that are written. Any other name is that of a folder."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)(i?)B?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


@dataclass(frozen=True)
class Shard:
    """One file of weights: its name, and the tensors by their keys in it."""

    name: str
    tensors: Layout
    nbytes: int


@dataclass(frozen=True)
class Package:
    """The weights of one component: a file, or shards with an index.

    Attributes:
        folder: the sub-folder of the model; empty for the folder itself.
        prefix: the prefix of its keys in the whole model, which its files leave out.
        files: the file name of each key.
    """

    folder: str
    prefix: str
    stem: str
    shards: tuple[Shard, ...]
    files: Mapping[str, str] = field(repr=False)

    @property
    def index(self) -> str:
        """The name of the index. Only several shards have one."""
        return f"{self.stem}{SUFFIX}{INDEX}"

    def path_of(self, name: str) -> str:
        """The path in the model's folder of a file of this package."""
        return f"{self.folder}/{name}" if self.folder else name

    @property
    def nbytes(self) -> int:
        """The size of all tensors."""
        return sum(shard.nbytes for shard in self.shards)


def is_file_name(path: Path) -> bool:
    """Whether an output path means one file. Any other path is the folder of a model."""
    return path.suffix in WRITTEN or (path.exists() and not path.is_dir())


def pack(tensors: Layout, components: Sequence[Component], shard_size: int | None) -> list[Package]:
    """Distribute tensors to components by the prefix of their keys, then to shards in their order.

    Args:
        components: the components as `components_of` finds them; none for a plain model.
        shard_size: the largest size of a shard in bytes, exceeded only by a larger tensor. None: one file.

    Raises:
        CheckpointError: a key belongs to no component.
    """
    targets = [(c.name, c.prefix, c.stem) for c in components] or [("", "", STEMS[0])]
    tensors_of: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {prefix: {} for _, prefix, _ in targets}
    stray = []
    for key, tensor in tensors.items():
        prefix = next((p for p in tensors_of if key.startswith(p)), None)
        if prefix is None:
            stray.append(key)
        else:
            tensors_of[prefix][key.removeprefix(prefix)] = tensor
    if stray:
        names = ", ".join(name for name, _, _ in targets)
        raise CheckpointError(
            f"{counted(len(stray), 'key belongs', 'keys belong')} to none of the components {names}: "
            f"{some(stray)}."
        )
    return [
        _package(name, prefix, stem, tensors_of[prefix], shard_size)
        for name, prefix, stem in targets
        if tensors_of[prefix]
    ]


def parse_size(value: int | str) -> int:
    """Parse a number of bytes: 5000000000, `5GB`, `500MB` (powers of 1000), `4GiB` (powers of 1024).

    Raises:
        ConfigError: the value is not a size, or not positive.
    """
    match = _SIZE.fullmatch(str(value).strip())
    size = 0
    if match and not isinstance(value, bool):
        number, unit, binary = match.groups()
        size = int(float(number) * (1024 if binary else 1000) ** _POWERS[unit.lower()])
    if size < 1:
        raise ConfigError(f"expected a size such as 5GB or 500MB, got {value!r}")
    return size


def _package(name: str, prefix: str, stem: str, tensors: Layout, shard_size: int | None) -> Package:
    groups = _groups(tensors, shard_size)
    count = len(groups)
    shards = []
    for number, group in enumerate(groups, 1):
        file = stem if count == 1 else f"{stem}-{number:05}-of-{count:05}"
        nbytes = sum(stored_bytes(*tensor) for tensor in group.values())
        shards.append(Shard(file + SUFFIX, group, nbytes))
    files = {key: shard.name for shard in shards for key in shard.tensors}
    return Package(name, prefix, stem, tuple(shards), files)


def _groups(tensors: Layout, shard_size: int | None) -> list[dict[str, tuple[str, tuple[int, ...]]]]:
    groups: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    filled = 0
    for key, tensor in tensors.items():
        nbytes = stored_bytes(*tensor)
        if shard_size is not None and groups[-1] and filled + nbytes > shard_size:
            groups.append({})
            filled = 0
        groups[-1][key] = tensor
        filled += nbytes
    return groups
