"""The tokens that lie beside a model: which token each row of its embedding stands for."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from mecha_exp.checkpoint import Template
from mecha_exp.checkpoint.gguf.header import GGUF_SUFFIX, parse_header
from mecha_exp.checkpoint.remote import fetch_small_files
from mecha_exp.checkpoint.safetensors.header import open_regular
from mecha_exp.checkpoint.sidecars import SmallFiles, folder_of
from mecha_exp.documents import DocumentError, read_bytes, read_json, typed
from mecha_exp.errors import CheckpointError
from mecha_exp.families import (
    CONFIG,
    GENERATION,
    SENTENCEPIECE_MODELS,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

SPECIAL_KINDS = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""The names of tokens with a meaning of their own in `tokenizer_config.json`."""


@dataclass(frozen=True)
class Tokenizer:
    """The tokens in a folder.

    Attributes:
        folder: where they lie.
        tokens: by number.
        merges: the pairs that are joined, in their order; empty where there are none.
        model: the hash of a sentencepiece model; empty where there is none.
        special: the tokens with a meaning of their own that `tokenizer_config.json` names.
        added: the entries of `added_tokens`, by token.
    """

    folder: Path
    tokens: Mapping[int, str] = field(repr=False)
    merges: Sequence[str] = field(default=(), repr=False)
    model: str = ""
    special: Sequence[str] = field(default=(), repr=False)
    added: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)

    @staticmethod
    def beside(path: Path | None, component: str = "") -> Tokenizer | None:
        """The tokenizer beside a model's file, in its folder, or in a GGUF file; None where there is none.

        Args:
            component: the part of a pipeline that the tokens belong to: `text_encoder_2` has `tokenizer_2`.
        """
        if path is None:
            return None
        if path.suffix == GGUF_SUFFIX:
            return _of_gguf(path)
        folder = folder_of(path)
        if component:
            folder = folder / component.replace("text_encoder", "tokenizer")
        return _read(folder) if folder.is_dir() else None

    def in_order(self) -> list[str]:
        """The tokens by number, from 0 on.

        Raises:
            CheckpointError: there is a number without a token.
        """
        gap = next((number for number in range(len(self.tokens)) if number not in self.tokens), None)
        if gap is not None:
            raise CheckpointError(
                f"{self.folder}: the tokenizer has {len(self.tokens)} tokens, and none with the number "
                f"{gap}, so that a row would stand for no token. Take the tokenizer of another model."
            )
        return [self.tokens[number] for number in range(len(self.tokens))]

    def differences(self, other: Tokenizer) -> Iterator[str]:
        """The differences from another tokenizer, in words; a number that only one of them names is none."""
        for number in sorted(self.tokens.keys() & other.tokens.keys()):
            if self.tokens[number] != other.tokens[number]:
                yield f"token {number} is {self.tokens[number]!r} and {other.tokens[number]!r}"
        numbers = {token: number for number, token in other.tokens.items()}
        for number, token in sorted(self.tokens.items()):
            elsewhere = numbers.get(token, number)
            if elsewhere != number and number not in other.tokens:
                yield f"{token!r} is token {number} and token {elsewhere}"
        if self.merges and other.merges and self.merges != other.merges:
            pairs = enumerate(zip(self.merges, other.merges, strict=False))
            first = next((place for place, (a, b) in pairs if a != b), None)
            shorter = min(len(self.merges), len(other.merges))
            yield f"their merges differ from number {shorter if first is None else first} on"
        unread = not (self.tokens and other.tokens) and self.model and other.model
        if unread and self.model != other.model:
            yield "their sentencepiece models differ"


def tokenizer_files(folder: Path, other: Path | None) -> dict[str, Path | None]:
    """The files that give a folder the tokenizer of another model; None for those to be left out.

    None at all where the other model has no tokenizer.
    """
    source = None if other is None else folder_of(other)
    if source is None or Tokenizer.beside(source) is None:
        return {}
    fetch_small_files(folder)
    names = [name for name in sorted(TOKENIZER_FILES) if any((f / name).is_file() for f in (folder, source))]
    return {name: source / name if (source / name).is_file() else None for name in names}


def with_tokenizer(template: Template, tokenizer: Path | None) -> Template:
    """A folder's template with the tokenizer that rows of its model were taken for, and without its own.

    Args:
        template: the folder of the first model, whose tokens may be others.
        tokenizer: the file; None where the rows are those of no tokenizer.
    """
    folder = template.folder
    files: SmallFiles = tokenizer_files(folder, tokenizer)
    fetch_small_files(folder)
    if not files:
        files = {name: None for name in sorted(TOKENIZER_FILES) if (folder / name).is_file()}
    if tokenizer is None:
        return replace(template, replaced=files)
    files = {**files, **generation_settings(folder, tokenizer.parent)}
    return replace(template, replaced=files, entries=special_numbers(folder, tokenizer.parent))


def special_numbers(folder: Path, other: Path, file: str = CONFIG) -> dict[str, Any]:
    """The entries such as `eos_token_id` that a folder's settings get with the tokenizer of another folder.

    One that the other folder does not name is None, since the number stands for another token there.

    Args:
        folder: the folder whose settings are changed.
        other: the one whose tokenizer is taken; without a `config.json` there nothing changes.
        file: the name of the settings.
    """
    for each in (folder, other):
        fetch_small_files(each)
    paths = (folder / file, other / CONFIG, other / file)
    before, config, same = (_read_as(dict[str, Any], path) or {} for path in paths)
    settings = {**config, **same}
    names = [f"{kind}_id" for kind in SPECIAL_KINDS]
    return {name: settings.get(name) for name in names if config and (name in before or name in settings)}


