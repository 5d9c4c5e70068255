"""The licences of models, as the cards and licence files beside their weights say them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mecha_exp.checkpoint.sidecars import CARD, MAX_FRONT_MATTER, is_own_card
from mecha_exp.documents import DocumentError, parse_yaml

OTHER = "other"
"""The word of the hub for a licence that is not in its list; its name stands beside it."""

_TEXTS = {
    "apache-2.0": re.compile(
        r"(copyright [^.]+\. all rights reserved\. )?"
        r"apache license version 2\.0, january 2004 .*"
        r"end of terms and conditions( appendix: how to apply .*)?"
    ),
    "mit": re.compile(r"((the )?mit license|copyright|permission is) .*without restriction.* software\."),
}
"""Licences by the beginning and the end of their texts, for folders without a card."""


@dataclass(frozen=True)
class Licence:
    """What a model may be used for, in the words of the hub.

    Attributes:
        word: the hub's word for it, such as `apache-2.0` or `other`; empty where only a file has it.
        name, link: of one that the hub has no word for.
    """

    word: str
    name: str = ""
    link: str = ""

    def __str__(self) -> str:
        return self.name or self.word or "see its licence file"

    @property
    def front_matter(self) -> dict[str, str]:
        """The entries of a card's front matter."""
        entries = {"license": self.word, "license_name": self.name, "license_link": self.link}
        return {entry: value for entry, value in entries.items() if value}


def licence_of(folder: Path) -> Licence | None:
    """The licence of a model in a folder: what its card says, or else its licence file; None without both.

    A text that is not known to the end, or one of several files, tells no licence: it may hold for the code
    alone.
    """
    content = front_matter_of(folder / CARD)
    word = content.get("license")
    if isinstance(word, str) and word:
        name, link = (str(content.get(f"license_{part}") or "") for part in ("name", "link"))
        return Licence(word, name, link)
    if is_own_card(folder / CARD):
        return None  # the licence file beside it was copied from one of several inputs
    files = sorted(file for file in folder.glob("LICENSE*") if file.is_file())
    if len(files) > 1:
        return Licence("")
    return _by_text(files[0]) if files else None


def front_matter_of(card: Path) -> Mapping[str, Any]:
    """The YAML at the beginning of a model card; empty where there is none that can be read."""
    try:
        with card.open(encoding="utf-8", errors="replace") as file:
            opening = file.read(MAX_FRONT_MATTER)
        start, _, rest = opening.partition("\n")
        content = parse_yaml(rest.partition("\n---")[0]) if start.rstrip() == "---" else None
    except (OSError, DocumentError):
        return {}
    return content if isinstance(content, dict) else {}


def _by_text(file: Path) -> Licence:
    try:
        with file.open(encoding="utf-8", errors="replace") as opened:
            text = " ".join(opened.read(MAX_FRONT_MATTER).lower().split())
    except OSError:
        text = ""
    known = (word for word, pattern in _TEXTS.items() if pattern.fullmatch(text))
    return Licence(next(known, ""))
