"""Sidecar files of a model: its configuration, tokenizer and licence."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from mecha_exp.checkpoint.dtypes import Layout, torch_dtype
from mecha_exp.checkpoint.folder import PIPELINE
from mecha_exp.checkpoint.formats import SUFFIXES
from mecha_exp.checkpoint.remote import fetch_small_files
from mecha_exp.checkpoint.safetensors.header import INDEX
from mecha_exp.checkpoint.shards import Package
from mecha_exp.documents import DocumentError, parse_json, read_json, typed
from mecha_exp.errors import CheckpointError
from mecha_exp.families import CONFIG, embeddings, output_layers, vocabulary_sizes

SmallFiles: TypeAlias = Mapping[str, Path | bytes | None]
"""Files beside weights by their names: a file or content that is written, and None for one left out."""

CONFIG_SECTIONS = ("quantization_config", "compression_config")
"""The entries of `config.json` that say how a model is quantised; the second one is the older name."""
CARD = "README.md"
"""The model card of a folder. That of an input describes the input, and is not copied."""
CARD_TAG = "mecha_exp"
"""The tag in the front matter of a card that this library wrote."""
MAX_BYTES = 64_000_000
"""Larger files are not copied."""
MAX_FRONT_MATTER = 1 << 16
"""The bytes in which the front matter of a card ends."""

_WEIGHTS = (*SUFFIXES, INDEX, ".h5", ".msgpack", ".npz", ".onnx")
_NOT_COPIED = (".incomplete", ".jpg", ".lock", ".pdf", ".png")
_OF_TRAINING = {CARD, "trainer_state.json", "training_args.bin", "run.json"}
"""Files about the training of one model."""

_OF_QUANTISATION = {"quantize_config.json", "quant_config.json", "hf_quant_config.json"}
"""Files that tell a loader to expect codes. What is written holds plain numbers."""

_PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")


def companions(folder: Path) -> dict[str, Path]:
    """Find the small files of a model's folder, by their path in it; none where it has no configuration.

    A pipeline's sub-folders are searched too. Weights, hidden files and files of a training are left out.
    """
    if (folder / PIPELINE).is_file():
        files = {
            f"{sub.name}/{file.name}": file
            for sub in sorted(folder.iterdir())
            if sub.is_dir() and not sub.name.startswith(".")
            for file in _small_files(sub)
        }
        return files | {file.name: file for file in _small_files(folder)}
    if not (folder / CONFIG).is_file():
        return {}
    return {file.name: file for file in _small_files(folder)}


def folder_of(path: Path) -> Path:
    """The folder of a model, given as that folder or as a file in it."""
    return path if path.is_dir() else path.parent


def is_own_card(file: Path) -> bool:
    """Whether a file is a model card that this library wrote, by its front matter."""
    try:
        with file.open("rb") as opened:
            opening = opened.read(MAX_FRONT_MATTER)
    except OSError:
        return False
    front_matter, end, _ = opening.partition(b"\n---\n")
    return opening.startswith(b"---\n") and bool(end) and f"\n- {CARD_TAG}".encode() in front_matter


def config_beside(path: Path | None) -> Mapping[str, Any]:
    """The content of the config.json in a model's folder; empty where there is none."""
    if path is None:
        return {}
    try:
        return typed(read_json(folder_of(path) / CONFIG), dict[str, Any])
    except (OSError, DocumentError):
        return {}


def content_of(
    source: Path | bytes, package: Package | None, before: Layout, entries: Mapping[str, Any] | None = None
) -> bytes:
    """The content of a small file beside the new weights.

    In a `config.json` only the entries that decide how weights are loaded are changed: their dtype, the size
    of the vocabulary, and whether the output layer is the embedding. The section about quantisation is left
    out, since the new weights are plain numbers.

    Args:
        source: the file, or its content, which is written unchanged.
        package: the new weights of the folder; None for files that are copied unchanged.
        before: the tensors (dtype, shape) of the model that the file comes from.
        entries: more entries of a `config.json` that change, such as the number of layers.
    """
    if isinstance(source, bytes):
        return source
    raw = source.read_bytes()
    if source.name != CONFIG or package is None:
        return raw
    try:
        config = typed(parse_json(raw), dict[str, Any])
    except DocumentError:
        return raw
    tensors = {key: tensor for shard in package.shards for key, tensor in shard.tensors.items()}
    plain = {entry: value for entry, value in config.items() if entry not in CONFIG_SECTIONS}
    changed = {**plain, **_changes(config, tensors, before), **(entries or {})}
    return raw if changed == config else (json.dumps(changed, indent=2) + "\n").encode()


def _changes(config: Mapping[str, Any], tensors: Layout, before: Layout) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    dtypes = {str(torch_dtype(dtype)) for dtype, _ in tensors.values() if dtype in _PLAIN_DTYPES}
    for entry in ("dtype", "torch_dtype"):
        if entry in config and len(dtypes) == 1:
            changes[entry] = min(dtypes).removeprefix("torch.")
    shapes, shapes_before = (
        {key: shape for key, (_, shape) in layout.items()} for layout in (tensors, before)
    )
    counts = {shapes_before[key][0]: shapes[key][0] for key in embeddings(shapes) if key in shapes_before}
    changes |= vocabulary_sizes(config, counts)
    has_head, had_head = (bool(output_layers(each)) for each in (shapes, shapes_before))
    if has_head != had_head:
        changes["tie_word_embeddings"] = not has_head
    return changes


def _small_files(folder: Path) -> Iterator[Path]:
    fetch_small_files(folder)
    for file in sorted(folder.iterdir()):
        name = file.name
        if (
            name.startswith(".")
            or name in _OF_TRAINING | _OF_QUANTISATION
            or name.endswith(_WEIGHTS + _NOT_COPIED)
        ):
            continue
        if file.is_file() and file.stat().st_size <= MAX_BYTES:
            _require_inside(file, folder)
            yield file


def _require_inside(file: Path, folder: Path) -> None:
    """Raise CheckpointError for a link that leads out of the model: its target would be copied.

    A snapshot of a hub's cache links to the blobs of its own model, `../../blobs/HASH`.
    """
    if not file.is_symlink():
        return
    root = folder.resolve()
    snapshots = next((parent for parent in root.parents if parent.name == "snapshots"), None)
    allowed = [root, *([snapshots.parent / "blobs"] if snapshots else [])]
    model = root.parent if (root.parent / PIPELINE).is_file() else root
    target = file.resolve()
    if not any(target.is_relative_to(place) for place in (*allowed, model)):
        raise CheckpointError(
            f"{file} is a link that leads out of its model, to {target}, and would be copied beside the "
            "merged weights. Put the file itself in its place, or delete the link."
        )
