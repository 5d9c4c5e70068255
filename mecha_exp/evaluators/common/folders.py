"""Where the configuration, the tokenizer and the processor of the measured models lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mecha_exp.checkpoint.sidecars import companions
from mecha_exp.documents import DocumentError, read_json, typed
from mecha_exp.errors import ConfigError, brief, some
from mecha_exp.evaluation.context import Context
from mecha_exp.evaluation.declaration import Options, Shapes
from mecha_exp.evaluators.common.libraries import calm
from mecha_exp.families import (
    CHAT_TEMPLATES,
    CONFIG,
    SMALL_PATTERNS,
    SMALL_SUFFIXES,
    TOKENIZER_CONFIG,
    embeddings,
)
from mecha_exp.lab.content_hash import content_of
from mecha_exp.sources.tokenizer import Tokenizer

PIPELINE = "model_index.json"
Fetch = Callable[[str, str | None, bool], str | Path]
_WORDS_ABOUT = ("_name_or_path", "transformers_version", "_diffusers_version")
"""Entries of a configuration that decide nothing."""


@dataclass(frozen=True)
class ModelFolder:
    """A folder with a `config.json`, or a pipeline's, and what else lies beside the weights of a model.

    Attributes:
        path: the folder.
        runs_code: whether modules in the folder may be run (`trust_remote_code`).
    """

    path: Path
    runs_code: bool = False

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The content of its `config.json`.

        Raises:
            ConfigError: the file cannot be read, or is not JSON.
        """
        file = self.path / CONFIG
        try:
            return typed(read_json(file), dict[str, Any])
        except (OSError, DocumentError) as error:
            raise ConfigError(f"{file} cannot be read as a model's configuration: {error}") from None

    @property
    def contents(self) -> dict[str, Any]:
        """What decides a model's numbers beside its weights: small files by name, as hashes or JSON."""
        suffixes = (*SMALL_SUFFIXES, ".py") if self.runs_code else SMALL_SUFFIXES
        files = {name: file for name, file in companions(self.path).items() if file.suffix in suffixes}
        return {name: _decisive(file) for name, file in files.items()}

    @property
    def size_of_vocabulary(self) -> int:
        """One more than the largest number of a token; 0 where no tokenizer can be read without a library."""
        tokenizer = Tokenizer.beside(self.path)
        return max(tokenizer.tokens, default=-1) + 1 if tokenizer else 0

    def tokenizer(self) -> Any:
        """The tokenizer of transformers.

        Raises:
            ConfigError: there is none, or it cannot be read.
        """
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(
                self.path, trust_remote_code=self.runs_code, local_files_only=True
            )
        except Exception as error:  # of the library and of its backends
            cause = brief(" ".join(str(error).split()), limit=300)
            raise ConfigError(
                f"{self.path} has no tokenizer that transformers can read: {cause}. Name a folder that "
                "has one with evaluator.model=PATH."
            ) from None

    @property
    def has_chat_template(self) -> bool:
        """Whether its tokenizer has a template for chats."""
        if any((self.path / name).is_file() for name in CHAT_TEMPLATES):
            return True
        try:
            content = typed(read_json(self.path / TOKENIZER_CONFIG), dict[str, Any])
        except (OSError, DocumentError):
            return False
        return bool(content.get("chat_template"))

    def check_vocabulary(self, shapes: Shapes) -> None:
        """Check that every token has a row in the embedding.

        Raises:
            ConfigError: the tokenizer is larger than the embedding.
        """
        tokens = self.size_of_vocabulary
        for key in embeddings(shapes):
            if shapes[key][0] < tokens:
                raise ConfigError(
                    f"the tokenizer in {self.path} has {tokens:,} tokens, and {key} of the model has "
                    f"{shapes[key][0]:,} rows: some tokens have none. Name the folder of a tokenizer that "
                    "fits with evaluator.model=PATH."
                )


