"""The tokens that lie beside a model: which token each row of its embedding stands for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mecha_exp.checkpoint.gguf.header import GGUF_SUFFIX, parse_header
from mecha_exp.checkpoint.remote import fetch_small_files
from mecha_exp.checkpoint.safetensors.header import open_regular
from mecha_exp.checkpoint.sidecars import folder_of
from mecha_exp.errors import CheckpointError
from mecha_exp.families import (
    CONFIG,
    GENERATION,
    SENTENCEPIECE_MODELS,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
)

MAX_BYTES = 200_000_000
"""Larger files are not read."""

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
    before, config, same = (_json(path) or {} for path in (folder / file, other / CONFIG, other / file))
    settings = {**config, **same}
    names = [f"{kind}_id" for kind in SPECIAL_KINDS]
    return {name: settings.get(name) for name in names if config and (name in before or name in settings)}


def generation_settings(folder: Path, other: Path) -> dict[str, bytes]:
    """The `generation_config.json` of a folder with the special tokens of another; none if it has none."""
    before = _json(folder / GENERATION)
    if not isinstance(before, dict):
        return {}
    content = {**before, **special_numbers(folder, other, GENERATION)}
    return {GENERATION: (json.dumps(content, indent=2) + "\n").encode()}


def _of_gguf(path: Path) -> Tokenizer | None:
    with open_regular(path) as file:
        header = parse_header(file)
    tokens, merges = (header.texts(f"tokenizer.ggml.{name}") for name in ("tokens", "merges"))
    return Tokenizer(path.parent, dict(enumerate(tokens)), tuple(merges)) if tokens else None


def _read(folder: Path) -> Tokenizer | None:
    fetch_small_files(folder)
    whole = _json(folder / TOKENIZER)
    tokens, merges = _of_whole(whole) if isinstance(whole, dict) else ({}, ())
    if not tokens:
        tokens, merges = _of_parts(folder)
    added = _json(folder / "added_tokens.json")
    if isinstance(added, dict):
        tokens = {**_by_number(added), **tokens}
    model = next((_hash(folder / name) for name in SENTENCEPIECE_MODELS if (folder / name).is_file()), "")
    if not tokens and not model:
        return None
    special = tuple(_special(_json(folder / TOKENIZER_CONFIG)))
    entries = whole.get("added_tokens") if isinstance(whole, dict) else None
    known = {e["content"]: e for e in entries or () if isinstance(e, dict) and "content" in e}
    return Tokenizer(folder, tokens, merges, model, special, known)


def _special(config: Any) -> Iterator[str]:
    """The tokens that a `tokenizer_config.json` names."""
    config = config if isinstance(config, dict) else {}
    more = config.get("additional_special_tokens")
    entries = [config.get(name) for name in SPECIAL_KINDS] + (more if isinstance(more, list) else [])
    entries += (config.get("added_tokens_decoder") or {}).values()
    for entry in entries:
        content = entry.get("content") if isinstance(entry, dict) else entry
        if isinstance(content, str):
            yield content


def _of_whole(content: Mapping[str, Any]) -> tuple[dict[int, str], tuple[str, ...]]:
    """The tokens and merges of a `tokenizer.json`."""
    model = content.get("model")
    model = model if isinstance(model, dict) else {}
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        tokens = _by_number(vocabulary)
    else:  # unigram: a list of tokens with their scores
        entries = vocabulary if isinstance(vocabulary, list) else []
        tokens = {number: str(entry[0]) for number, entry in enumerate(entries) if entry}
    for added in content.get("added_tokens") or ():
        if isinstance(added, dict) and isinstance(added.get("id"), int):
            tokens[added["id"]] = str(added.get("content"))
    merges = model.get("merges") or ()
    return tokens, tuple(pair if isinstance(pair, str) else " ".join(map(str, pair)) for pair in merges)


def _of_parts(folder: Path) -> tuple[dict[int, str], tuple[str, ...]]:
    """The tokens and merges of `vocab.json` or `vocab.txt`, and `merges.txt`."""
    vocabulary = _json(folder / "vocab.json")
    listed = [line for line in _lines(folder / "vocab.txt") if line]
    tokens = _by_number(vocabulary) if isinstance(vocabulary, dict) else dict(enumerate(listed))
    merges = [line for line in _lines(folder / "merges.txt") if line and not line.startswith("#version")]
    return tokens, tuple(merges)


def _by_number(vocabulary: Mapping[str, Any]) -> dict[int, str]:
    return {number: token for token, number in vocabulary.items() if isinstance(number, int)}


def _json(path: Path) -> Any:
    """The content of a JSON file; None where it cannot be read."""
    try:
        return json.loads(_bytes(path))
    except (OSError, ValueError, RecursionError):
        return None


def _lines(path: Path) -> list[str]:
    try:
        return _bytes(path).decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def _hash(path: Path) -> str:
    try:
        return hashlib.sha256(_bytes(path)).hexdigest()
    except OSError:
        return ""


def _bytes(path: Path) -> bytes:
    if path.stat().st_size > MAX_BYTES:
        raise OSError("too large for a tokenizer")
    return path.read_bytes()
