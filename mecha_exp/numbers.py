"""What counts as a number where a person writes one: `true` does not, though a bool of Python is an int."""

from sys import float_info
from typing import TypeGuard

_LARGEST = int(float_info.max)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a float, or an int that a float can be, and not a bool."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) <= _LARGEST


def number_in(text: str) -> int | float | None:
    """The number that a text is; None where it is none.

    >>> number_in("3"), number_in("1e-3"), number_in("ties")
    (3, 0.001, None)
    """
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


def is_whole(value: object, least: int | None = None) -> TypeGuard[int]:
    """Whether a value is an int of at least `least` that a float can be, and not a bool."""
    return isinstance(value, int) and is_number(value) and (least is None or value >= least)
