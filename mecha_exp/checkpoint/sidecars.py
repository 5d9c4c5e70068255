"""The small files that stand beside a model's weights: its configuration, tokenizer, licence."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mecha_exp.checkpoint.dtypes import torch_dtype
from mecha_exp.checkpoint.folder import PIPELINE
from mecha_exp.checkpoint.formats import INDEX, SUFFIXES
from mecha_exp.checkpoint.shards import Package, Tensors

CONFIG = "config.json"
MAX_BYTES = 64_000_000
"""What is larger is no companion."""

_WEIGHTS = (*SUFFIXES, INDEX, ".gguf", ".h5", ".msgpack", ".npz", ".onnx")
_NO_PART = (".incomplete", ".jpg", ".lock", ".pdf", ".png")
_OF_ITS_OWN = {"README.md", "trainer_state.json", "training_args.bin", "run.json"}
"""What tells of the training of that very model."""

_PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "shared.weight")
_HEADS = ("lm_head.weight", "embed_out.weight")


def companions(folder: Path) -> dict[str, Path]:
    """The small files of a model's folder, by where they lie in it; none where it has no configuration.

    A pipeline's are also those of its sub-folders. Weights, hidden files, and what tells of the training of
    that very model are left out.
    """
    if (folder / PIPELINE).is_file():
        found = {
            f"{sub.name}/{file.name}": file
            for sub in sorted(folder.iterdir())
            if sub.is_dir() and not sub.name.startswith(".")
            for file in _small_files(sub)
        }
        return found | {file.name: file for file in _small_files(folder)}
    if not (folder / CONFIG).is_file():
        return {}
    return {file.name: file for file in _small_files(folder)}


def content_of(source: Path, package: Package | None, before: Tensors) -> bytes:
    """What a companion says beside the new weights.

    A `config.json` is kept as it is but for what would make its weights be loaded wrongly: their dtype, the
    size of the vocabulary, and whether the output layer is the embedding.

    Args:
        package: the new weights of that folder; None for files that are copied as they are.
        before: the tensors (dtype, shape) of the model that the file is of.
    """
    raw = source.read_bytes()
    if source.name != CONFIG or package is None:
        return raw
    try:
        config = json.loads(raw)
    except ValueError:
        return raw
    if not isinstance(config, dict):
        return raw
    tensors = {key: tensor for shard in package.shards for key, tensor in shard.tensors.items()}
    changed = {**config, **_changes(config, tensors, before)}
    return raw if changed == config else (json.dumps(changed, indent=2) + "\n").encode()


def _changes(config: Mapping[str, Any], tensors: Tensors, before: Tensors) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    dtypes = {str(torch_dtype(dtype)) for dtype, _ in tensors.values() if dtype in _PLAIN_DTYPES}
    for word in ("dtype", "torch_dtype"):
        if word in config and len(dtypes) == 1:
            changes[word] = min(dtypes).removeprefix("torch.")
    embedding = next((key for key in tensors if key.endswith(_EMBEDDINGS)), None)
    rows_before = before[embedding][1][0] if embedding and embedding in before else None
    if embedding and rows_before is not None and config.get("vocab_size") == rows_before:
        changes["vocab_size"] = tensors[embedding][1][0]
    has_head = any(key.endswith(_HEADS) for key in tensors)
    had_head = any(key.endswith(_HEADS) for key in before)
    if has_head != had_head:
        changes["tie_word_embeddings"] = not has_head
    return changes


def _small_files(folder: Path) -> Iterator[Path]:
    for file in sorted(folder.iterdir()):
        name = file.name
        if name.startswith(".") or name in _OF_ITS_OWN or name.endswith(_WEIGHTS + _NO_PART):
            continue
        if file.is_file() and file.stat().st_size <= MAX_BYTES:
            yield file
