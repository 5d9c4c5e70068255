"""The files of the tokenizer and the chat template that a configuration asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mecha_exp.checkpoint.remote import fetch_small_files
from mecha_exp.checkpoint.sidecars import SmallFiles, folder_of
from mecha_exp.documents import parse_json, read_json, typed
from mecha_exp.errors import ConfigError, prefixed
from mecha_exp.families import CHAT_TEMPLATE, OLDER_TOKENIZERS, TOKENIZER, TOKENIZER_CONFIG
from mecha_exp.mergekit.reader import Configuration
from mecha_exp.mergekit.references import Reference, StoredModel
from mecha_exp.mergekit.tokenizer_settings import AUTO
from mecha_exp.mergekit.vocabulary import Vocabulary
from mecha_exp.sources.tokenizer import tokenizer_files


def tokenizer_files_of(
    configuration: Configuration,
    models: Mapping[Reference, StoredModel],
    vocabulary: Vocabulary | None,
    first: StoredModel,
) -> SmallFiles:
    """The files of the output's tokenizer that it does not have from its first input, by name.

    Raises:
        ConfigError: there is no tokenizer that a chat template could be given to.
    """
    folder = first.path
    files: dict[str, Path | bytes | None] = dict(first.small_files)
    if vocabulary is not None:
        donor = models[vocabulary.donor].path
        files |= tokenizer_files(folder, donor)
        if vocabulary.added:
            files |= dict.fromkeys(OLDER_TOKENIZERS & files.keys())
            files[TOKENIZER] = _with_tokens(donor, vocabulary.added)
    template = configuration.chat_template
    if template == AUTO:
        template = _most_common_template(list(models.values()))
    return files if template is None else _with_template(files, folder, template)


@dataclass(frozen=True)
class _Template:
    """A chat template with a name of its own."""

    name: str
    template: str


@dataclass(frozen=True)
class _Config:
    """A `tokenizer_config.json`, as far as it counts here."""

    chat_template: str | list[_Template] | None = None


def _most_common_template(models: Sequence[StoredModel]) -> str | None:
    """The chat template that most models have, the first of equally many; None where none has one."""
    templates = [template for model in models if (template := _template_of(model))]
    return max(templates, key=templates.count) if templates else None


def _template_of(model: StoredModel) -> str | None:
    """The default chat template of a model: that of its own file, else of the configuration."""

    def content(name: str) -> bytes:
        folder = folder_of(model.path)
        fetch_small_files(folder)
        source = model.small_files.get(name, folder / name)
        if isinstance(source, Path):
            return source.read_bytes() if source.is_file() else b""
        return source or b""

    if text := content(CHAT_TEMPLATE):
        return text.decode("utf-8", "replace").strip()
    with prefixed(f"{model.source}: {TOKENIZER_CONFIG}: "):
        template = typed(parse_json(content(TOKENIZER_CONFIG) or b"{}"), _Config, foreign=True).chat_template
    if isinstance(template, list):
        template = next((each.template for each in template if each.name == "default"), None)
    return template.strip() if template else None


def _with_tokens(donor: Path, added: tuple[Mapping[str, Any], ...]) -> bytes:
    """The `tokenizer.json` of a model with more tokens."""
    content = _content(folder_of(donor) / TOKENIZER)
    content["added_tokens"] = [*(content.get("added_tokens") or ()), *added]
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def _content(path: Path) -> dict[str, Any]:
    with prefixed(f"{path}: "):
        return typed(read_json(path), dict[str, Any])


def _with_template(files: SmallFiles, path: Path, template: str) -> dict[str, Path | bytes | None]:
    """The files that give a tokenizer a chat template."""
    folder = folder_of(path)
    fetch_small_files(folder)
    settings = files.get(TOKENIZER_CONFIG, folder / TOKENIZER_CONFIG)
    content = settings.read_bytes() if isinstance(settings, Path) and settings.is_file() else settings
    if not isinstance(content, bytes):
        raise ConfigError(f"chat_template: there is no {TOKENIZER_CONFIG} beside the model in {folder}.")
    with prefixed(f"{folder / TOKENIZER_CONFIG}: "):
        config = typed(parse_json(content), dict[str, Any])
    config.pop("chat_template", None)
    return {
        **files,
        TOKENIZER_CONFIG: (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode(),
        CHAT_TEMPLATE: template.encode(),
    }
