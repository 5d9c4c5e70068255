"""Values of records as text and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mecha_exp.numbers import is_number, number_in

Value = float | int | bool | str | None


def parse_value(text: str) -> Value:
    """The value of an override: None, bool, int, float, or else string.

    >>> [parse_value(text) for text in ("0.30", "3", "true", "ties", "")]
    [0.3, 3, True, 'ties', None]
    """
    if not text:
        return None
    if text in ("true", "false"):
        return text == "true"
    number = number_in(text)
    return text.strip("'\"") if number is None else number


ALL_DIGITS = 14
"""The significant digits that tell the values of a swept key apart, without the rounding of a sum."""


def as_text(value: Any, digits: int = 6) -> str:
    """A value as text for people: floats with so many significant digits, an empty string for None.

    >>> as_text(0.30000000000000004), as_text(True), as_text(None)
    ('0.3', 'true', '')
    >>> as_text(0.50000002), as_text(0.50000002, ALL_DIGITS)
    ('0.5', '0.50000002')
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def is_numeric(values: Iterable[Value]) -> bool:
    """Whether all values that are not None are int or float, and some are."""
    present = [value for value in values if value is not None]
    return bool(present) and all(map(is_number, present))
