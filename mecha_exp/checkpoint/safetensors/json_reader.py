"""A reader of untrusted JSON objects, one entry at a time, so that a hostile header costs little memory.

Parsed JSON may be a hundred times as large in memory as its text, and text with one rare character four times
as large as its bytes.
"""

import codecs
import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from mecha_exp.errors import CheckpointError

MAX_ENTRY = 1 << 13  # bytes for one tensor: 64 sizes of 19 digits, and room to spare
MAX_TEXT, MAX_RARE_TEXT = 64_000_000, 10_000_000  # bytes of one text, and of one that is not ASCII
AGAIN = "It is damaged or was not fully copied: download or copy it again."

_SPACES = b" \t\n\r"
_SPACE = re.compile(rb"[ \t\n\r]*")
_PLAIN = re.compile(rb'"([^"\\\x00-\x1f]*)"')
_USUAL_NAME = re.compile(rb'"([^"\\\x00-\x1f]*)":')
_SIZE = rb"(?:0|[1-9][0-9]{0,17})"
_USUAL = re.compile(
    rb'[ \t\n\r]*\{"dtype":"([A-Z0-9_]{1,16})",'
    rb'"shape":\[((?:%b(?:,%b){0,63})?)\],"data_offsets":\[(%b),(%b)\]\}' % (_SIZE, _SIZE, _SIZE, _SIZE)
)
"""The entry of a tensor as the format's own library writes it; any other way to write it is read, too."""

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


class EntryReader:
    """Reads the bytes of a header from front to end.

    Every method raises ValueError for invalid JSON, and CheckpointError for JSON that is not a header.
    """

    def __init__(self, raw: bytes | bytearray) -> None:
        self._raw = raw
        self._at = 0

    def names(self) -> Iterator[str]:
        """Yield the names of the object that begins here. Read the value after each name."""
        self._skip(b"{")
        if self._peek() == b"}":
            self._at += 1
            return
        while True:
            yield self._name()
            if self._raw[self._at : self._at + 1] == b",":  # as in nearly every file
                self._at += 1
            elif self._peek() == b"}":
                self._at += 1
                return
            else:
                self._skip(b",")

    def _name(self) -> str:
        """Read a name and the colon after it."""
        usual = _USUAL_NAME.match(self._raw, self._at)
        if usual is None:
            name = self.string()
            self._skip(b":")
            return name
        self._at = usual.end()
        require_short(usual.end() - usual.start() - 1, self._raw, usual.start())
        return usual[1].decode()

    def is_next(self, character: bytes) -> bool:
        """Whether the next value begins with a character."""
        return self._peek() == character

    def string(self) -> str:
        """Read a string."""
        if self._peek() != b'"':
            raise ValueError(f"a text is expected at byte {self._at}")
        plain = _PLAIN.match(self._raw, self._at)
        match = plain or _STRING.match(self._raw, self._at)
        if match is None:
            raise ValueError(f"the text at byte {self._at} does not end")
        start, self._at = match.span()
        require_short(self._at - start, self._raw, start)
        if plain:
            return plain[1].decode()
        text = str(json.loads(self._raw[start : self._at].decode()))
        _require_text(text)
        return text

    def usual_tensor(self) -> tuple[bytes, bytes, int, int] | None:
        """Read a tensor's entry that is written as usual: dtype, sizes, begin, end; None leaves any other."""
        usual = _USUAL.match(self._raw, self._at)
        if usual is None:
            return None
        self._at = usual.end()
        dtype, sizes, begin, end = usual.groups()
        return dtype, sizes, int(begin), int(end)

    def value(self, name: str) -> Any:
        """Read any value of at most `MAX_ENTRY` bytes."""
        self._peek()
        window = self._raw[self._at : self._at + MAX_ENTRY]
        part = codecs.getincrementaldecoder("utf-8")().decode(window)  # whose last character may be cut
        try:
            value, length = _decoder.raw_decode(part)
        except json.JSONDecodeError as error:
            if len(window) == MAX_ENTRY:
                raise CheckpointError(
                    f"tensor {name[:200]!r} has more than dtype, shape and data_offsets."
                ) from None
            raise ValueError(f"{error.msg} at byte {self._at + len(part[: error.pos].encode())}") from None
        self._at += len(part[:length].encode())
        return value

    def end(self) -> None:
        """Raise ValueError unless only spaces follow."""
        if self._peek():
            raise ValueError(f"there is more after its end, at byte {self._at}")

    def _peek(self) -> bytes | bytearray:
        """The next character that is not a space; empty at the end."""
        character = self._raw[self._at : self._at + 1]
        if character not in _SPACES:  # as in nearly every file
            return character
        space = _SPACE.match(self._raw, self._at)
        self._at = space.end() if space else self._at
        return self._raw[self._at : self._at + 1]

    def _skip(self, character: bytes) -> None:
        if self._peek() != character:
            raise ValueError(f"{character.decode()!r} is expected at byte {self._at}")
        self._at += 1


def require_short(nbytes: int, raw: bytes | bytearray, start: int = 0) -> None:
    """Raise a CheckpointError for a text in bytes that would take too much memory."""
    if nbytes > MAX_TEXT or (nbytes > MAX_RARE_TEXT and not raw[start : start + nbytes].isascii()):
        raise CheckpointError(f"the header has a text of {nbytes:,} bytes, which no model has.")


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
