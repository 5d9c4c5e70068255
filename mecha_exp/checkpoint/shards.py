"""Which file of a model's folder each tensor goes to: components, and shards of a size."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mecha_exp.checkpoint.dtypes import stored_bytes
from mecha_exp.checkpoint.folder import STEMS, Component
from mecha_exp.checkpoint.formats import INDEX
from mecha_exp.checkpoint.safetensors.header import SUFFIX
from mecha_exp.errors import CheckpointError, ConfigError, some

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)(i?)B?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


@dataclass(frozen=True)
class Shard:
    """One file: its name, and the tensors in it with the names that they have there."""

    name: str
    tensors: Tensors
    nbytes: int


@dataclass(frozen=True)
class Package:
    """The weights of one component: a file, or shards with an index.

    Attributes:
        folder: relative to the model's; empty for the folder itself.
        prefix: of its keys in the whole, which its files leave out.
    """

    folder: str
    prefix: str
    stem: str
    shards: tuple[Shard, ...]
    places: Mapping[str, str] = field(repr=False)

    @property
    def index(self) -> str:
        """The name of the index, which there is where there are several shards."""
        return f"{self.stem}{SUFFIX}{INDEX}"

    @property
    def nbytes(self) -> int:
        """The size of all tensors."""
        return sum(shard.nbytes for shard in self.shards)


def is_file_name(path: Path) -> bool:
    """Whether an output's path means one file; any other is the folder of a model."""
    return path.suffix == SUFFIX or (path.exists() and not path.is_dir())


def pack(tensors: Tensors, components: Sequence[Component], shard_size: int | None) -> list[Package]:
    """Share the tensors out: to the component whose prefix they have, then to shards in their order.

    Args:
        components: as `components_of` finds them in the model that is imitated; none for a plain model.
        shard_size: bytes of a shard, which only a tensor that is larger by itself exceeds; None: one file.

    Raises:
        CheckpointError: a key belongs to no component.
    """
    parts = [(c.name, c.prefix, c.stem) for c in components] or [("", "", STEMS[0])]
    shares: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {prefix: {} for _, prefix, _ in parts}
    stray = []
    for key, tensor in tensors.items():
        prefix = next((p for p in shares if key.startswith(p)), None)
        if prefix is None:
            stray.append(key)
        else:
            shares[prefix][key.removeprefix(prefix)] = tensor
    if stray:
        names = ", ".join(name for name, _, _ in parts)
        raise CheckpointError(f"{len(stray)} keys belong to none of the components {names}: {some(stray)}.")
    return [
        _package(name, prefix, stem, shares[prefix], shard_size)
        for name, prefix, stem in parts
        if shares[prefix]
    ]


def parse_size(value: int | str) -> int:
    """A number of bytes: 5000000000, `5GB`, `500MB` (powers of 1000), `4GiB` (of 1024).

    Raises:
        ConfigError: it is none, or not positive.
    """
    match = _SIZE.fullmatch(str(value).strip())
    size = 0
    if match and not isinstance(value, bool):
        number, unit, binary = match.groups()
        size = int(float(number) * (1024 if binary else 1000) ** _POWERS[unit.lower()])
    if size < 1:
        raise ConfigError(f"expected a size such as 5GB or 500MB, got {value!r}")
    return size


def _package(name: str, prefix: str, stem: str, tensors: Tensors, shard_size: int | None) -> Package:
    groups = _groups(tensors, shard_size)
    count = len(groups)
    shards = []
    for number, group in enumerate(groups, 1):
        file = stem if count == 1 else f"{stem}-{number:05}-of-{count:05}"
        nbytes = sum(stored_bytes(*tensor) for tensor in group.values())
        shards.append(Shard(file + SUFFIX, group, nbytes))
    places = {key: shard.name for shard in shards for key in shard.tensors}
    return Package(name, prefix, stem, tuple(shards), places)


def _groups(tensors: Tensors, shard_size: int | None) -> list[dict[str, tuple[str, tuple[int, ...]]]]:
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


Layout = Mapping[str, tuple[str, tuple[int, ...]]]
"""The dtype (by its safetensors name) and the shape of each key."""
