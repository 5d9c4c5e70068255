"""A reader of untrusted JSON objects, one entry at a time, so that a hostile header costs little memory.

Parsed JSON may be a hundred times as large in memory as its text.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from mecha_exp.errors import CheckpointError

MAX_ENTRY = 1 << 13  # characters for one tensor: 64 sizes of 19 digits, and room to spare
AGAIN = "It is damaged or was not fully copied: download or copy it again."

_SPACES = " \t\n\r"
_SPACE = re.compile(f"[{_SPACES}]*")


class EntryReader:
    """Reads the text of a header from front to end.

    Every method raises ValueError for invalid JSON, and CheckpointError for JSON that is not a header.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def names(self) -> Iterator[str]:
        """Yield the names of the object that begins here. Read the value after each name."""
        self._skip("{")
        if self._peek() == "}":
            self._at += 1
            return
        while True:
            name = self.string()
            self._skip(":")
            yield name
            if self._peek() == "}":
                self._at += 1
                return
            self._skip(",")

    def is_next(self, character: str) -> bool:
        """Whether the next value begins with a character."""
        return self._peek() == character

    def string(self) -> str:
        """Read a string."""
        if self._peek() != '"':
            raise ValueError(f"a text is expected at character {self._at}")
        text, self._at = _decoder.raw_decode(self._text, self._at)
        _require_text(text)
        return str(text)

    def value(self, name: str) -> Any:
        """Read any value of at most `MAX_ENTRY` characters."""
        self._peek()
        part = self._text[self._at : self._at + MAX_ENTRY]
        try:
            value, length = _decoder.raw_decode(part)
        except json.JSONDecodeError as error:
            if len(part) == MAX_ENTRY:
                raise CheckpointError(
                    f"tensor {name[:200]!r} has more than dtype, shape and data_offsets."
                ) from None
            raise ValueError(f"{error.msg} at character {self._at + error.pos}") from None
        self._at += length
        return value

    def end(self) -> None:
        """Raise ValueError unless only spaces follow."""
        if self._peek():
            raise ValueError(f"there is more after its end, at character {self._at}")

    def _peek(self) -> str:
        """The next character that is not a space; an empty string at the end."""
        character = self._text[self._at : self._at + 1]
        if character not in _SPACES:  # as in nearly every file
            return character
        space = _SPACE.match(self._text, self._at)
        self._at = space.end() if space else self._at
        return self._text[self._at : self._at + 1]

    def _skip(self, character: str) -> None:
        if self._peek() != character:
            raise ValueError(f"{character!r} is expected at character {self._at}")
        self._at += 1


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise CheckpointError(f"the header has {name[:200]!r} twice. {AGAIN}")
    for name in entries:
        _require_text(name)
    return entries


def _integer(digits: str) -> int:
    if len(digits) > 19 or digits == "-0" or int(digits) >= 2**63:
        raise CheckpointError(f"the header has a number out of range, {digits[:24]}.")
    return int(digits)


def _no_number(text: str) -> int:
    raise CheckpointError(f"the header has the number {text[:24]}, where only integers have a meaning.")


def _require_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise CheckpointError(f"the header has text that is not valid Unicode, {text[:60]!r}.") from None


_decoder = json.JSONDecoder(
    object_pairs_hook=_unique, parse_int=_integer, parse_float=_no_number, parse_constant=_no_number
)