def model_folder(
    context: Context, model: str | None = None, *, trust_remote_code: bool = False
) -> ModelFolder:
    """The folder of the configuration and the tokenizer of what is measured.

    Args:
        context: its inputs are searched in their order; a file counts as its folder.
        model: a folder, or the name of a model of the hub, to be used in their place.
        trust_remote_code: whether modules in the folder may be run.

    Raises:
        ConfigError: there is none, or a model of the hub is not in the cache.
    """
    if model is not None:
        folder = named_folder(model, "model", context.offline)
        if not _is_model(folder):
            raise ConfigError(f"evaluator.model={model}: there is no {CONFIG} in this folder.")
        return ModelFolder(folder, trust_remote_code)
    folders = [path if path.is_dir() else path.parent for path in context.inputs.values()]
    for folder in folders:
        if _is_model(folder):
            return ModelFolder(folder, trust_remote_code)
    searched = some(dict.fromkeys(map(str, folders)), limit=3) or "no folder"
    raise ConfigError(
        f"no {CONFIG} lies beside the inputs (looked in {searched}), so their network and tokenizer are not "
        "known. Merge folders of models (models.base, models.experts), or name one that has them with "
        "evaluator.model=PATH."
    )


def folder_of(context: Context, options: Options) -> ModelFolder:
    """The `model_folder` that an evaluator's parameters `model` and `trust_remote_code` choose."""
    return model_folder(context, options["model"], trust_remote_code=options["trust_remote_code"])


def _is_model(folder: Path) -> bool:
    return (folder / CONFIG).is_file() or (folder / PIPELINE).is_file()


def named_folder(name: str, key: str, offline: bool, fetch: Fetch | None = None) -> Path:
    """The folder or the file that a setting names, or the folder of a hub's model in the cache.

    Args:
        name: a path, or `org/name` or `org/name@revision`.
        key: of the setting.
        offline: whether nothing may be downloaded.
        fetch: brings the model with its weights, by repository, revision and `offline`; None brings its
            configuration, tokenizer and processor alone.

    Raises:
        ConfigError: there is no such path, and no such model.
    """
    from mecha_exp.checkpoint.hub import is_hub_name

    if (path := Path(name).expanduser()).exists():
        return path
    if not is_hub_name(name):
        raise ConfigError(f"evaluator.{key}={name}: this folder does not exist.")
    repository, _, revision = name.partition("@")
    try:
        with calm(offline=offline):
            return Path((fetch or _small_files)(repository, revision or None, offline))
    except Exception as error:  # the library also raises errors of its transport
        chosen = f"{repository} --revision {revision}" if revision else repository
        files = "" if fetch else " --include '*.json' '*.txt' '*.model'"
        cause = "it is not in the cache of the hub" if offline else brief(str(error))
        raise ConfigError(
            f"evaluator.{key}={name}: there is no such folder, and as a model of the hub {cause}. Fetch it "
            f"with hub.offline=false, or: hf download {chosen}{files}"
        ) from None


def frozen_folder(name: str, key: str, offline: bool) -> Path:
    """The folder or the file of a model that is not merged, with its weights; see `named_folder`."""
    return named_folder(name, key, offline, _with_weights)


def _small_files(repository: str, revision: str | None, offline: bool) -> str:
    from huggingface_hub import snapshot_download

    return str(
        snapshot_download(
            repository, revision=revision, allow_patterns=[*SMALL_PATTERNS, "*.py"], local_files_only=offline
        )
    )


def _with_weights(repository: str, revision: str | None, offline: bool) -> Path:
    from mecha_exp.checkpoint.hub import hub_folder

    return hub_folder(f"{repository}@{revision}" if revision else repository, offline)


def _decisive(file: Path) -> Any:
    """A configuration without what names its origin; the hash of any other file."""
    if file.suffix == ".json" and "tokenizer" not in file.name:
        try:
            content = typed(read_json(file), dict[str, Any])
        except DocumentError:
            return content_of(file)
        return {name: value for name, value in content.items() if name not in _WORDS_ABOUT}
    return content_of(file)
