"""Opens stored models: files, folders, shards with an index, and pipelines of components."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from mecha_exp.checkpoint.formats import FOLDER_SUFFIXES, open_file
from mecha_exp.checkpoint.model import ADAPTER_CONFIG, JoinedModel, StateDictSource
from mecha_exp.checkpoint.safetensors.header import INDEX, MAX_INDEX_BYTES, SUFFIX, cannot_open, open_regular
from mecha_exp.documents import DocumentError, parse_json, typed
from mecha_exp.errors import CheckpointError, counted, some

STEMS = ("model", "diffusion_pytorch_model", "pytorch_model")
"""The usual names of weights, before `.safetensors`, `.safetensors.index.json` or `.bin`."""

PIPELINE = "model_index.json"
"""The file that marks a pipeline of components, even where single-file checkpoints lie beside it."""

ADAPTER_STEM = "adapter_model"
"""The name of an adapter's weights, before `.safetensors` or `.bin`."""

_SHARD = re.compile(r"-\d{5}-of-\d{5}\.")
_SHARD_OF_SET = re.compile(r"-\d{5}(-of-\d{5}\.)")


@dataclass(frozen=True)
class Component:
    """The weights of a model, or of one component of a pipeline.

    Attributes:
        name: the name of the sub-folder and prefix of the keys; empty for the folder itself.
        weights: the file, or the index of the shards.
    """

    name: str
    weights: Path

    @property
    def prefix(self) -> str:
        """The prefix of its keys in the whole model."""
        return f"{self.name}." if self.name else ""

    @property
    def stem(self) -> str:
        """The file name that libraries expect: `model` or `diffusion_pytorch_model`."""
        return STEMS[1] if self.weights.name.startswith(STEMS[1]) else STEMS[0]


def open_stored(path: Path) -> StateDictSource:
    """Open a model, whatever its format.

    A folder is a model (its weights: one file, or shards with an index) or a pipeline of components, whose
    keys get the name of their sub-folder as a prefix: `unet.conv_in.weight`. The folder of an adapter of PEFT
    has the keys of its file, and its configuration among its `files`. A file is safetensors, an index of
    shards (`*.index.json`) or a pickle.

    Raises:
        CheckpointError: naming the file, the cause and the cure.
    """
    try:
        if path.is_dir():
            return _open_folder(path)
        if path.name.endswith(INDEX):
            return _open_shards(path)
        return open_file(path)
    except OSError as error:
        raise cannot_open(path, error) from error


def load(path: Path) -> dict[str, torch.Tensor]:
    """Load all tensors of a stored model into memory, whatever its format."""
    with open_stored(path) as model:
        model.expect(model.keys())
        return {key: model.read(key) for key in model.keys()}


def components_of(folder: Path) -> list[Component]:
    """Find the weights in a folder, or else in its sub-folders.

    Raises:
        CheckpointError: there are none, or several and no rule to choose one.
    """
    if not (folder / PIPELINE).is_file() and (own := _weights_in(folder)) is not None:
        return [Component("", own)]
    components = [
        Component(sub.name, weights)
        for sub in sorted(folder.iterdir())
        if sub.is_dir() and not sub.name.startswith(".") and (weights := _weights_in(sub)) is not None
    ]
    if not components:
        names = [entry.name for entry in sorted(folder.iterdir())]
        content = f" It has {some(names)}." if names else " It is empty."
        raise CheckpointError(f"{folder} is a folder without a model in it.{content}")
    return components


def _open_folder(folder: Path) -> StateDictSource:
    components = components_of(folder)
    with ExitStack() as opened:
        parts = [(c.prefix, opened.enter_context(open_stored(c.weights)), None) for c in components]
        is_adapter = components[0].weights.name.startswith(ADAPTER_STEM)
        config = folder / ADAPTER_CONFIG
        model = JoinedModel(folder, parts, [config] if is_adapter and config.is_file() else [])
        opened.pop_all()  # the model closes them
        return model