def generation_settings(folder: Path, other: Path) -> dict[str, bytes]:
    """The `generation_config.json` of a folder with the special tokens of another; none if it has none."""
    before = _read_as(dict[str, Any], folder / GENERATION)
    if before is None:
        return {}
    content = {**before, **special_numbers(folder, other, GENERATION)}
    return {GENERATION: (json.dumps(content, indent=2) + "\n").encode()}


def _of_gguf(path: Path) -> Tokenizer | None:
    with open_regular(path) as file:
        header = parse_header(file)
    tokens, merges = (header.texts(f"tokenizer.ggml.{name}") for name in ("tokens", "merges"))
    return Tokenizer(path.parent, dict(enumerate(tokens)), tuple(merges)) if tokens else None


@dataclass(frozen=True)
class _Added:
    """What counts of a token in `added_tokens`."""

    id: int
    content: str


@dataclass(frozen=True)
class _Vocabulary:
    """The section `model` of a `tokenizer.json`; a unigram model lists its tokens with their scores."""

    vocab: dict[str, int] | list[list[Any]] = field(default_factory=dict)
    merges: list[str | list[str]] | None = None


@dataclass(frozen=True)
class _Whole:
    """A `tokenizer.json`, as far as it counts here."""

    model: _Vocabulary = field(default_factory=_Vocabulary)
    added_tokens: list[Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        for added in self.added_tokens or ():
            typed(added, _Added, foreign=True)


Named = str | dict[str, Any] | None
"""A token in a configuration: itself, or a mapping with its `content`."""


@dataclass(frozen=True)
class _Config:
    """A `tokenizer_config.json`, as far as it counts here."""

    additional_special_tokens: list[Named] | dict[str, Named] | None = None
    added_tokens_decoder: dict[str, Named] | None = None


def special_tokens(path: Path) -> dict[str, str]:
    """The tokens of `SPECIAL_KINDS` in a file such as `tokenizer_config.json`, by their kinds."""
    content = _read_as(dict[str, Any], path) or {}
    named = {kind: _name_of(content.get(kind)) for kind in SPECIAL_KINDS}
    return {kind: token for kind, token in named.items() if token is not None}


def _name_of(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _read(folder: Path) -> Tokenizer | None:
    fetch_small_files(folder)
    whole = _read_as(_Whole, folder / TOKENIZER)
    tokens, merges = _of_whole(whole) if whole else ({}, ())
    if not tokens:
        tokens, merges = _of_parts(folder)
    tokens = {**_by_number(_read_as(dict[str, int], folder / "added_tokens.json") or {}), **tokens}
    model = next((_hash(folder / name) for name in SENTENCEPIECE_MODELS if (folder / name).is_file()), "")
    if not tokens and not model:
        return None
    known = {added["content"]: added for added in (whole.added_tokens if whole else None) or ()}
    return Tokenizer(folder, tokens, merges, model, tuple(_special(folder / TOKENIZER_CONFIG)), known)


def _special(path: Path) -> Iterator[str]:
    """The tokens that a `tokenizer_config.json` names."""
    yield from special_tokens(path).values()
    config = _read_as(_Config, path) or _Config()
    more = config.additional_special_tokens or ()
    listed = more.values() if isinstance(more, dict) else more
    for entry in (*listed, *(config.added_tokens_decoder or {}).values()):
        if (token := _name_of(entry)) is not None:
            yield token


def _of_whole(whole: _Whole) -> tuple[dict[int, str], tuple[str, ...]]:
    """The tokens and merges of a `tokenizer.json`."""
    vocabulary, merges = whole.model.vocab, whole.model.merges or ()
    if isinstance(vocabulary, dict):
        tokens = _by_number(vocabulary)
    else:
        tokens = {number: str(entry[0]) for number, entry in enumerate(vocabulary) if entry}
    tokens |= {added["id"]: added["content"] for added in whole.added_tokens or ()}
    return tokens, tuple(pair if isinstance(pair, str) else " ".join(pair) for pair in merges)


def _of_parts(folder: Path) -> tuple[dict[int, str], tuple[str, ...]]:
    """The tokens and merges of `vocab.json` or `vocab.txt`, and `merges.txt`."""
    vocabulary = _read_as(dict[str, int], folder / "vocab.json")
    listed = [line for line in _lines(folder / "vocab.txt") if line]
    tokens = dict(enumerate(listed)) if vocabulary is None else _by_number(vocabulary)
    merges = [line for line in _lines(folder / "merges.txt") if line and not line.startswith("#version")]
    return tokens, tuple(merges)


def _by_number(vocabulary: Mapping[str, int]) -> dict[int, str]:
    return {number: token for token, number in vocabulary.items()}


def _read_as(kind: type[T], path: Path) -> T | None:
    """The content of a file of a tokenizer; None where there is none, or, with a warning, another one."""
    try:
        return typed(read_json(path), kind, foreign=True)
    except OSError:
        return None
    except DocumentError as error:
        _warn(f"{path} counts as if it were not there: {error}.")
        return None


@functools.cache
def _warn(message: str) -> None:
    """Say something once."""
    log.warning(message)


def _lines(path: Path) -> list[str]:
    try:
        return read_bytes(path).decode("utf-8", "replace").splitlines()
    except (OSError, DocumentError):
        return []


def _hash(path: Path) -> str:
    try:
        return hashlib.sha256(read_bytes(path)).hexdigest()
    except (OSError, DocumentError):
        return ""
