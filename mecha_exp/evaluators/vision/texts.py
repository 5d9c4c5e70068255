"""Class names as features of CLIP's text tower: zero-shot heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mecha_exp.errors import ConfigError
from mecha_exp.evaluators.common import calm, one_line
from mecha_exp.evaluators.vision.encoders import _pooled
from mecha_exp.evaluators.vision.heads import Head, listed
from mecha_exp.evaluators.vision.image_data import ImageSet

TEMPLATE = "a photo of a {}."
_TOKENIZERS = ("tokenizer.json", "vocab.json", "spiece.model", "tokenizer_config.json")


def class_texts(images: ImageSet, classes: Any) -> tuple[str, ...]:
    """The words for each class of a task: those that are given, or the class folders' names.

    Args:
        images: of the task.
        classes: words by folder; or a list, which has the folders' names in any order, or words for the
            folders in the order of their names.

    Raises:
        ConfigError: they are not as many as the classes.
    """
    given = listed(classes, images.task, "classes")
    if given is None:
        return tuple(name.replace("_", " ") for name in images.classes)
    if isinstance(given, dict):
        if lost := [name for name in images.classes if name not in given]:
            raise ConfigError(f"evaluator.classes: the class '{lost[0]}' of '{images.task}' has no words.")
        return tuple(given[name] for name in images.classes)
    if len(given) != len(images.classes):
        raise ConfigError(
            f"evaluator.classes: there are {len(given)} names for the {len(images.classes)} classes of "
            f"'{images.task}' in {images.path}."
        )
    if set(given) == set(images.classes):
        return images.classes
    return tuple(given)


def templates_of(templates: Any, task: str) -> tuple[str, ...]:
    """The sentences for a task, each with `{}` where the class goes.

    Raises:
        ConfigError: one has no place for the class, or several.
    """
    if isinstance(templates, str) and "{}" in templates:
        return (templates,)
    sentences = listed(templates, task, "templates")
    if sentences is None:
        return (TEMPLATE,)
    for sentence in sentences:
        if sentence.count("{}") != 1:
            raise ConfigError(
                f"evaluator.templates: {sentence!r} needs {{}} once, where the class goes: {TEMPLATE!r}."
            )
    return tuple(sentences)


def tokenizer_folder(folders: Sequence[Path], key: str) -> Path:
    """The first folder that has a tokenizer.

    Raises:
        ConfigError: none has one.
    """
    for folder in folders:
        if any((folder / name).is_file() for name in _TOKENIZERS):
            return folder
    searched = ", ".join(dict.fromkeys(map(str, folders)))
    raise ConfigError(
        f"no tokenizer lies in {searched}, so class names cannot be read. Name the folder of the pretrained "
        f"CLIP with evaluator.{key}=PATH."
    )


@torch.inference_mode()
def text_head(network: Any, tokenizer: Any, texts: Sequence[str], templates: Sequence[str]) -> Head:
    """The zero-shot head of some classes: for each the mean over templates of its normalised text features.

    Args:
        network: a CLIP of transformers, or its text tower with projection.
        tokenizer: that belongs to it.
        texts: words for each class.
        templates: sentences with `{}`.

    Returns:
        a head with rows of norm 1 and without bias. Source: Radford et al. 2021, arXiv:2103.00020.
    """
    rows = []
    for text in texts:
        sentences = [template.format(text) for template in templates]
        tokens = tokenizer(sentences, padding=True, return_tensors="pt").to(network.device)
        _check_length(network, tokens["input_ids"].shape[1], sentences[0])
        features = F.normalize(_text_features(network, tokens).float(), dim=-1)
        rows.append(F.normalize(features.mean(dim=0), dim=-1))
    return Head(torch.stack(rows))


def _check_length(network: Any, length: int, sentence: str) -> None:
    config = getattr(network.config, "text_config", network.config)
    limit = getattr(config, "max_position_embeddings", length)
    if length > limit:
        raise ConfigError(f"{sentence!r} has {length} tokens, and the text tower takes {limit}: shorten it.")


def _text_features(network: Any, tokens: Mapping[str, Tensor]) -> Tensor:
    if hasattr(network, "get_text_features"):
        return _pooled(network.get_text_features(**tokens))
    return network(**tokens).text_embeds  # type: ignore[no-any-return]


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer in a folder.

    Raises:
        ConfigError: transformers cannot read it.
    """
    return _tokenizer(folder, max(file.stat().st_mtime_ns for file in folder.iterdir()))


@lru_cache(maxsize=4)
def _tokenizer(folder: Path, changed: int) -> Any:
    with calm(offline=True):
        from transformers import AutoTokenizer

        with one_line(f"transformers cannot read the tokenizer in {folder}"):
            return AutoTokenizer.from_pretrained(folder, local_files_only=True)


@lru_cache(maxsize=32)
def fixed_head(folder: Path, changed: int, texts: tuple[str, ...], templates: tuple[str, ...]) -> Head:
    """The head by the text tower of a folder, which is not merged."""
    with calm(offline=True):
        from transformers import AutoModel

        with one_line(f"evaluator.text_model={folder}: transformers cannot load it"):
            network = AutoModel.from_pretrained(folder, local_files_only=True).eval()
    return text_head(network, read_tokenizer(folder), texts, templates)