def _open_shards(index: Path) -> StateDictSource:
    parts: list[tuple[str, StateDictSource, Collection[str]]] = []
    with ExitStack() as opened:
        shards = read_index(index)
        notes = [f"{name} is not read: {index.name} does not name it" for name in _unnamed(index, shards)]
        for name, keys in shards.items():
            shard = opened.enter_context(open_stored(index.parent / name))
            parts.append(("", shard, keys))
            if missing := [key for key in keys if key not in shard]:
                raise CheckpointError(
                    f"{shard.path} lacks {counted(len(missing), 'key')} that {index.name} says it has: "
                    f"{some(missing)}. The files do not belong together: download or copy them again."
                )
            if more := [key for key in shard.keys() if key not in keys]:
                notes.append(f"{name}: left out, not being in {index.name}: {some(more)}")
        model = JoinedModel(index, parts, notes=notes)
        opened.pop_all()  # the model closes them
        return model


def _unnamed(index: Path, shards: Collection[str]) -> list[str]:
    """The files that are called like shards of the same set as those of an index, which it leaves out."""
    sets = {_SHARD_OF_SET.sub(r"\1", name) for name in shards if _SHARD_OF_SET.search(name)}
    beside = [entry.name for entry in index.parent.iterdir() if _SHARD_OF_SET.search(entry.name)]
    return sorted(name for name in beside if name not in shards and _SHARD_OF_SET.sub(r"\1", name) in sets)


@dataclass(frozen=True)
class _Index:
    """The content of an index, as far as it counts: the file of each key."""

    weight_map: dict[str, str]


def read_index(index: Path) -> dict[str, set[str]]:
    """Read the keys of each shard from an index, by the shard's file name."""
    try:
        with open_regular(index) as file:
            size = file.stat().st_size
            if size > MAX_INDEX_BYTES:
                raise CheckpointError(f"{index} has {size:,} bytes: this is not an index of shards.")
            text = bytearray(size)
            file.read_into(0, memoryview(text))
        content = typed(parse_json(text), _Index, foreign=True)
    except OSError as error:
        raise CheckpointError(f"{index} cannot be read: {error.strerror}.") from None
    except DocumentError as error:
        raise CheckpointError(f"{index} is not an index of shards: {error}.") from None
    if not content.weight_map:
        raise CheckpointError(f"{index} is not an index of shards: its 'weight_map' is empty.")
    shards: dict[str, set[str]] = {}
    for key, name in content.weight_map.items():
        shards.setdefault(name, set()).add(key)
    _require_present(index, shards)
    return dict(sorted(shards.items()))


def _require_present(index: Path, names: Mapping[str, object]) -> None:
    elsewhere = [name for name in names if Path(name).name != name or name in (".", "..") or "\\" in name]
    if elsewhere:
        raise CheckpointError(f"{index} names files outside its own folder: {some(elsewhere)}.")
    missing = [name for name in names if not _is_file(index.parent / name)]
    if missing:
        raise CheckpointError(
            f"{index} needs {counted(len(names), 'file')}, {counted(len(missing), 'is', 'are')} missing: "
            f"{some(sorted(missing))}. Download or copy them to the same folder."
        )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long for any file
        return False


def _weights_in(folder: Path) -> Path | None:
    """Find the weights in a folder: a usual name, safetensors before pickles, or else the only file."""
    files = {entry.name for entry in folder.iterdir() if entry.is_file()}
    stems = (*STEMS, ADAPTER_STEM) if ADAPTER_CONFIG in files else STEMS
    for suffix in FOLDER_SUFFIXES:
        for stem in stems:
            for name in (stem + suffix, stem + suffix + INDEX):
                if name in files:
                    return folder / name
    candidates = sorted(name for name in files if name.endswith((SUFFIX, SUFFIX + INDEX)))
    whole = [name for name in candidates if not _SHARD.search(name)]
    if len(whole) > 1:
        raise CheckpointError(f"{folder} holds several models: {some(whole)}. Name one of them.")
    if candidates and not whole:
        raise CheckpointError(
            f"{folder} holds shards without their index ({some(candidates)}): model.safetensors{INDEX} "
            "is missing. Download or copy it too."
        )
    return folder / whole[0] if whole else None
