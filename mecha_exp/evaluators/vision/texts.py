"""Class names as features of CLIP's text tower: zero-shot heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mecha_exp.errors import ConfigError
from mecha_exp.evaluators.common import ModelFolder, calm, one_line
from mecha_exp.evaluators.vision.encoders import _pooled
from mecha_exp.evaluators.vision.frozen import changed_at, check_frozen
from mecha_exp.evaluators.vision.heads import Head, listed
from mecha_exp.evaluators.vision.image_data import ImageSet
from mecha_exp.families import TOKENIZER_FILES

TEMPLATE = "a photo of a {}."
_PROJECTED = "TextModelWithProjection"


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
    if not sentences:
        raise ConfigError(f"evaluator.templates: give a sentence at least, such as {TEMPLATE!r}.")
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
        if any((folder / name).is_file() for name in TOKENIZER_FILES):
            return folder
    searched = ", ".join(dict.fromkeys(map(str, folders)))
    raise ConfigError(
        f"no tokenizer lies in {searched}, so texts cannot be read. Name the folder of the pretrained "
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
        _check_length(network.config, tokens["input_ids"].shape[1], sentences[0])
        features = F.normalize(_text_features(network, tokens).float(), dim=-1)
        rows.append(F.normalize(features.mean(dim=0), dim=-1))
    return Head(torch.stack(rows))


def _check_length(config: Any, length: int, sentence: str) -> None:
    limit = getattr(getattr(config, "text_config", config), "max_position_embeddings", length)
    if length > limit:
        raise ConfigError(f"{sentence!r} has {length} tokens, and the text tower takes {limit}: shorten it.")


def check_lengths(
    folder: Path, model: ModelFolder, texts: tuple[str, ...], templates: tuple[str, ...]
) -> None:
    """Check that a text tower takes the sentences of all classes.

    Args:
        folder: with the tokenizer.
        model: the folder of the text tower, or of the CLIP.
        texts: words for each class.
        templates: sentences with `{}`.

    Raises:
        ConfigError: one is too long, or the tokenizer cannot be read.
    """
    _check_length(_config(model), *_longest(folder, changed_at(folder), texts, templates))


@lru_cache(maxsize=32)
def _longest(
    folder: Path, changed: int, texts: tuple[str, ...], templates: tuple[str, ...]
) -> tuple[int, str]:
    """The number of tokens of the longest sentence, and this sentence."""
    sentences = [template.format(text) for text in texts for template in templates]
    tokens = read_tokenizer(folder)(sentences)["input_ids"]
    return max(zip(map(len, tokens), sentences, strict=True))


def check_text_model(folder: Path, width: int | None, source: str) -> None:
    """Check that a folder has a text tower whose features are as wide as those of pictures.

    Args:
        folder: that `evaluator.text_model` names.
        width: of the features of pictures; None where it is not known.
        source: of these features, for errors.

    Raises:
        ConfigError: it has none, or its features have another width.
    """
    named, kind = f"evaluator.text_model={folder}", _kind_of_text_model(folder)
    check_frozen(folder, kind, named)
    own = getattr(_config(ModelFolder(folder)), "projection_dim", None)
    if None not in (own, width) and own != width:
        raise ConfigError(
            f"{named}: its features of texts have {own} numbers, and {source} gives {width} for a picture. "
            "Name the CLIP that the models were fine-tuned from. A vision tower alone lacks CLIP's "
            "projection: evaluator.projection=PATH names it."
        )


def _config(model: ModelFolder) -> Any:
    """The configuration in a folder, with what the library fills in."""
    with calm(offline=True):
        from transformers import AutoConfig

        with one_line(f"transformers cannot read {model.path / 'config.json'}"):
            return AutoConfig.from_pretrained(
                model.path, trust_remote_code=model.runs_code, local_files_only=True
            )


def _kind_of_text_model(folder: Path) -> str:
    """The class of transformers for a text tower."""
    kind = str((ModelFolder(folder).config.get("architectures") or ["model"])[0])
    with calm(offline=True):
        made = getattr(import_module("transformers"), kind, None)
    if not (hasattr(made, "get_text_features") or kind.endswith(_PROJECTED)):
        raise ConfigError(
            f"evaluator.text_model={folder}: it holds a {kind}, which gives no features of texts. Name the "
            "folder of a CLIP, or of a CLIPTextModelWithProjection."
        )
    return kind


def _text_features(network: Any, tokens: Mapping[str, Tensor]) -> Tensor:
    if hasattr(network, "get_text_features"):
        return _pooled(network.get_text_features(**tokens))
    return network(**tokens).text_embeds  # type: ignore[no-any-return]


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer in a folder.

    Raises:
        ConfigError: transformers cannot read it.
    """
    return _tokenizer(folder, changed_at(folder))


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
        made: Any = getattr(import_module("transformers"), _kind_of_text_model(folder))
        with one_line(f"evaluator.text_model={folder}: transformers cannot load it"):
            network = made.from_pretrained(folder, local_files_only=True).eval()
    return text_head(network, read_tokenizer(folder), texts, templates)
