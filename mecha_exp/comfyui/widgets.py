"""From a hyperparameter's declaration to a widget of ComfyUI, and from its value to an argument."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mecha_exp.errors import ConfigError
from mecha_exp.method_api.parameters import Bounds, ParameterSpec

Widget = tuple[Any, dict[str, Any]]
"""A type, or a list of choices, and its options."""

RECIPE = "MECHA_RECIPE"
"""The type of sockets that carry a recipe, of which a model is one."""

BLOCKS = "MECHA_BLOCKS"
"""The type of sockets that carry values by block."""

_WIDEST = 100.0  # how far a number without bounds goes
_MOST = 2**53  # a whole number that a browser still holds exactly
_STEP = 0.01
_NONE = "none"


def widget_of(spec: ParameterSpec) -> Widget:
    """The widget of a hyperparameter: a slider where both ends of its range are known."""
    about = {"tooltip": spec.help}
    if choices := _choices(spec):
        words = [_word(choice) for choice in choices]
        words = [_NONE, *words] if spec.default is None else words
        return words, {"default": words[0] if spec.required else _word(spec.default), **about}
    if spec.interface is bool:
        return "BOOLEAN", {"default": bool(spec.default), **about}
    if _is_text(spec):
        text = "" if spec.required or spec.default is None else str(spec.default)
        return "STRING", {"default": text, **about}
    low, high = _ends(spec.bounds)
    default = min(max(0.5, low), high) if spec.required else spec.default
    if spec.interface is int:
        return "INT", {
            "default": int(default),
            "min": int(max(low, -_MOST)),
            "max": int(min(high, _MOST)),
            **about,
        }
    step = min(_STEP, abs(default) or _STEP)  # tolerances such as 1e-6 move in steps of themselves
    is_slider = math.isfinite(low) and math.isfinite(high) and step == _STEP
    options: dict[str, Any] = {"display": "slider"} if is_slider else {}
    ends = {"min": max(low, -_WIDEST), "max": min(high, _WIDEST)}
    return "FLOAT", {"default": float(default), **ends, "step": step, "round": False, **options, **about}


def argument_of(spec: ParameterSpec, value: Any) -> Any:
    """The argument for a widget's value.

    Raises:
        ConfigError: a text that is not the numbers that are expected, or is empty without a default.
    """
    if choices := _choices(spec):
        return next((choice for choice in choices if _word(choice) == value), None)
    if not isinstance(value, str):
        return value
    text = value.strip()
    if spec.required and not text:
        raise ConfigError(f"{spec.name} is empty, and it has no default: {spec.help}.")
    if not text or text == _NONE:
        return None if spec.default is None else spec.default
    if spec.interface in (str, Path):
        return text
    kind, what = (
        (int, "a whole number") if spec.interface is int else (float, "numbers with commas between them")
    )
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{spec.name}: expected {what}, got '{text}'.") from None
    return numbers if len(numbers) > 1 else numbers[0]


def takes_blocks(spec: ParameterSpec) -> bool:
    """Whether a hyperparameter is a number that may differ by block."""
    return not spec.choices and not _is_text(spec) and spec.interface not in (bool, int)


def _choices(spec: ParameterSpec) -> Sequence[Any]:
    """What a menu offers; a flag that may be none as well is one."""
    is_flag_or_none = spec.interface is bool and spec.default is None
    return (True, False) if is_flag_or_none else spec.choices


def _is_text(spec: ParameterSpec) -> bool:
    """Whether no other widget holds the values: texts, lists, none, infinity."""
    has_number = spec.required or (
        isinstance(spec.default, int | float) and math.isfinite(float(spec.default))
    )
    return spec.interface in (str, list) or not has_number


def _ends(bounds: Bounds) -> tuple[float, float]:
    """The least and the greatest value of a widget; the method itself refuses an end that is left out."""
    low = bounds.gt if bounds.ge is None else bounds.ge
    high = bounds.lt if bounds.le is None else bounds.le
    return -math.inf if low is None else low, math.inf if high is None else high


def _word(choice: Any) -> str:
    return _NONE if choice is None else choice if isinstance(choice, str) else str(choice).lower()
