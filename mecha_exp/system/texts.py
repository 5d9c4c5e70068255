"""Texts for where they go: CSV, Markdown, names of files; and hashes that are the same on every system."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Rows as the text of a CSV file, whose first row has the names of the columns."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


_MARKDOWN = re.compile(
    r"[\\`*\[\]<>~&#$@]|(?<![^\W_])_|_(?![^\W_])|(?<=http):|(?<=https):|(?<=ftp):|(?<=www)\.", re.IGNORECASE
)
"""What Markdown may take for itself in the middle of a line: marks, links, addresses, formulas."""
_FIRST = re.compile(r"^(\d*)([-+=.)])(?=[\s=-]|$)")
"""What makes a list, a line or a heading at the beginning of a line."""
_UNFIT = re.compile(r"[^\w.=+@-]")


def one_line(text: object) -> str:
    """A text in one line, without characters that control a terminal or cannot be encoded.

    >>> one_line("a" + chr(10) + "b" + chr(27))
    'a b '
    """
    return "".join(c if unicodedata.category(c)[0] not in "CZ" or c == " " else " " for c in str(text))


def markdown_text(text: object) -> str:
    r"""A text for Markdown, in one line: it makes no heading, list, link, mark or HTML.

    >>> markdown_text("<b> [a](b) *c* a_b")
    '\\<b\\> \\[a\\](b) \\*c\\* a_b'
    """
    escaped = _MARKDOWN.sub(r"\\\g<0>", one_line(text).strip())
    return _FIRST.sub(r"\1\\\2", escaped)


def markdown_code(text: object) -> str:
    """A text as code in a line of Markdown.

    >>> markdown_code("a`b")
    '``a`b``'
    """
    plain = one_line(text)
    marks = "`" * (1 + max(map(len, re.findall("`+", plain)), default=0))
    space = " " if plain.startswith("`") or plain.endswith("`") or not plain.strip() else ""
    return f"{marks}{space}{plain}{space}{marks}"


def markdown_block(text: str, language: str) -> str:
    """A text of several lines as a block of code in Markdown."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text.strip(chr(10))}\n{fence}\n"


def markdown_table(rows: Iterable[Iterable[str]], marks: Sequence[str] = ()) -> str:
    """Rows of Markdown as a table, whose first row has the names of the columns; `marks` align them."""
    lines = ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
    columns = marks or ["---"] * (len(re.findall(r"(?<!\\)\|", lines[0])) - 1)
    return "\n".join([lines[0], f"| {' | '.join(columns)} |", *lines[1:]])


def _cell(text: str) -> str:
    """A cell of a table: a bar ends it, but for one after an odd number of backslashes."""
    return re.sub(r"(\\*)\|", lambda bar: bar[0] if len(bar[1]) % 2 else f"{bar[1]}\\|", text)


def file_name(text: str) -> str:
    """A name for a file or folder that stands for a text, another one for each text.

    >>> file_name("base"), file_name("a b") == file_name("a_b")
    ('base', False)
    """
    plain = _UNFIT.sub("_", text)[:100]
    if plain == text and text.strip("."):
        return text
    return f"{plain.strip('.')}-{hashlib.sha256(text.encode(errors='backslashreplace')).hexdigest()[:8]}"


def json_hash(value: Any, **options: Any) -> str:
    """The SHA-256 of a value in JSON, in hexadecimal; options as for `json.dumps`."""
    return hashlib.sha256(json.dumps(value, **options).encode()).hexdigest()
