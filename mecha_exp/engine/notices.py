"""What is odd about a merge and not wrong: a line for each thing, which says what kind of thing it is."""

from __future__ import annotations

import enum


class About(enum.Enum):
    """What a notice is about."""

    MERGE = "merge"
    """Anything else that concerns the merge as a whole."""
    EXTRA_KEYS = "extra keys"
    """Keys of an input that its model config does not know."""
    NONFINITE_OUTPUT = "non-finite output"
    """Values of one output that are NaN or infinite."""


class Notice(str):
    """A warning in words; `about` tells those apart that a caller may not want to see."""

    __slots__ = ("about",)
    about: About

    def __new__(cls, text: str, about: About = About.MERGE) -> Notice:
        notice = super().__new__(cls, text)
        notice.about = about
        return notice
