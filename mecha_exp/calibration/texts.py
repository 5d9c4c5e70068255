"""The subjects of transformers: causal language models and classifiers of texts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mecha_exp.calibration.subject import IGNORED, Subject
from mecha_exp.errors import ConfigError
from mecha_exp.evaluators.common import ModelFolder, calm
from mecha_exp.evaluators.common.devices import chosen_device, chosen_dtype
from mecha_exp.evaluators.common.loading import Loader
from mecha_exp.evaluators.common.networks import places_of
from mecha_exp.evaluators.common.tables import read_rows, read_texts

_CAUSAL, _CLASSIFIER = "AutoModelForCausalLM", "AutoModelForSequenceClassification"
_MAX_LENGTH = 512


def subject_of_texts(
    weights: Mapping[str, Tensor],
    folder: ModelFolder,
    data: Path,
    *,
    count: int | None = None,
    length: int | None = None,
    column: str = "text",
    label: str = "label",
    device: str = "cpu",
    dtype: str = "float32",
) -> Subject:
    """A model of transformers on texts: a classifier if its saved class is one, else a causal language model.

    Each text is an example by itself, cut to `length` tokens, so nothing is padded. The labels of a language
    model are the next tokens, those of a classifier are in the data.

    Args:
        weights: under the names of the saved model.
        folder: of its configuration and tokenizer.
        data: a `.txt` or `.jsonl`, `.csv` or `.parquet` file, or a folder of texts.
        count: texts at most, the first ones.
        length: tokens at most; None is 512, or what the model takes.
        column, label: of the text and the class in a row.
        device: where it computes.
        dtype: in which.

    Raises:
        ConfigError: the data, the tokenizer or the weights are not what they must be.
    """
    names = [str(name) for name in folder.config.get("architectures") or ()]
    is_classifier = any(name.endswith("ForSequenceClassification") for name in names)
    kind = _CLASSIFIER if is_classifier else _CAUSAL
    number = chosen_dtype(dtype, weights, folder.config)
    module = Loader(folder, kind, number, {}).load(weights)
    keys = places_of(module, weights)
    if keys is None:
        raise ConfigError(
            f"transformers changes tensors of {folder.path} when it loads them, so that its parameters are "
            "not those of the file, and statistics of them would belong to no key."
        )
    module = module.to(chosen_device(device))
    with calm(offline=True):
        tokenizer = folder.tokenizer()
    texts, _, _ = read_texts(data, column)
    chosen = [place for place, text in enumerate(texts) if text.strip()][:count]
    positions = getattr(module.config, "max_position_embeddings", None) or _MAX_LENGTH
    length = min(length or _MAX_LENGTH, positions)
    tokens = [
        tokenizer(texts[place], truncation=True, max_length=length, return_tensors="pt")["input_ids"]
        for place in chosen
    ]
    settings = {"length": length, "dtype": str(number).removeprefix("torch."), "column": column}
    if is_classifier:
        settings["label"] = label
        classes = _classes(data, label, chosen, module.config)
        return _classifier(module, tokens, classes, keys, settings)
    return _language_model(module, tokens, keys, settings)


def _language_model(
    module: Any, tokens: list[Tensor], keys: Mapping[str, str], settings: dict[str, Any]
) -> Subject:
    examples = [ids for ids in tokens if ids.shape[1] > 1]

    def logits(ids: Tensor) -> Tensor:
        scores: Tensor = module(ids.to(module.device), use_cache=False).logits
        return scores[0, :-1]

    return Subject(module, examples, logits, lambda ids: ids[0, 1:], keys, settings)


def _classifier(
    module: Any,
    tokens: list[Tensor],
    classes: list[int] | None,
    keys: Mapping[str, str],
    settings: dict[str, Any],
) -> Subject:
    def logits(place: int) -> Tensor:
        scores: Tensor = module(tokens[place].to(module.device)).logits
        return scores

    def labels(place: int) -> Tensor:
        assert classes is not None
        return torch.tensor([classes[place]])

    return Subject(
        module, range(len(tokens)), logits, labels if classes is not None else None, keys, settings
    )


def _classes(data: Path, label: str, chosen: list[int], config: Any) -> list[int] | None:
    """The class of each text, by its number or its name; None where the data have none."""
    if data.suffix == ".txt" or data.is_dir():
        return None
    rows = read_rows(data)
    if label not in rows[0]:
        return None
    numbers = {str(name): int(number) for name, number in (getattr(config, "label2id", None) or {}).items()}
    classes = []
    for place in chosen:
        text = str(rows[place].get(label))
        number = numbers[text] if text in numbers else int(text) if text.lstrip("-").isdecimal() else None
        if number is None or number >= config.num_labels:
            raise ConfigError(
                f"{data}: the label {text!r} of row {place} is not one of the {config.num_labels} classes."
            )
        classes.append(number if number >= 0 else IGNORED)
    return classes
