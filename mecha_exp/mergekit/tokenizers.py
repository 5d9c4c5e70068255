"""The tokenizer and the chat template that a configuration asks for, where no vocabulary changes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from mecha_exp.errors import ConfigError
from mecha_exp.graph.nodes import ModelNode
from mecha_exp.mergekit.reading import Configuration
from mecha_exp.mergekit.references import Reference, StoredModel
from mecha_exp.sources.tokenizer import Tokenizer, tokenizer_files

CHAT_TEMPLATE = "chat_template.jinja"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_EMBEDDING = "embed_tokens.weight"

SmallFiles = Mapping[str, "Path | bytes | None"]


def tokenizer_files_of(
    configuration: Configuration, models: Mapping[Reference, StoredModel], first: ModelNode
) -> SmallFiles:
    """The files of the output's tokenizer that it does not have from its first input, by name.

    Raises:
        ConfigError: tokens would have to be moved, or there is no tokenizer.
    """
    folder = next(model.path for model in models.values() if model.source == first.source)
    files: dict[str, Path | bytes | None] = {}
    if configuration.tokenizer is not None:
        files |= tokenizer_files(folder, _donor(configuration, models, folder).path)
    if configuration.chat_template is not None:
        files |= _with_template(files, folder, configuration.chat_template)
    return files


def _donor(configuration: Configuration, models: Mapping[Reference, StoredModel], first: Path) -> StoredModel:
    """The model whose tokenizer is asked for; all others have the same tokens."""
    source = configuration.tokenizer
    if source == "base":
        source = configuration.base or next(r for r, model in models.items() if model.path == first)
    assert isinstance(source, Reference)
    chosen = models[source]
    tokenizer = Tokenizer.beside(chosen.path)
    if tokenizer is None:
        raise ConfigError(f"tokenizer_source: there is no tokenizer beside {chosen.path}.")
    for reference, model in models.items():
        other = Tokenizer.beside(model.path)
        difference = "it has none" if other is None else next(tokenizer.differences(other), None)
        if difference is None and other is not None and len(other.tokens) != len(tokenizer.tokens):
            difference = f"{len(tokenizer.tokens)} and {len(other.tokens)} tokens"
        if difference is not None:
            raise ConfigError(
                f"tokenizer_source: the tokens of {reference} are not those of {source}: {difference}. Rows "
                "of embeddings are not moved here; merge models with one vocabulary."
            )
        _require_all_rows(model, len(tokenizer.tokens))
    return chosen


def _require_all_rows(model: StoredModel, tokens: int) -> None:
    """See that an embedding has one row for each token: mergekit would cut the others."""
    for key, info in model.infos.items():
        if key.endswith(_EMBEDDING) and info.shape[0] != tokens:
            raise ConfigError(
                f"tokenizer_source: {model.source} has {info.shape[0]} rows in '{key}' for {tokens} tokens, "
                "and mergekit would change their number. Leave out tokenizer_source to keep them."
            )


def _with_template(files: SmallFiles, folder: Path, template: str) -> SmallFiles:
    """The files that give a tokenizer a chat template."""
    folder = folder if folder.is_dir() else folder.parent
    settings = files.get(_TOKENIZER_CONFIG, folder / _TOKENIZER_CONFIG)
    if not isinstance(settings, Path) or not settings.is_file():
        raise ConfigError(f"chat_template: there is no {_TOKENIZER_CONFIG} beside the model in {folder}.")
    content = json.loads(settings.read_bytes())
    content.pop("chat_template", None)
    return {
        _TOKENIZER_CONFIG: (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode(),
        CHAT_TEMPLATE: template.encode(),
    }
