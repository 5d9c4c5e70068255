"""Names of tokens, by which tokens of different tokenizers are compared and split into pieces."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from mecha_exp.errors import CheckpointError, ConfigError, MechaError
from mecha_exp.families import TOKENIZER
from mecha_exp.sources.tokenizer import SPECIAL_KINDS, Tokenizer, special_tokens

_WORD_START = "▁"
_BYTE = re.compile("<0x([0-9A-F]{2})>")
_BYTE_LEVEL = '"ByteLevel"'


class TokenNames:
    """The tokens of a tokenizer by what they stand for.

    `Ġthe` of a byte-level tokenizer and `▁the` of sentencepiece are both ` the`, and `Ċ` and `<0x0A>` end a
    line. A special token is that of the same text, or else that of the same kind: `</s>` and `<|end|>` both
    end a text.

    Args:
        tokenizer: whose tokens they are.
        count: how many tokens have a row; None for all of them.

    Attributes:
        rows: the row of each token.
        numbers: the rows that there are.
    """

    def __init__(self, tokenizer: Tokenizer, count: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.rows = {t: n for n, t in tokenizer.tokens.items() if count is None or n < count}
        self.numbers = set(self.rows.values())
        self._kinds = dict(_kinds(tokenizer.folder))
        self._is_byte_level = _BYTE_LEVEL in (tokenizer.folder / TOKENIZER).read_text("utf-8", "replace")

    def row_of(self, token: str, names: TokenNames) -> int | None:
        """The row of another tokenizer's token; None where it is not among these."""
        kind = names._kinds.get(token)
        is_special = kind is not None or names._is_added(token)
        if token in self.rows and (is_special or self._is_byte_level == names._is_byte_level):
            return self.rows[token]
        if is_special:
            return self._by_kind.get(kind or "")
        return self._by_text.get(names.text_of(token))

    def pieces_of(self, token: str, names: TokenNames) -> list[int]:
        """The rows of the tokens that this tokenizer makes of another one's token.

        Raises:
            CheckpointError: there are none, or they have no row.
            ConfigError: the library `tokenizers` is missing.
        """
        text = names.text_of(token)
        pieces: Sequence[int | None]
        try:
            pieces = self._split(text.decode())
        except UnicodeDecodeError:  # a part of a character
            pieces = [self._by_text.get(bytes([byte])) for byte in text]
        rows = [piece for piece in pieces if piece in self.numbers]
        if not rows or len(rows) < len(pieces):
            raise CheckpointError(
                f"align_tokens: {self.tokenizer.folder} has no pieces with a row for {token!r}, a token of "
                f"{names.tokenizer.folder}. missing=omp makes its row of others, and missing=mean of all."
            )
        return rows

    def text_of(self, token: str) -> bytes:
        """The text that a token stands for."""
        if self._is_added(token):
            return token.encode()
        if self._is_byte_level:
            are_bytes = all(letter in _BYTES for letter in token)
            return bytes(_BYTES[letter] for letter in token) if are_bytes else token.encode()
        if byte := _BYTE.fullmatch(token):
            return bytes.fromhex(byte[1])
        return token.replace(_WORD_START, " ").encode()

    @cached_property
    def _by_text(self) -> Mapping[bytes, int]:
        """The rows of the tokens that are not special by their text; of several one that is not a byte."""
        plain = [token for token in self.rows if not self._is_added(token)]
        plain.sort(key=lambda token: (_BYTE.fullmatch(token) is None, -self.rows[token]))
        return {self.text_of(token): self.rows[token] for token in plain}

    def _is_added(self, token: str) -> bool:
        """Whether a token was added to the vocabulary, as special ones are, and stands for its letters."""
        return token in self.tokenizer.added and not _BYTE.fullmatch(token)

    @cached_property
    def _by_kind(self) -> Mapping[str, int]:
        known = ((kind, self.rows.get(token)) for token, kind in self._kinds.items())
        return {kind: row for kind, row in known if row is not None}

    def _split(self, text: str) -> list[int]:
        try:
            if self._begins_with_space:
                text = text.removeprefix(" ") or text
            return list(self._library.encode(text, add_special_tokens=False).ids)
        except MechaError:
            raise
        except Exception as error:  # the library has no error of its own
            raise CheckpointError(
                f"align_tokens: the library tokenizers cannot split {text!r} by the {TOKENIZER} in "
                f"{self.tokenizer.folder}: {error}. Set missing=omp or missing=mean."
            ) from None

    @cached_property
    def _begins_with_space(self) -> bool:
        """Whether the tokenizer puts a space before a text, as those of Llama 2 do."""
        first = self._library.encode("a", add_special_tokens=False).tokens[:1]
        return any(self.text_of(token).startswith(b" ") for token in first)

    @cached_property
    def _library(self) -> Any:
        try:
            import tokenizers
        except ImportError:
            raise ConfigError(
                "align_tokens: missing=pieces splits tokens with the library tokenizers, which is not "
                "installed. Install it: pip install 'mecha_exp[text]', or set missing=mean"
            ) from None
        return tokenizers.Tokenizer.from_file(str(self.tokenizer.folder / TOKENIZER))


def _kinds(folder: Path) -> Iterator[tuple[str, str]]:
    """The kind of each special token, as `tokenizer_config.json` or `special_tokens_map.json` names it."""
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        named = special_tokens(folder / name)
        yield from ((named[kind], kind) for kind in reversed(SPECIAL_KINDS) if kind in named)
        # a token of several kinds has the first


def _byte_letters() -> Mapping[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for.

    Printable bytes stand for themselves, the others have the letters from U+0100 on, in order. Source: GPT-2.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others: Sequence[int] = [byte for byte in range(0x100) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_letters()
