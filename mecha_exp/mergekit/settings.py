"""Values in mergekit's configurations: numbers, gradients over the layers, filters by the names of keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from mecha_exp.errors import ConfigError, Problems, brief, did_you_mean

Scalar: TypeAlias = "float | int | bool"
_Entry = TypeVar("_Entry")
_Read = TypeVar("_Read")

NUMBER, INTEGER, FLAG = "number", "whole number", "true or false"
"""The kinds of values."""

EVERY_KEY = "*"
"""The filter that every key passes."""

_RULE_WORDS = ("filter", "value")
_FLAGS = {"true": True, "false": False, "1": True, "0": False}
_DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Rule:
    """The values for the keys that pass a filter.

    Attributes:
        filter: a part of the name of a key; None lets all pass.
        values: one value, or the points of a gradient over the layers.
    """

    filter: str | None
    values: tuple[Scalar, ...]

    def holds(self, key: str) -> bool:
        """Whether a key passes the filter."""
        return self.filter is None or self.filter == EVERY_KEY or self.filter in key


@dataclass(frozen=True)
class Setting:
    """The value of a parameter in one place of a configuration.

    Attributes:
        rules: the first that holds a key decides.
        kind: of the values.
        where: its place in the configuration, for messages.
    """

    rules: tuple[Rule, ...]
    kind: str
    where: str

    @property
    def has_gradient(self) -> bool:
        """Whether the value changes over the layers."""
        return any(len(rule.values) > 1 for rule in self.rules)

    @property
    def varies(self) -> bool:
        """Whether keys may have different values."""
        return self.has_gradient or any(rule.filter not in (None, EVERY_KEY) for rule in self.rules)

    @property
    def is_for_all(self) -> bool:
        """Whether every key has a value, so that what stands further from an input does not count."""
        return any(rule.values for rule in self.rules if rule.filter in (None, EVERY_KEY))

    def at(self, key: str, depth: float) -> Scalar | None:
        """The value for a key, or None where no rule holds it.

        Args:
            depth: 0 at the first layer of a slice and 1 at the last; 0 outside the layers.
        """
        rule = next((rule for rule in self.rules if rule.holds(key)), None)
        return None if rule is None or not rule.values else self._on_gradient(rule.values, depth)

    def _on_gradient(self, points: tuple[Scalar, ...], depth: float) -> Scalar:
        position = depth * (len(points) - 1)
        before = int(position)
        if self.kind == FLAG or len(points) == 1:
            return points[before]
        share = position - before
        value = (1 - share) * points[before] + share * points[min(before + 1, len(points) - 1)]
        if self.kind == INTEGER:
            return _scalar(value, INTEGER, f"{self.where}, between its points")
        return value


Settings: TypeAlias = "Mapping[str, Setting]"
"""The parameters of one place in a configuration, by name."""


def read_settings(config: Any, kinds: Mapping[str, str], where: str, method: str) -> dict[str, Setting]:
    """Read a section `parameters` of a configuration.

    Args:
        config: the section; None for an absent one.
        kinds: the kind of each parameter that the method has.
        where: the place of the section, for messages.
        method: the name of the merge method, for messages.

    Raises:
        ConfigError: all parameters that the method does not have, and all values that cannot be read.
    """
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where}: expected a mapping of parameters, got {brief(config)}.")

    def setting(name: str) -> Setting:
        if name not in kinds:
            raise ConfigError(
                f"{where}.{name}: {method} has no such parameter, and mergekit would ignore it. Remove it, "
                f"or mend its name.{did_you_mean(name, kinds)}"
            )
        return read_setting(values[name], kinds[name], f"{where}.{name}")

    values = {str(name): value for name, value in config.items()}
    return dict(zip(values, read_each(setting, values), strict=True))


def read_setting(value: Any, kind: str, where: str) -> Setting:
    """Read the value of a parameter: a scalar, a gradient, or a list of filters with values."""
    if isinstance(value, Mapping):
        value = [value]
    if isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
        rules = read_each(lambda rule: _rule(rule[1], kind, f"{where}[{rule[0]}]"), enumerate(value))
        return Setting(tuple(rules), kind, where)
    return Setting((Rule(None, _points(value, kind, where)),), kind, where)


def first_value(settings: Iterable[Setting], key: str, depth: float) -> Scalar | None:
    """The value of the first setting that has one for a key; None where none has."""
    return next((value for s in settings if (value := s.at(key, depth)) is not None), None)


def check_known(config: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Check that the words of a section are known; ConfigError names those that are not."""
    problems = Problems()
    problems.add_all(
        f"{where}: unknown word {word!r}.{did_you_mean(str(word), known)}"
        for word in config
        if word not in known
    )
    problems.raise_as(ConfigError)


def read_each(read: Callable[[_Entry], _Read], entries: Iterable[_Entry]) -> list[_Read]:
    """What a function reads in each entry; one ConfigError for all that cannot be read."""
    problems = Problems()
    results = []
    for entry in entries:
        with problems.collected(ConfigError):
            results.append(read(entry))
    problems.raise_as(ConfigError)
    return results


def read_entries(config: Any, where: str) -> list[Mapping[str, Any]]:
    """The mappings of a list, of which there is one at least.

    Raises:
        ConfigError: it is not such a list.
    """
    if not isinstance(config, list) or not config or not all(isinstance(e, Mapping) for e in config):
        raise ConfigError(f"{where}: expected a list of mappings, got {brief(config)}.")
    return config


def output_dtype(config: Mapping[str, Any]) -> str | None:
    """The dtype that a configuration says for its output; ConfigError for those that are not known."""

    def dtype(word: str) -> str:
        name = str(config[word]).removeprefix("torch.")
        if name not in _DTYPES:
            raise ConfigError(f"{word}: unknown dtype {config[word]!r}.{did_you_mean(name, _DTYPES)}")
        return name

    dtypes = read_each(dtype, (word for word in ("dtype", "out_dtype") if config.get(word) is not None))
    return dtypes[-1] if dtypes else None


def _rule(entry: Mapping[str, Any], kind: str, where: str) -> Rule:
    check_known(entry, _RULE_WORDS, where)
    if "value" not in entry:
        raise ConfigError(f"{where}: a filter needs a 'value' beside it.")
    part = entry.get("filter")
    if part is not None and not isinstance(part, str):
        raise ConfigError(f"{where}.filter: expected a part of the names of keys, got {brief(part)}.")
    return Rule(part, _points(entry["value"], kind, f"{where}.value"))


def _points(value: Any, kind: str, where: str) -> tuple[Scalar, ...]:
    points = value if isinstance(value, list) else [value]
    return tuple(_scalar(point, kind, where) for point in points)


def _scalar(value: Any, kind: str, where: str) -> Scalar:
    """A value of a kind. YAML reads `1e-5` as a string, so strings that are numbers are taken for such."""
    if kind == FLAG:
        flag = value if isinstance(value, bool) else _FLAGS.get(str(value).lower())
        if flag is None:
            raise ConfigError(f"{where}: expected true or false, got {brief(value)}.")
        return flag
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or (kind == INTEGER and not number.is_integer()):
        raise ConfigError(f"{where}: expected a {kind}, got {brief(value)}.")
    return int(number) if kind == INTEGER else number
